"""Examines this node in a process of its own, within a time limit, whatever happens there."""

import asyncio
import logging
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from everstep.messages.facts.health import CheckResult
from everstep_services.agent.probes import registry
from everstep_services.agent.probes.runner.checks_process import ChecksProcess
from everstep_services.agent.probes.runner.protocol import (
    CheckBegan,
    CheckEnded,
    CheckFound,
    ChecksDone,
    Line,
    Request,
)
from everstep_services.agent.probes.settings import ChecksSettings
from everstep_services.agent.probes.verdicts import NodeExamination, worst_first

log = logging.getLogger(__name__)

_DONE_WITHIN_S = 0.5
"""How much later than its checks the process may send its last line."""


@dataclass(frozen=True, slots=True)
class NodeExaminer:
    """Examines this node. No failure of a check is raised here."""

    settings: ChecksSettings
    notes: Path | None = None
    """The file for the notes of checks, for this node alone."""
    root: Path = Path("/")

    async def examine(
        self,
        names: Sequence[str],
        occasion: str,
        *,
        within_s: float | None = None,
        own_pids: Collection[int] = (),
    ) -> NodeExamination:
        """Run these checks in parallel. A check that has not answered in time is `unknown`.

        On cancellation it leaves no process behind.
        """
        began = time.monotonic()
        limit_s = self.settings.all_within_s if within_s is None else within_s
        heard = _Heard(tuple(names))
        request = Request(
            names=tuple(names),
            settings=self.settings,
            notes=self.notes,
            until=began + limit_s,
            root=self.root,
            own_pids=tuple(own_pids),
        )
        ending = await _carry_out(request, heard)
        for name in heard.open:
            heard.results.append(self._unanswered(name, ending, limit_s))
        if heard.trouble:
            log.warning("check_notes_lost reason=%r", heard.trouble)
        took_s = round(time.monotonic() - began, 3)
        return NodeExamination(occasion, heard.checks, worst_first(heard.results), took_s)

    def _unanswered(self, name: str, ending: str, limit_s: float) -> CheckResult:
        shorter_s = min(registry.deadline_s(name, self.settings), limit_s)
        reason = ending or f"it did not answer within {shorter_s:g} s"
        return CheckResult(check=name, state="unknown", reason=reason)


class _Heard:
    """What the process has reported so far."""

    def __init__(self, names: Sequence[str]) -> None:
        self.open = dict.fromkeys(names)
        """Checks that have not finished."""
        self.results: list[CheckResult] = []
        self.is_done = False
        self.trouble = ""
        self._seen = dict.fromkeys(names)

    def take(self, line: Line) -> None:
        match line:
            case CheckBegan(check=name):
                self.open[name] = self._seen[name] = None
            case CheckFound(result=result):
                self.results.append(result)
            case CheckEnded(check=name):
                self.open.pop(name, None)
            case ChecksDone(trouble=trouble):
                self.is_done, self.trouble = True, trouble

    @property
    def checks(self) -> tuple[str, ...]:
        """All that ran; `site` only stands for others."""
        return tuple(name for name in self._seen if name != registry.SITE)


async def _carry_out(request: Request, heard: _Heard) -> str:
    """Run it; return why the process failed, if that is why checks have not answered."""
    try:
        process = await asyncio.to_thread(ChecksProcess.begin, request)
    except OSError as error:
        return f"its process cannot be started: {error.strerror}"
    until = asyncio.get_running_loop().time() + request.until - time.monotonic() + _DONE_WITHIN_S
    try:
        async with asyncio.timeout_at(until):
            await process.listen(heard.take)
    except TimeoutError:
        return ""
    finally:
        await process.end()
    return "" if heard.is_done else f"its process ended early: {process.last_words}"
