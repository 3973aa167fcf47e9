"""Whether this process can do its work: the results of its checks, with reasons."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Literal

import msgspec

from everstep.clock import Clock
from everstep.errors import EverstepError
from everstep.observe.redaction import redact

log = logging.getLogger(__name__)

Check = Callable[[], Awaitable[None]]
"""Returns when the check passes; raises an `EverstepError` with the reason when it fails."""


class HealthCheckResult(msgspec.Struct, frozen=True, kw_only=True):
    ok: bool
    reason: str = ""
    took_ms: float


class HealthReport(msgspec.Struct, frozen=True, kw_only=True):
    status: Literal["ok", "failing"]
    service: str
    version: str
    checks: dict[str, HealthCheckResult]


class Health:
    """Runs all checks at once, when requested; at most once every `keep_s`."""

    def __init__(
        self,
        service: str,
        version: str,
        checks: Mapping[str, Check],
        clock: Clock,
        *,
        within_s: float = 2.0,
        keep_s: float = 1.0,
    ) -> None:
        self._service = service
        self._version = version
        self._checks = dict(checks)
        self._clock = clock
        self._within_s = within_s
        self._keep_s = keep_s
        self._lock = asyncio.Lock()
        self._last: tuple[float, HealthReport] | None = None

    async def report(self) -> HealthReport:
        """The answer of every check, at most `keep_s` old. Never raises."""
        # Under the lock, so that a thousand requests still cause one question to the bus.
        async with self._lock:
            if self._last is not None and self._clock.now() - self._last[0] < self._keep_s:
                return self._last[1]
            async with asyncio.TaskGroup() as tasks:
                running = {
                    name: tasks.create_task(self._result(name, check), name=f"check {name}")
                    for name, check in self._checks.items()
                }
            checks = {name: task.result() for name, task in running.items()}
            report = HealthReport(
                status="ok" if all(check.ok for check in checks.values()) else "failing",
                service=self._service,
                version=self._version,
                checks=checks,
            )
            self._last = (self._clock.now(), report)
            return report

    async def _result(self, name: str, check: Check) -> HealthCheckResult:
        began = self._clock.now()
        reason = ""
        try:
            async with asyncio.timeout(self._within_s):
                await check()
        except TimeoutError:
            reason = f"no answer within {self._within_s:g} s"
        except EverstepError as error:
            reason = redact(" ".join(str(error).split()))
        except Exception:
            log.exception("check_failed check=%s", name)
            reason = "the check itself failed; see the log of this process"
        took_ms = round((self._clock.now() - began) * 1000, 1)
        return HealthCheckResult(ok=not reason, reason=reason, took_ms=took_ms)
