"""Sends spans to a collector of OpenTelemetry: OTLP over HTTP, as JSON, in batches.

Bounded, and losable: a collector that is away or slow costs spans, and nothing else.
"""

import asyncio
import json
import logging
import urllib.request
from collections import deque
from collections.abc import Iterable
from typing import Any

from everstep import __version__, spans
from everstep.clock import Clock
from everstep.spans import Span

log = logging.getLogger(__name__)

_WAITING_MOST = 4096
_BATCH = 512
_EVERY_S = 2.0
_WITHIN_S = 5.0
_AT_END_WITHIN_S = 1.0
_KINDS = {"server": 2, "client": 3}
_ERROR = 2


class SpanExporter:
    """The spans of this process, for one collector."""

    def __init__(self, url: str, service: str, clock: Clock) -> None:
        self._url = url
        self._service = service
        self._clock = clock
        self._waiting: deque[Span] = deque()
        self._counts = {"sent_total": 0, "dropped_total": 0}
        self._is_failing = False

    def statistics(self) -> dict[str, float]:
        """For `/metrics`."""
        return {name: float(count) for name, count in self._counts.items()}

    def take(self, span: Span) -> None:
        """Keep a span until it is sent; the oldest goes when there are too many."""
        if len(self._waiting) >= _WAITING_MOST:
            self._waiting.popleft()
            self._counts["dropped_total"] += 1
        self._waiting.append(span)

    async def export_for_ever(self) -> None:
        """Collect and send; at the end of the process, send what is left, if that is quick."""
        with spans.collected_by(self.take):
            try:
                while True:
                    await self._clock.sleep(_EVERY_S)
                    while self._waiting:
                        await self._send(_WITHIN_S)
            finally:
                while self._waiting and not self._is_failing:
                    await self._send(_AT_END_WITHIN_S)

    async def _send(self, within_s: float) -> None:
        batch = [self._waiting.popleft() for _ in range(min(_BATCH, len(self._waiting)))]
        body = json.dumps(otlp(self._service, batch)).encode()
        try:
            await asyncio.to_thread(_post, self._url, body, within_s)
        except (OSError, ValueError) as error:
            self._counts["dropped_total"] += len(batch)
            if not self._is_failing:
                log.info("traces_not_sent url=%s error=%s", self._url, error)
            self._is_failing = True
        else:
            self._counts["sent_total"] += len(batch)
            self._is_failing = False


def otlp(service: str, ended: Iterable[Span]) -> dict[str, Any]:
    """Spans as OTLP has them in JSON."""
    resource = {"service.name": f"everstep-{service}", "service.version": __version__}
    scope = {"scope": {"name": "everstep"}, "spans": [_span(span) for span in ended]}
    return {
        "resourceSpans": [
            {"resource": {"attributes": _attributes(resource)}, "scopeSpans": [scope]}
        ]
    }


def _span(span: Span) -> dict[str, Any]:
    return {
        "traceId": span.trace_id,
        "spanId": span.span_id,
        "parentSpanId": span.parent_id,
        "name": span.name,
        "kind": _KINDS[span.kind],
        "startTimeUnixNano": str(span.began_ns),
        "endTimeUnixNano": str(span.ended_ns),
        "attributes": _attributes(span.attributes),
        "status": {"code": _ERROR, "message": span.error} if span.error else {},
    }


def _attributes(values: Any) -> list[dict[str, Any]]:
    return [{"key": name, "value": {"stringValue": value}} for name, value in values.items()]


def _post(url: str, body: bytes, within_s: float) -> None:
    headers = {"Content-Type": "application/json", "User-Agent": f"everstep/{__version__}"}
    request = urllib.request.Request(url, body, headers)  # noqa: S310  http or https: see settings
    with urllib.request.urlopen(request, timeout=within_s) as answer:  # noqa: S310
        answer.read()
