"""When this node is examined: before it joins, periodically, and on request."""

import asyncio
import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass

from everstep.clock import Clock
from everstep.messages import CheckResult, Fact, NodeCheckFinished, RunChecks
from everstep_services.agent.probes import registry
from everstep_services.agent.probes.runner.examiner import NodeExaminer
from everstep_services.agent.probes.verdicts import NodeExamination
from everstep_services.agent.telemetry.facts import AgentFacts

log = logging.getLogger(__name__)

_AGAIN_S = 15.0
"""A node that is not fit looks again soon: it may have become fit."""


@dataclass(frozen=True, slots=True)
class _Wanted:
    names: tuple[str, ...]
    occasion: str
    within_s: float | None = None


@dataclass(eq=False, repr=False)
class NodeChecks:
    """Runs one examination after the other; ranks and orders never wait for one."""

    _examiner: NodeExaminer
    _records: AgentFacts
    _clock: Clock
    _own_pids: Callable[[], Collection[int]]
    _record: Callable[[Fact], None]

    def __post_init__(self) -> None:
        self.failing: tuple[CheckResult, ...] = ()
        """The results of the last examination that are not `ok`."""
        self.nvlink_domain = ""
        """As the check `gpu` found it last; it does not change while the node is up."""
        self._told: tuple[tuple[str, str, str], ...] | None = None
        self._is_known = asyncio.Event()
        self._wanted: asyncio.Queue[_Wanted] = asyncio.Queue()

    async def known_within(self, seconds: float) -> None:
        """Wait for the first examination, but not for long: an unknown result harms nobody."""
        try:
            async with asyncio.timeout(seconds):
                await self._is_known.wait()
        except TimeoutError:
            log.info("checks_late waited_s=%g", seconds)

    def ask(self, order: RunChecks) -> None:
        """Rendezvous or health asks for an examination."""
        self._wanted.put_nowait(_Wanted(order.checks, order.occasion, order.within_s))

    async def examine_for_ever(self) -> None:
        """Examine at once, then periodically, and on request."""
        wanted = _Wanted((), "join")
        while True:
            await self._examine(wanted)
            self._is_known.set()
            wanted = await self._next()

    async def _next(self) -> _Wanted:
        is_unfit = any(result.state == "failed" for result in self.failing)
        settings = self._examiner.settings
        wait_s = min(_AGAIN_S, settings.every_s) if is_unfit else settings.every_s
        try:
            async with asyncio.timeout(wait_s):
                return await self._wanted.get()
        except TimeoutError:
            return _Wanted((), "periodic")

    async def _examine(self, wanted: _Wanted) -> None:
        usual = registry.beside_training(self._examiner.settings)
        try:
            names = registry.chosen(wanted.names, self._examiner.settings) or usual
        except registry.UnknownCheckError as error:
            log.warning("checks_unknown error=%s", error)
            return
        done = await self._examiner.examine(
            names, wanted.occasion, within_s=wanted.within_s, own_pids=self._own_pids()
        )
        self.nvlink_domain = done.nvlink_domain or self.nvlink_domain
        if not wanted.names:
            self.failing = tuple(result for result in done.results if result.state != "ok")
        if self._is_news(done, wanted):
            fact = NodeCheckFinished(
                **self._records.of_job(), node=self._records.node, occasion=done.occasion,
                is_healthy=done.is_healthy, took_s=done.took_s, results=done.worth_telling,
                checks=done.checks,
            )  # fmt: skip
            self._record(fact)

    def _is_news(self, done: NodeExamination, wanted: _Wanted) -> bool:
        """Whether to record an examination: a periodic one if it changed, or while a check fails.

        Health counts how often a check was seen to fail.
        """
        states = tuple(
            (result.check, result.subject, result.state)
            for result in done.results
            if result.state != "ok"
        )
        was, self._told = self._told, states
        has_failed = any(state == "failed" for _, _, state in states)
        return has_failed or wanted.occasion != "periodic" or states != was
