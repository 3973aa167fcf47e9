"""A watch over ranks of a test's own clock, as an agent has one."""

from datetime import UTC, datetime
from pathlib import Path

from everstep.messages import StartRanks
from everstep_services.agent.ranks.round_watch import WatchedRank
from everstep_services.agent.stalls.judge import Moving, Stalled
from everstep_services.agent.stalls.limits import LimitRules
from everstep_services.agent.stalls.monitor import MonitoredRanks, StallMonitor
from everstep_services.agent.stalls.process_state import ProcessState
from tests.unit.agent.stalls.stalled_ranks import Clock, StallRank


class _Port:
    """The test's clock, as a port."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def now(self) -> float:
        return self._clock.now

    def wall(self) -> datetime:
        return datetime(2026, 1, 1, tzinfo=UTC)

    async def sleep(self, seconds: float) -> None:
        self._clock.now += seconds


class WatchedNode:
    """One node's ranks and the watch over them, looked at whenever it wants to be."""

    def __init__(self, folder: Path, clock: Clock, rules: LimitRules, ranks: int) -> None:
        self.clock = clock
        self._folder = folder
        self._count = ranks
        self.stalled: list[Stalled] = []
        self.moving: list[Moving] = []
        self.words: list[str] = []
        """The reports on the processes of ranks that had stalled."""
        self.said: list[str] = []
        self.proc = folder / "proc"
        self._known: dict[int, WatchedRank] = {}
        watched = MonitoredRanks(
            live=self._known.keys,
            rank=self._known.get,
            stalled=self._note,
            moving=self.moving.append,
            say=self.said.append,
        )
        self.watch = StallMonitor(rules, _Port(clock), watched, proc=self.proc)
        self.begin(1)

    def begin(self, number: int) -> None:
        """A round begins; the ranks of the one before are gone as they were."""
        self.round = number
        self.ranks = [StallRank(self._folder, rank, self.clock) for rank in range(self._count)]
        self._known.clear()
        for one in self.ranks:
            self._known[one.rank] = WatchedRank(self._folder, one.view_of_page)
        self.watch.begins(
            StartRanks(
                id="0" * 32,
                job="j",
                round=number,
                reason="",
                slot=0,
                slots=1,
                first_rank=0,
                ranks=self._count,
                world_size=self._count,
                master_address="localhost",
                master_port=1,
            )
        )

    def watched(self, rank: int) -> WatchedRank:
        """What the watch knows of where it finds a rank."""
        return self._known[rank]

    def wait(self, seconds: float) -> None:
        """Let time pass; the watch looks exactly when its judge asks for it."""
        end = self.clock.now + seconds
        judge = self.watch._judge
        assert judge is not None
        while (wake_at := self.watch._wake_at(judge)) <= end:
            self.clock.now = max(self.clock.now, wake_at)
            self.watch._look(judge)
        self.clock.now = end

    def _note(self, stalled: Stalled, process: ProcessState) -> None:
        self.stalled.append(stalled)
        self.words.append(process.text)
