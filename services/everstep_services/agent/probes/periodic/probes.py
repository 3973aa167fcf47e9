"""Runs the probes of this node in parallel with its ranks, and acts on those that fail."""

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path

from msgspec.structs import replace

from everstep.clock import Clock
from everstep.messages import CheckResult, Fact, NodeBeat, NodeCheckFinished, ProbeBeat, RunChecks
from everstep_services.agent.core.actions import Action
from everstep_services.agent.core.agent import Agent
from everstep_services.agent.probes.periodic.history import ProbeChange, ProbeHistory
from everstep_services.agent.probes.periodic.schedule import ProbeSchedule
from everstep_services.agent.probes.periodic.workers import ProbeWorkers
from everstep_services.agent.probes.runner.process import ProbeRun
from everstep_services.agent.probes.settings import ChecksSettings, ProbeSettings
from everstep_services.agent.probes.verdicts import state_of
from everstep_services.agent.telemetry.facts import AgentFacts

_PROBES_EVERY = 10
"""Beats."""

log = logging.getLogger(__name__)


class PeriodicProbes:
    """The probes of one node. A slow or stuck probe delays neither ranks nor the agent."""

    def __init__(  # noqa: PLR0913  each is a port or what was asked for
        self,
        settings: ChecksSettings,
        notes: Path,
        node: str,
        clock: Clock,
        records: AgentFacts,
        own_pids: Callable[[], Collection[int]],
        record: Callable[[Fact], None],
        say: Callable[[str], None],
        examined: Callable[[], Iterable[CheckResult]],
        agent: Agent | None = None,
        do: Callable[[Sequence[Action]], None] = lambda _: None,
    ) -> None:
        """`agent` decides what follows from probes, and `do` carries it out."""
        probes = settings.probes_to_run()
        self._settings: dict[str, ProbeSettings] = dict(probes)
        self._clock = clock
        self._records = records
        self._own_pids = own_pids
        self._record = record
        self._say = say
        self._examined = examined
        self._agent = agent
        self._do = do
        self._history = ProbeHistory(probes)
        share = settings.probe_cpu_percent / 100
        self._schedule = ProbeSchedule(probes, share, node, clock.now())
        self._most = settings.probes_at_once
        self._running = 0
        self._workers = ProbeWorkers(settings, notes, Path("/"), self._most)
        self._wanted: asyncio.Queue[RunChecks] = asyncio.Queue()
        self._due = asyncio.Event()
        self._unfit: set[str] = set()
        self._unknown: set[str] = set()
        self._slow: set[str] = set()
        self._beaten: tuple[ProbeBeat, ...] = ()

    @property
    def failing(self) -> tuple[CheckResult, ...]:
        """The failures for which a round was ended: until they are over, the node is not fit."""
        failing = self._history.failing
        return tuple(result for name in sorted(self._unfit) for result in failing.get(name, ()))

    @property
    def failed(self) -> tuple[str, ...]:
        """The names of all probes that have failed and not recovered."""
        return tuple(sorted(self._history.failing))

    @property
    def cpu_ratio(self) -> float:
        """The processor time of probes since the agent started, 1 for a whole core."""
        return round(self._schedule.cpu_ratio(self._clock.now()), 5)

    def with_probes(self, beat: NodeBeat) -> NodeBeat:
        """The beat with the state of the probes; all of them in every tenth, and after a change."""
        probes = self._history.beats
        is_due = probes != self._beaten or not beat.sequence % _PROBES_EVERY
        self._beaten = probes
        return replace(
            beat,
            probes_failed=self.failed,
            probe_cpu_ratio=self.cpu_ratio,
            probes=probes if is_due else (),
        )

    def round_ended(self, check: str) -> None:
        """A round was ended since this check fails here: the node is unfit until it passes.

        An older release of rendezvous does not name the check: then all that fail here are meant.
        """
        for name, results in self._history.failing.items():
            policy = self._settings[name].policy
            if policy == "observe" or name in self._unfit or check not in {name, ""}:
                continue
            self._unfit.add(name)
            fact = NodeCheckFinished(
                **self._records.of_job(), node=self._records.node, occasion="probe",
                is_healthy=False, took_s=0.0, results=results, checks=(name,), policy=policy,
                failures=self._history.failures(name), cpu_ratio=self.cpu_ratio, is_acted_on=True,
            )  # fmt: skip
            self._record(fact)

    def compare(self, order: RunChecks) -> None:
        """Rendezvous wants to know whether a check fails on this node, too."""
        self._wanted.put_nowait(order)

    async def probe_for_ever(self) -> None:
        """Run probes as they become due, and when they are compared."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._compare_for_ever(), name="probe comparisons")
                while True:
                    now = self._clock.now()
                    for name in self._schedule.due(now, self._most - self._running):
                        self._schedule.started(name, now)
                        self._running += 1
                        tasks.create_task(self._probe(name), name=f"probe {name}")
                    await self._wait(now)
        finally:
            await self._workers.end()

    async def _wait(self, now: float) -> None:
        """Wait until a probe is due and may run, or one has ended."""
        self._due.clear()
        wake_at = self._schedule.wake_at if self._running < self._most else None
        try:
            async with asyncio.timeout(None if wake_at is None else max(wake_at - now, 0.0)):
                await self._due.wait()
        except TimeoutError:
            pass

    async def _probe(self, name: str) -> None:
        cpu_s = 0.0
        try:
            run = await self._workers.run(name, self._settings[name].within_s, self._own_pids())
            cpu_s = run.cpu_s
            self._schedule.workers_started(run.start_cpu_s)
            self._take(name, run)
        finally:
            self._running -= 1
            every_s = self._schedule.ended(name, self._clock.now(), cpu_s)
            if every_s is not None:
                self._report_cost(name, cpu_s, every_s)
            self._due.set()

    def _take(self, name: str, run: ProbeRun) -> None:
        self._report_unknown(name, run)
        change = self._history.take(name, run.results, self._clock.now())
        if change is None:
            return
        fact = NodeCheckFinished(
            **self._records.of_job(), node=self._records.node, occasion="probe",
            is_healthy=self._is_healthy(name), took_s=run.took_s, results=change.results,
            checks=(name,), policy=change.policy, failures=_failures(change),
            cpu_ratio=self.cpu_ratio,
        )  # fmt: skip
        self._record(fact)
        log.warning(
            "probe_%s check=%s policy=%s runs=%d reason=%r",
            change.kind, name, change.policy, change.runs, change.reason,
        )  # fmt: skip
        self._follow(change, fact.id)

    def _is_healthy(self, name: str) -> bool:
        """Whether neither a probe nor the last examination calls a part of this node failed."""
        others = (result for result in self._examined() if result.check != name)
        return not self._history.failing and all(result.state != "failed" for result in others)

    def _follow(self, change: ProbeChange, fact: str) -> None:
        """Show the change, and have the agent act on it where the policy wants that."""
        acts = self._agent is not None and change.policy != "observe"
        match change.kind:
            case "failed":
                wanted = "" if acts else " (it is only observed)"
                self._say(
                    f"probe {change.check} has failed {change.runs} times in a row{wanted}: "
                    f"{change.reason}"
                )
            case "recovered":
                self._unfit.discard(change.check)
                self._say(f"probe {change.check}: {change.reason}")
            case "flapping":
                self._say(f"probe {change.check}: {change.reason}")
            case "still_failing":
                pass
        if not acts or self._agent is None or change.kind == "flapping":
            return
        if change.kind == "recovered":
            self._do(self._agent.check_recovered(change.check, change.reason, fact))
        else:
            self._do(self._agent.check_failed(change.check, change.policy, change.reason, fact))

    def _report_unknown(self, name: str, run: ProbeRun) -> None:
        """Show once that a probe has no result, until it has one again."""
        if state_of(run.results) != "unknown":
            self._unknown.discard(name)
        elif name not in self._unknown:
            self._unknown.add(name)
            reason = run.results[0].reason
            log.info("probe_unknown check=%s reason=%r", name, reason)
            self._say(
                f"probe {name} has no result, which counts as neither failed nor ok: {reason}"
            )

    def _report_cost(self, name: str, cpu_s: float, every_s: float) -> None:
        if name in self._slow:
            return
        self._slow.add(name)
        log.info(
            "probe_costly check=%s cpu_s=%.3f every_s=%.0f wanted_s=%g",
            name, cpu_s, every_s, self._settings[name].every_s,
        )  # fmt: skip

    async def _compare_for_ever(self) -> None:
        while True:
            order = await self._wanted.get()
            for name in order.checks:
                run = await self._workers.run(name, order.within_s, self._own_pids())
                reason = run.results[0].reason if run.results else ""
                if self._agent is not None:
                    self._do(self._agent.check_compared(name, state_of(run.results), reason))


def _failures(change: ProbeChange) -> int:
    return change.runs if change.kind in {"failed", "still_failing"} else 0
