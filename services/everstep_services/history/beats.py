"""The last beat of each agent: how ranks are now. Every replica hears beats; none stores them."""

from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, Sequence
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
_CLOCK_WINDOW_S = 30.0
"""A clock is judged by the beat of such a time that came fastest: others may have waited."""
_CAPACITY = 32_768


@dataclass(slots=True)
class ClockWindow:
    """How far the clock of a node seems to be behind: the least of this window and the last one.

    A beat comes later than it was sent, and later still when the bus was away: so the least is
    nearest to the truth. A burst of beats that have waited never fills two windows.
    """

    began: float
    least_s: float
    before_s: float | None = None
    """The least of the window before; None in the first one."""

    def add(self, behind_s: float, now: float) -> None:
        """Take in by how much one beat was sent before it came."""
        if now - self.began >= _CLOCK_WINDOW_S:
            self.began, self.before_s, self.least_s = now, self.least_s, behind_s
        else:
            self.least_s = min(self.least_s, behind_s)

    @property
    def offset_s(self) -> float | None:
        """How far the clock is ahead of ours; negative if it is behind, None while unknown."""
        return None if self.before_s is None else -min(self.before_s, self.least_s)


@dataclass(frozen=True, slots=True)
class HeardBeat:
    """The last beat of a node, and how long ago it came, by our own clock."""

    beat: NodeBeat
    age_s: float
    probes: tuple[ProbeBeat, ...] = ()
    """The probes of the node, as its agent told last: not every beat has them."""
    clock_offset_s: float | None = None
    """How far the node's clock is ahead of ours; None while that is unknown."""

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

    def __init__(self, bus: Bus, clock: Clock, clock_offset_limit_s: float = 5.0) -> None:
        self._bus = bus
        self._clock = clock
        self._clock_offset_limit_s = clock_offset_limit_s
        self._began = clock.now()
        self._jobs: defaultdict[str, dict[str, tuple[NodeBeat, float]]] = defaultdict(dict)
        self._limits: dict[str, tuple[NodeBeat, float]] = {}
        """Of each job the last beat that told its limits."""
        self._probes: dict[tuple[str, str], tuple[ProbeBeat, ...]] = {}
        """Of each node, until its agent starts anew."""
        self._clocks: dict[tuple[str, str], ClockWindow] = {}
        """The same."""
        self._order: OrderedDict[tuple[str, str], float] = OrderedDict()
        """When each node was heard, the longest silent first."""
        self._input_failures = InputFailures("beats")

    @property
    def listening_s(self) -> float:
        """For how long we have listened: nothing from before is known."""
        return self._clock.now() - self._began

    def statistics(self) -> dict[str, float]:
        """What it holds, for metrics."""
        offsets = [abs(offset_s) for _, _, offset_s in self._offsets()]
        return {
            "nodes": float(len(self._order)),
            "wrong_clocks": float(len(self.wrong_clocks())),
            "clock_offset_most_seconds": round(max(offsets, default=0.0), 3),
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
            self._clocks.pop(key, None)
        if beat.probes:
            self._probes[key] = beat.probes
        self._jobs[beat.job][beat.node] = (beat, now)
        behind_s = (self._clock.wall() - beat.at).total_seconds()
        self._clocks.setdefault(key, ClockWindow(now, behind_s)).add(behind_s, now)
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

    def step(self, job: str, round: int | None) -> int | None:
        """The last step that a rank has made in this round, by beats that are not forgotten."""
        now = self._clock.now()
        return max(
            (
                rank.step
                for beat, at in self._jobs.get(job, {}).values()
                if beat.round == round and now - at <= _FORGET_S
                for rank in beat.ranks
                if rank.step is not None
            ),
            default=None,
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

    def is_wrong(self, clock_offset_s: float | None) -> bool:
        """Whether a clock is off by more than the setting allows."""
        return clock_offset_s is not None and abs(clock_offset_s) > self._clock_offset_limit_s

    def wrong_clocks(self) -> dict[str, float]:
        """How far each wrong clock is ahead of ours, by node, the worst first."""
        offsets = {node: offset_s for _, node, offset_s in self._offsets()}
        worst = sorted(offsets, key=lambda node: -abs(offsets[node]))
        return {node: offsets[node] for node in worst if self.is_wrong(offsets[node])}

    def _offsets(self) -> Iterator[tuple[str, str, float]]:
        """The offsets of the nodes that are heard, as far as they are known."""
        now = self._clock.now()
        for (job, node), window in self._clocks.items():
            offset_s = window.offset_s
            if offset_s is not None and now - self._order[job, node] < STALE_S:
                yield job, node, offset_s

    def _heard(self, beat: NodeBeat, at: float) -> HeardBeat:
        key = (beat.job, beat.node)
        window = self._clocks.get(key)
        offset_s = None if window is None else window.offset_s
        age_s = max(0.0, self._clock.now() - at)
        return HeardBeat(beat, age_s, self._probes.get(key, ()), offset_s)

    def _forget(self, key: tuple[str, str]) -> None:
        job, node = key
        self._order.pop(key, None)
        self._probes.pop(key, None)
        self._clocks.pop(key, None)
        nodes = self._jobs.get(job, {})
        nodes.pop(node, None)
        if not nodes:
            self._jobs.pop(job, None)
            self._limits.pop(job, None)
