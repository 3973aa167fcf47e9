"""The last beat of each agent: how ranks are now. Every replica hears beats; none stores them."""

from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from everstep import subjects
from everstep.bus.input_failures import InputFailures
from everstep.bus.ports import Bus
from everstep.clock import Clock
from everstep.messages import NodeBeat, ProbeBeat, RankBeat, SectionLimit

STALE_S = 3.0
"""Agents send a beat each second: after this silence a node is shown as stale."""
_LIMITS_LAST_S = 30.0
"""Agents send their limits every ten seconds."""
_FORGET_S = 900.0
_CAPACITY = 32_768


@dataclass(frozen=True, slots=True)
class HeardBeat:
    """The last beat of a node, and how long ago it came, by our own clock."""

    beat: NodeBeat
    age_s: float
    probes: tuple[ProbeBeat, ...] = ()
    """The probes of the node, as its agent told last: not every beat has them."""

    @property
    def is_stale(self) -> bool:
        """The beat is too old to show the present state."""
        return self.age_s >= STALE_S


@dataclass(frozen=True, slots=True)
class JobView:
    """The nodes of one job, by their last beats."""

    nodes: Sequence[HeardBeat]
    """Those that were heard within a quarter of an hour, by name."""
    round: int | None
    """The newest round that one of them takes part in."""
    ranks: Mapping[int, tuple[RankBeat, HeardBeat]]
    """The ranks of that round, each with the beat of its node."""


class Beats:
    """The last beat of every node of every job."""

    def __init__(self, bus: Bus, clock: Clock) -> None:
        self._bus = bus
        self._clock = clock
        self._began = clock.now()
        self._jobs: defaultdict[str, dict[str, tuple[NodeBeat, float]]] = defaultdict(dict)
        self._limits: dict[str, tuple[NodeBeat, float]] = {}
        """Of each job the last beat that told its limits."""
        self._probes: dict[tuple[str, str], tuple[ProbeBeat, ...]] = {}
        """Of each node, until its agent starts anew."""
        self._order: OrderedDict[tuple[str, str], float] = OrderedDict()
        """When each node was heard, the longest silent first."""
        self._input_failures = InputFailures("beats")

    @property
    def listening_s(self) -> float:
        """For how long we have listened: nothing from before is known."""
        return self._clock.now() - self._began

    def statistics(self) -> dict[str, float]:
        """What it holds, for metrics."""
        return {
            "nodes": float(len(self._order)),
            "input_failures_total": float(self._input_failures.failures),
        }

    async def hear_for_ever(self) -> None:
        """Take in every beat of every job."""
        async with self._bus.subscribe(subjects.beat(), NodeBeat, capacity=_CAPACITY) as beats:
            async for beat in beats:
                with self._input_failures.caught("a beat"):
                    self.hear(beat)

    def hear(self, beat: NodeBeat) -> None:
        """Take in a beat; nodes that were silent for long are forgotten."""
        now, key = self._clock.now(), (beat.job, beat.node)
        if beat.state == "leaving":
            self._forget(key)
            return
        before = self._jobs[beat.job].get(beat.node)
        if before is not None and beat.sequence < before[0].sequence:
            self._probes.pop(key, None)  # another agent, with other settings perhaps
        if beat.probes:
            self._probes[key] = beat.probes
        self._jobs[beat.job][beat.node] = (beat, now)
        if beat.limits:
            self._limits[beat.job] = (beat, now)
        self._order[key] = now
        self._order.move_to_end(key)
        while (oldest := next(iter(self._order))) != key and now - self._order[oldest] > _FORGET_S:
            self._forget(oldest)

    def view(self, job: str) -> JobView:
        """The nodes and ranks of the job, by their last beats."""
        nodes_of_job = self._jobs.get(job, {})
        nodes = [self._heard(*nodes_of_job[name]) for name in sorted(nodes_of_job)]
        nodes = [node for node in nodes if node.age_s <= _FORGET_S]
        fresh = [node for node in nodes if not node.is_stale] or nodes
        rounds = [
            heard.beat.round for heard in fresh if heard.beat.round is not None and heard.beat.ranks
        ]
        newest = max(rounds, default=None)
        here = [node for node in nodes if node.beat.round == newest]
        return JobView(
            nodes, newest, {rank.rank: (rank, heard) for heard in here for rank in heard.beat.ranks}
        )

    def limits(self, job: str) -> tuple[SectionLimit, ...]:
        """The limits that can act on its ranks now, as an agent says; none while no ranks run."""
        beat, at = self._limits.get(job, (None, 0.0))
        if beat is None or self._clock.now() - at > _LIMITS_LAST_S:
            return ()
        return beat.limits

    def node(self, name: str) -> HeardBeat | None:
        """The newest beat of a node, in any job."""
        beats = [self._heard(*nodes[name]) for nodes in self._jobs.values() if name in nodes]
        return min(beats, key=lambda one: one.age_s, default=None)

    def _heard(self, beat: NodeBeat, at: float) -> HeardBeat:
        probes = self._probes.get((beat.job, beat.node), ())
        return HeardBeat(beat, max(0.0, self._clock.now() - at), probes)

    def _forget(self, key: tuple[str, str]) -> None:
        job, node = key
        self._order.pop(key, None)
        self._probes.pop(key, None)
        nodes = self._jobs.get(job, {})
        nodes.pop(node, None)
        if not nodes:
            self._jobs.pop(job, None)
            self._limits.pop(job, None)
