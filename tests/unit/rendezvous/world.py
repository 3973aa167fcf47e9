"""One job for tests of the rendezvous domain: agents by name, and time that tests move."""

import itertools
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

from everstep.messages import (
    Fact,
    JobSpec,
    Join,
    Joined,
    Leave,
    Order,
    Report,
    Reported,
    RoundDocument,
    StartRanks,
    decode,
)
from everstep_services.rendezvous.domain.batch import ReplicaMemory
from everstep_services.rendezvous.domain.events import (
    BatchOutcome,
    Event,
    JobControl,
    Now,
    Probed,
    Tick,
)
from everstep_services.rendezvous.domain.job import RendezvousJob
from everstep_services.rendezvous.settings import RendezvousSettings

F = TypeVar("F", bound=Fact)
WALL = datetime(2026, 1, 1, tzinfo=UTC)


def spec(nodes: int = 2, **fields: Any) -> JobSpec:
    values: dict[str, Any] = {
        "name": "j",
        "labels": {},
        "command": ("train.py",),
        "config_fingerprint": "f",
        "nodes_min": nodes,
        "nodes_max": nodes,
        "ranks_per_node": 2,
    }
    return JobSpec(**(values | fields))


class World:
    """What a replica, its bus and some agents do, without any of them."""

    def __init__(self, of: JobSpec, **settings: Any) -> None:
        self.spec = of
        self.settings = RendezvousSettings(**settings)
        self.control = JobControl()
        self.now = 1000.0
        self.memory = ReplicaMemory()
        self.job: RendezvousJob | None = None
        self.facts: list[Fact] = []
        self.orders: list[tuple[str | None, Order]] = []
        self.last: BatchOutcome
        self.ids = itertools.count(1)

    @property
    def doc(self) -> RoundDocument:
        assert self.job is not None
        return self.job.document

    def moment(self) -> Now:
        wall = WALL + timedelta(seconds=self.now - 1000)
        return Now(self.now, wall, lambda: f"{next(self.ids):032x}")

    def apply(self, *events: Event) -> BatchOutcome:
        now = self.moment()
        if self.job is None:
            first = next(event for event in events if isinstance(event, Join))
            self.job = RendezvousJob(
                RendezvousJob.document_for(first, now), self.memory, self.settings, "0.1.0"
            )
        self.last = self.job.apply(events, now, self.control)
        self.facts += [
            found for text in self.job.outbox if isinstance(found := decode(text.encode()), Fact)
        ]
        self.job.recorded(self.job.outbox)
        self.orders += [(send.node, send.order) for send in self.last.sends]
        return self.last

    def take_over(self) -> None:
        """From now on another replica decides, that has heard nobody yet."""
        assert self.job is not None
        self.memory = ReplicaMemory()
        self.job = RendezvousJob(self.doc, self.memory, self.settings, "0.1.0")

    def ask(self, node: str, **fields: Any) -> Join:
        values: dict[str, Any] = {
            "job": "j",
            "node": node,
            "instance": f"{node}-1",
            "spec": self.spec,
            "allocation": "a",
            "address": node,
            "ranks": 2,
            "master_port": 29_500,
        }
        return Join(**(values | fields))

    def order(self, node: str) -> StartRanks:
        """What this node was ordered to start last."""
        found = [one for to, one in self.orders if to == node and isinstance(one, StartRanks)]
        return found[-1]

    def join(self, *nodes: str, **fields: Any) -> list[Joined]:
        replies = self.apply(*(self.ask(node, **fields) for node in nodes)).replies
        return [reply for reply in replies if isinstance(reply, Joined)]

    def report(self, node: str, event: str, **fields: Any) -> Reported:
        seat = next((seat for seat in self.doc.seats if seat.node == node), None)
        values: dict[str, Any] = {
            "job": "j",
            "node": node,
            "slot": seat.slot if seat and seat.slot is not None else 0,
            "round": self.doc.round,
            "event": event,
            "reason": f"{node} {event}",
            "instance": seat.instance if seat else "",
        }
        reply = self.apply(Report(**(values | fields))).replies[0]
        assert isinstance(reply, Reported)
        return reply

    def leave(self, node: str, cause: str = "operator", **fields: Any) -> None:
        values: dict[str, Any] = {"instance": f"{node}-1", "round": self.doc.round}
        values |= {"job": "j", "node": node, "cause": cause, "reason": "bye"}
        self.apply(Leave(**(values | fields)))

    def gone(self, node: str, instance: str = "") -> None:
        self.apply(Probed(node, instance or f"{node}-1", is_there=False))

    def tick(self, seconds: float = 0.0) -> None:
        """Let time pass, and wake whenever it was asked for."""
        end = self.now + seconds
        for _ in range(10_000):
            wake = self.last.wake_at
            if wake is None or wake > end:
                break
            self.now = max(self.now, wake)
            self.apply(Tick())
        self.now = end
        self.apply(Tick())

    def run(self, *, stepped: bool = True) -> None:
        """Every member starts, and the first step is made."""
        for node in self.members():
            self.report(node, "started")
        if stepped:
            self.report(self.members()[0], "first_step", step=1)

    def back(self, *nodes: str, **fields: Any) -> list[Joined]:
        """Agents whose ranks are gone join again."""
        return self.join(*nodes, last_round=self.doc.round, **fields)

    def members(self) -> list[str]:
        held = [seat for seat in self.doc.seats if seat.slot is not None]
        return [seat.node for seat in sorted(held, key=lambda seat: seat.slot or 0)]

    def of(self, kind: type[F]) -> list[F]:
        return [fact for fact in self.facts if isinstance(fact, kind)]

    def started(self, *nodes: str) -> "World":
        """These have joined, and their round runs."""
        self.join(*nodes)
        self.run()
        return self


def names(count: int) -> Sequence[str]:
    return [f"n{number}" for number in range(count)]
