"""The connection to rendezvous: reports and `join`, in order, repeated until they are answered."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import msgspec

from everstep.backoff import Backoff, jittered_s
from everstep.bus.errors import AskRefusedError, BusError
from everstep.bus.ports import Bus
from everstep.clock import Clock
from everstep.messages import Done, Join, Joined, Leave, Report, Reported
from everstep_services.agent.core.actions import SendReport

log = logging.getLogger(__name__)

SERVICE = "rendezvous"
_WITHIN_S = 5.0
_WAIT_FIRST_S, _WAIT_MOST_S = 0.05, 2.0
BUSY = {"500", "502", "503"}
"""Codes of answers that may be different next time; any other code is final."""


@dataclass(frozen=True, slots=True)
class UnsentReport:
    """A report, and when it happened."""

    tell: SendReport
    report: Report
    at: float


class AnswerListener(Protocol):
    """Hears the answers of rendezvous, and of its silence."""

    def joined(self, reply: Joined) -> None:
        """Rendezvous has answered a `join`."""

    def reported(self, tell: SendReport, reply: Reported) -> None:
        """Rendezvous has answered a report."""

    def refused(self, reason: str) -> None:
        """Rendezvous will never understand this agent."""

    def unanswered(self, for_s: float, reason: str) -> None:
        """Nobody has answered for this long."""


class RendezvousClient:
    """Asks one question at a time: reports first, in their order, then `join`."""

    def __init__(self, bus: Bus, clock: Clock, job: str, listener: AnswerListener) -> None:
        self._bus = bus
        self._clock = clock
        self._job = job
        self._listener = listener
        self._reports: deque[UnsentReport] = deque()
        self._join: Callable[[], Join] | None = None
        self._has_work = asyncio.Event()
        self._silent_since: float | None = None
        self._backoff = Backoff(_WAIT_FIRST_S, _WAIT_MOST_S)

    def tell(self, tell: SendReport, report: Report) -> None:
        """Queue a report."""
        self._reports.append(UnsentReport(tell, report, self._clock.now()))
        self._has_work.set()

    def join(self, make: Callable[[], Join]) -> None:
        """Queue a `join`; `make` builds it when it is sent, from the state at that moment."""
        self._join = make
        self._has_work.set()

    async def ask_for_ever(self) -> None:
        while True:
            await self._has_work.wait()
            await self._bus.wait_connected()
            try:
                await self._ask_next()
            except AskRefusedError as error:
                if error.code in BUSY:
                    await self._wait_after(error)
                else:
                    self._give_up(error)
            except (BusError, TimeoutError) as error:
                await self._wait_after(error)
            except Exception as error:
                log.exception("answer_failed")  # this answer made no sense to us; the next one may
                await self._wait_after(error)
            else:
                self._backoff.reset()
                self._silent_since = None
            if not self._reports and self._join is None:
                self._has_work.clear()

    async def leave(self, leave: Leave, within_s: float) -> None:
        """Take leave of rendezvous; the agent exits even without an answer."""
        try:
            async with asyncio.timeout(within_s):
                await self._bus.ask(SERVICE, "leave", leave, Done, job=self._job, within_s=within_s)
        except (BusError, TimeoutError) as error:
            log.info("goodbye_unheard error=%s", error)

    async def _ask_next(self) -> None:
        if self._reports:
            await self._report(self._reports[0])
            self._reports.popleft()
        elif self._join is not None:
            make = self._join
            reply = await self._bus.ask(
                SERVICE, "join", make(), Joined, job=self._job, within_s=_WITHIN_S
            )
            if self._join is make:  # no newer wish to join meanwhile
                self._join = None
            self._listener.joined(reply)

    async def _report(self, unsent: UnsentReport) -> None:
        age_s = round(self._clock.now() - unsent.at, 3)
        report = _aged(unsent.report, age_s)
        reply = await self._bus.ask(
            SERVICE, "report", report, Reported, job=self._job, within_s=_WITHIN_S
        )
        self._listener.reported(unsent.tell, reply)

    def _give_up(self, error: AskRefusedError) -> None:
        if self._reports:
            log.warning("report_refused error=%s", error)
            self._reports.popleft()
        else:
            self._join = None
            self._listener.refused(str(error))

    async def _wait_after(self, error: Exception) -> None:
        now = self._clock.now()
        if self._silent_since is None:
            self._silent_since = now
        text = str(error) or type(error).__name__
        self._listener.unanswered(now - self._silent_since, text)
        await self._clock.sleep(jittered_s(self._backoff.failed()))


def _aged(report: Report, age_s: float) -> Report:
    return msgspec.structs.replace(
        report,
        age_s=age_s,
        last_progress_age_s=None
        if report.last_progress_age_s is None
        else report.last_progress_age_s + age_s,
    )
