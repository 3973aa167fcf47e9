"""A training on many nodes that fail: where its time goes, simulated failure by failure.

The job trains on all its nodes or on none (unless it has replicas that go on without each other). A
failure ends training for `restart_s`. A failed node is away for its repair; a spare takes its
place, or the job waits for the first repaired node. Steps since the last durable save are made
again, unless survivors kept them.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import ceil, gamma, inf, sqrt
from random import Random

DAY_S = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FailingNodes:
    """The nodes of one job, and how they fail."""

    nodes: int
    """How many train."""
    failures: float
    """How often a node fails, a day."""
    spares: int = 0
    """Nodes that wait to take the place of others."""
    repair_s: float = DAY_S
    """How long a failed node is away, on average (exponential)."""
    replaced_ratio: float = 1.0
    """The share of failures after which the node is away; the others need a restart only."""
    shape: float = 1.0
    """Weibull's shape of the times between failures: below 1 they come in bursts."""

    @property
    def mttf_s(self) -> float:
        """The mean time between failures of the job."""
        rate = self.nodes * self.failures / DAY_S
        return 1 / rate if rate else inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """What a job does against failures, and what each costs."""

    restart_s: float
    """From a failure to the next step, with a node at hand."""
    interval_s: float
    """The training time between two saves."""
    stall_s: float = 0.0
    """How long a save holds up training."""
    durable_s: float = 0.0
    """From the begin of a save until it can be restored."""
    kept_ratio: float = 0.0
    """The share of failures after which no step is lost, since survivors keep their state."""
    replicas: int = 1
    """Parts of the job that go on without each other; a failure takes one of them away."""
    rejoin_s: float = 0.0
    """How long a failed replica is away after the restart."""


@dataclass(slots=True)
class TimeSpent:
    """Where the seconds of a job went: each second is in one of these."""

    productive_s: float = 0.0
    saves_s: float = 0.0
    """Training stood while states were copied."""
    lost_steps_s: float = 0.0
    """Steps that had to be made again."""
    restarts_s: float = 0.0
    waits_s: float = 0.0
    """No node was there to go on with."""
    reduced_s: float = 0.0
    """What replicas that were away would have done."""
    failures: int = field(default=0, kw_only=True)

    @property
    def wall_s(self) -> float:
        busy_s = self.productive_s + self.saves_s + self.lost_steps_s + self.reduced_s
        return busy_s + self.restarts_s + self.waits_s

    @property
    def goodput(self) -> float:
        return self.productive_s / self.wall_s if self.wall_s else 0.0


def expected_goodput(fleet: FailingNodes, recovery: Recovery) -> float:
    """Kokolis' closed form: losses are small and add up, and a spare is always there."""
    lost_s = recovery.restart_s + recovery.durable_s + recovery.interval_s / 2
    lost_s -= recovery.kept_ratio * (recovery.durable_s + recovery.interval_s / 2)
    ratio = (1 - lost_s / fleet.mttf_s) / (1 + recovery.stall_s / recovery.interval_s)
    return max(0.0, ratio)


def best_interval_s(fleet: FailingNodes, recovery: Recovery) -> float:
    """The time between saves at which stalls and lost steps cost the least together."""
    lossy = 1 - recovery.kept_ratio
    return sqrt(2 * recovery.stall_s * fleet.mttf_s / lossy) if lossy else inf


