"""A fleet of plain numbers: beats as they come, and an observer's clock."""

from datetime import UTC, datetime, timedelta

from msgspec.structs import replace

from everstep.messages import NodeBeat, RankBeat, WardenPlace
from everstep_services.health.domain.findings import NodeLoss, NodeReturn
from everstep_services.health.domain.fleet import Fleet
from everstep_services.health.settings import HealthSettings

SETTINGS = HealthSettings(pause_most_s=0.6, forget_after_s=3600.0)


def beat(node: str, sequence: int, **changes: object) -> NodeBeat:
    """Of a spare, unless the changes say otherwise."""
    at = datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=sequence)
    fields = {"job": "j", "node": node, "sequence": sequence, "at": at, "state": "standby"}
    return NodeBeat(**{**fields, **changes})  # type: ignore[arg-type]


def ranks(step: int | None, age_s: float = 0.0, state: str = "running") -> tuple[RankBeat, ...]:
    """Two of them."""
    return tuple(
        RankBeat(rank=number, step=step, progress_age_s=age_s, state=state) for number in range(2)
    )


class World:
    """Nodes that beat once a second, until a test stops them, before one observer."""

    def __init__(self, nodes: int, *, slots: int = 0, settings: HealthSettings = SETTINGS) -> None:
        self.fleet = Fleet(settings)
        self.settings = settings
        self.now = 1000.0
        self.step_s = 0.1
        self.moved_at = self.now
        self.is_moving = slots > 0
        self.round = 1
        self.slots = slots
        self.names = [f"n{number}" for number in range(nodes)]
        self.silent: set[str] = set()
        self.mute: set[str] = set()
        """Their beats are lost, but what they are asked arrives, and so does the answer."""
        self.killed: set[str] = set()
        """Nobody hears them: their connection to the bus is closed. Others that are silent have
        theirs, as the server knows."""
        self.stopped: set[str] = set()
        """Their agents say nothing, and their wardens answer."""
        self.state = "running"
        self.changes: dict[str, object] = {}
        """What beats of nodes with a slot have besides."""
        self.hails = self.probes = self.inquiries = 0
        self.is_blind = False
        self.reads = True
        """What is sent to the observer is read at once, or else waits."""
        self._read_at = self.now
        self._unread: list[NodeBeat] = []
        self.found: list[tuple[float, NodeLoss | NodeReturn]] = []
        self._sequence = dict.fromkeys(self.names, 0)
        self._phase = {name: number / max(nodes, 1) for number, name in enumerate(self.names)}
        self._next = {name: self.now + self._phase[name] for name in self.names}

    def beat_of(self, name: str) -> NodeBeat:
        """What the node says now."""
        number = self.names.index(name)
        if number >= self.slots:
            return beat(name, self._sequence[name])
        return beat(
            name,
            self._sequence[name],
            **{
                "state": self.state,
                "warden": WardenPlace(node=name, address="10.0.0.1", port=1, token=name),
                "round": self.round,
                "slot": number,
                "ranks": ranks(
                    int(self.moved_at / self.step_s), max(0.001, self.now - self.moved_at)
                ),
                **self.changes,
            },
        )

    def run(self, seconds: float) -> None:
        """Let time pass, tick by tick."""
        end = self.now + seconds
        while self.now < end - 1e-9:
            self.now += self.settings.tick_s
            if self.is_moving:
                self.moved_at = self.now - (self.now % self.step_s)
            for name in self.names:
                if self._next[name] <= self.now:
                    self._next[name] += 1.0
                    self._sequence[name] += 1
                    if name not in self._unheard and not self.is_blind:
                        self._send(self.beat_of(name))
            self._judge()

    def _judge(self) -> None:
        if self.reads:
            self._read_at = self.now
        for lost in self.fleet.judge(self.now, is_blind=self.is_blind, read_at=self._read_at):
            self.found.append((self.now, lost))
        for asked in self.fleet.hails(self.now):
            self.hails += 1
            self._answer(asked)
        for asked, silent in self.fleet.inquiries(self.now):
            self.inquiries += 1
            self._inquire(asked, silent)
        for asked in self.fleet.probes(self.now):
            self.probes += 1
            self.fleet.probed(asked, self._hears(asked.node), self.now)
            self._answer(asked)

    @property
    def _unheard(self) -> set[str]:
        return self.silent | self.killed | self.mute | self.stopped

    def _inquire(self, asked: NodeBeat, silent: list[NodeBeat]) -> None:
        alive = tuple(one.node for one in silent if one.node not in self.silent | self.killed)
        if alive and asked.node in self.names and self._hears(asked.node):
            self._sequence[asked.node] += 1
            self._send(replace(self.beat_of(asked.node), alive=alive))

    def _hears(self, name: str) -> bool | None:
        if name in self.killed:
            return False
        return None if name in self.silent | self.stopped else True

    def _answer(self, asked: NodeBeat) -> None:
        if asked.node in self.names and self._hears(asked.node):
            self._sequence[asked.node] += 1
            self._send(self.beat_of(asked.node))

    def _send(self, said: NodeBeat) -> None:
        self._unread.append(said)
        while self.reads and self._unread:
            found = self.fleet.hear(self._unread.pop(0), self.now)
            if found is not None:
                self.found.append((self.now, found))

    def sleep(self, seconds: float) -> None:
        """The observer gets no turn; the world goes on."""
        self.now += seconds
        for name in self.names:
            while self._next[name] <= self.now:
                self._next[name] += 1.0
                self._sequence[name] += 1

    @property
    def lost(self) -> list[str]:
        return [one.beat.node for _, one in self.found if isinstance(one, NodeLoss)]

    @property
    def returned(self) -> list[str]:
        return [one.beat.node for _, one in self.found if isinstance(one, NodeReturn)]


def first_loss(world: World) -> NodeLoss:
    found = world.found[0][1]
    assert isinstance(found, NodeLoss)
    return found
