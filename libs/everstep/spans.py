"""Spans of questions and requests, for OpenTelemetry; nothing happens while nobody collects them.

The context travels as W3C's `traceparent`: in HTTP headers, in headers of NATS, and within a
process in a context variable, which tasks inherit.
"""

import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Literal

HEADER = "traceparent"
Kind = Literal["server", "client"]
_PARENT = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}")


@dataclass(slots=True)
class Span:
    """One stretch of work."""

    name: str
    kind: Kind
    trace_id: str
    parent_id: str
    attributes: Mapping[str, str]
    span_id: str = field(default_factory=lambda: secrets.token_hex(8))
    began_ns: int = field(default_factory=time.time_ns)
    ended_ns: int = 0
    error: str = ""

    @property
    def traceparent(self) -> str:
        """The context for work on behalf of this span."""
        return f"00-{self.trace_id}-{self.span_id}-01"


Sink = Callable[[Span], None]
_current: ContextVar[Span | None] = ContextVar("span", default=None)
_sinks: list[Sink] = []
_NOT_MEASURED = nullcontext()


@contextmanager
def collected_by(sink: Sink) -> Iterator[None]:
    """Give each span that ends to a sink, until the end of the block."""
    _sinks.append(sink)
    try:
        yield
    finally:
        _sinks.remove(sink)


def span(
    name: str, kind: Kind, attributes: Mapping[str, str], *, parent: str | None = None
) -> AbstractContextManager[None]:
    """Measure the block. `parent` is a `traceparent` from outside; a bad one begins a new trace."""
    return _measured(name, kind, attributes, parent) if _sinks else _NOT_MEASURED


@contextmanager
def _measured(
    name: str, kind: Kind, attributes: Mapping[str, str], parent: str | None
) -> Iterator[None]:
    made = Span(name, kind, *_context(parent), attributes)
    token = _current.set(made)
    try:
        yield
    except BaseException as error:
        made.error = f"{type(error).__name__}: {error}"[:500]
        raise
    finally:
        _current.reset(token)
        made.ended_ns = time.time_ns()
        for sink in _sinks:
            sink(made)


def headers() -> dict[str, str]:
    """The headers that carry the present context; none while nobody collects spans."""
    current = _current.get()
    return {} if current is None else {HEADER: current.traceparent}


def _context(parent: str | None) -> tuple[str, str]:
    """The trace and the parent of a new span."""
    match = None if parent is None else _PARENT.fullmatch(parent)
    if match is not None:
        return match[1], match[2]
    current = _current.get()
    if current is not None:
        return current.trace_id, current.span_id
    return secrets.token_hex(16), ""