class TrainingOfFleet:
    """One job from its first step to its last second."""

    def __init__(self, fleet: FailingNodes, recovery: Recovery, random: Random) -> None:
        self._fleet, self._recovery, self._random = fleet, recovery, random
        self._scale_s = fleet.mttf_s / gamma(1 + 1 / fleet.shape)
        self._now = 0.0
        self._fails_at = inf
        self._unsaved_s = 0.0
        self._spares = fleet.spares
        self._repairs: list[float] = []
        self._absences: list[float] = []
        self.spent = TimeSpent()

    def run(self, until_s: float) -> TimeSpent:
        """Train and fail until then."""
        self._fails_at = self._gap_s()
        while True:
            fails = self._fails_at < until_s
            self._train(min(self._fails_at, until_s) - self._now, fails=fails)
            if not fails or not self._recover(until_s):
                return self.spent

    def _gap_s(self) -> float:
        return self._random.weibullvariate(self._scale_s, self._fleet.shape)

    def _train(self, lasted_s: float, *, fails: bool) -> None:
        recovery, spent = self._recovery, self.spent
        cycle_s = recovery.interval_s + recovery.stall_s
        elapsed_s = self._unsaved_s + lasted_s
        saves, rest_s = divmod(elapsed_s, cycle_s)
        trained_s = saves * recovery.interval_s + min(rest_s, recovery.interval_s)
        since_save_s = trained_s - max(0.0, self._durable(elapsed_s)) * recovery.interval_s
        spent.saves_s += elapsed_s - trained_s
        spent.productive_s += trained_s - self._unsaved_s
        self._reduce(lasted_s)
        self._unsaved_s = min(rest_s, recovery.interval_s)
        self._now += lasted_s
        if fails and self._random.random() >= recovery.kept_ratio:
            spent.productive_s -= since_save_s
            spent.lost_steps_s += since_save_s
            self._unsaved_s = 0.0

    def _durable(self, elapsed_s: float) -> float:
        """How many of the saves can be restored."""
        recovery = self._recovery
        cycle_s = recovery.interval_s + recovery.stall_s
        return (elapsed_s - max(0.0, recovery.durable_s - recovery.stall_s)) // cycle_s

    def _reduce(self, lasted_s: float) -> None:
        """Take off what absent replicas would have done."""
        away_s = sum(min(lasted_s, max(0.0, back_at - self._now)) for back_at in self._absences)
        lost_s = min(away_s / self._recovery.replicas, lasted_s)
        self.spent.productive_s -= lost_s
        self.spent.reduced_s += lost_s
        self._absences = [at for at in self._absences if at > self._now + lasted_s]

    def _recover(self, until_s: float) -> bool:
        """Restart until nothing fails in the meantime; return whether training goes on."""
        ready_at = self._now
        while True:
            self.spent.failures += 1
            self._fails_at = self._now + self._gap_s()
            ready_at = max(ready_at, self._now, self._node_at())
            steps_at = ready_at + self._recovery.restart_s
            then = min(steps_at, self._fails_at, until_s)
            waited_s = min(ready_at, then) - self._now
            self.spent.waits_s += waited_s
            self.spent.restarts_s += then - self._now - waited_s
            self._now = then
            if then >= until_s or then >= steps_at:
                return then < until_s

    def _node_at(self) -> float:
        """When a node is there to go on with."""
        now, recovery = self._now, self._recovery
        back_at = now
        if self._random.random() < self._fleet.replaced_ratio:
            self._return_repaired()
            heappush(self._repairs, now + self._random.expovariate(1 / self._fleet.repair_s))
            if self._spares:
                self._spares -= 1
            else:
                back_at = heappop(self._repairs)
        if recovery.replicas == 1:
            return back_at
        self._absences.append(back_at + recovery.restart_s + recovery.rejoin_s)
        return now

    def _return_repaired(self) -> None:
        while self._repairs and self._repairs[0] <= self._now:
            heappop(self._repairs)
            self._spares += 1


def simulate(
    fleet: FailingNodes, recovery: Recovery, *, days: float, runs: int, seed: int = 0
) -> list[TimeSpent]:
    """Several trainings, the one that did worst first."""
    spent = [
        TrainingOfFleet(fleet, recovery, Random(f"{seed} {number}")).run(days * DAY_S)  # noqa: S311
        for number in range(runs)
    ]
    return sorted(spent, key=lambda one: one.goodput)


def spares_needed(fleet: FailingNodes, goodput_of: Callable[[int], float], within: float) -> int:
    """The least spares with which goodput is that of any number of them, but for `within`."""
    away = fleet.nodes * fleet.failures * fleet.replaced_ratio * fleet.repair_s / DAY_S
    least, most = -1, ceil(away + 6 * sqrt(away) + 6)
    wanted = goodput_of(most) - within
    while most - least > 1:
        middle = (least + most) // 2
        if goodput_of(middle) >= wanted:
            most = middle
        else:
            least = middle
    return most
