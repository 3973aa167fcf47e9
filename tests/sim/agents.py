"""An agent as rendezvous meets it."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from everstep.messages import (
    CheckResult,
    Join,
    Joined,
    Leave,
    LeaveJob,
    Message,
    Order,
    Report,
    Reported,
    StartRanks,
    StopRanks,
)

if TYPE_CHECKING:
    from tests.sim.fleet import Fleet

FAULTS_END_S = 40.0
"""Rounds come to a good end only after this."""


@dataclass(eq=False)
class Agent:
    """One agent as rendezvous meets it: it joins, obeys what is not stale, reports, and dies."""

    fleet: "Fleet"
    node: str
    instance: str
    is_alive: bool = True
    is_paused: bool = False
    stays_paused: bool = False
    is_unhealthy: bool = False
    known: int = 0
    order: StartRanks | None = None
    is_stopping: bool = False
    last_round: int | None = None
    missed: list[Message] = field(default_factory=list)
    exit_code: int | None = None

    def join_for_ever(self) -> None:
        """Ask whenever there is nothing to do, as real agents do."""
        if not self.is_alive:
            return
        if not self.is_paused and (self.order is None or self.fleet.rng.random() < 0.1):
            self.ask_join()
        self.fleet.later(self.fleet.rng.uniform(4.0, 8.0), self.join_for_ever)

    def ask_join(self) -> None:
        checks = (CheckResult(check="gpu", state="failed"),) if self.is_unhealthy else ()
        question = Join(
            job="j",
            node=self.node,
            instance=self.instance,
            spec=self.fleet.spec,
            allocation="a",
            address=self.node,
            ranks=1,
            failure_domain=self.fleet.domain_of(self.node),
            topology=(self.fleet.domain_of(self.node),),
            last_round=self.last_round,
            checks=checks,
            running_round=self.order.round if self.order else None,
            evidence_s=0.1,
            stop_s=0.2,
        )
        self.fleet.ask(question, self.joined)

    def joined(self, reply: Message) -> None:
        if not isinstance(reply, Joined) or not self._takes(reply):
            return
        self.known = max(self.known, reply.round)
        if reply.exit_code is not None:
            self.exit(reply.exit_code)
        elif reply.order is not None:
            self.hear(reply.order)
        elif self.order is not None and reply.round > self.order.round:
            self.stop()

    def hear(self, order: Message) -> None:
        """An order: refused when it is older than what we know."""
        if not isinstance(order, Order) or not self._takes(order):
            return
        if order.round < self.known:
            return
        self.known = max(self.known, order.round)
        if isinstance(order, LeaveJob):
            self.exit(order.exit_code)
        elif isinstance(order, StopRanks):
            self.stop()
        elif isinstance(order, StartRanks):
            self.start(order)

    def _takes(self, message: Message) -> bool:
        """The dead hear nothing; the paused hear it when they wake."""
        if self.is_alive and self.is_paused:
            self.missed.append(message)
        return self.is_alive and not self.is_paused

    def start(self, order: StartRanks) -> None:
        if self.order is not None:
            if self.order.round != order.round:
                self.stop()
            return
        if self.last_round is not None and order.round <= self.last_round:
            return
        self.order = order
        self.fleet.record.took_slot(order, self.instance)
        self.fleet.later(self.fleet.rng.uniform(0.05, 0.3), self.run, order)

    def run(self, order: StartRanks) -> None:
        if self.is_alive and self.is_paused and self.order is order:
            self.fleet.later(1.0, self.run, order)
        if not self._works_on(order):
            return
        self.report(order, "started", warm_ranks=1)
        if order.slot == 0:
            self.fleet.later(0.5, self.step, order)
        self.fleet.later(self.fleet.rng.uniform(15.0, 25.0), self.finish, order)

    def step(self, order: StartRanks) -> None:
        if self._works_on(order):
            self.report(order, "first_step", step=self.fleet.next_step())

    def finish(self, order: StartRanks) -> None:
        if self._works_on(order) and self.fleet.now > FAULTS_END_S:
            self.report(order, "finished")
        elif self.is_alive and self.order is order and not self.is_stopping:
            self.fleet.later(5.0, self.finish, order)

    def fail(self) -> None:
        """A rank dies."""
        order = self.order
        if order is not None and self._works_on(order):
            rng = self.fleet.rng
            self.report(
                order,
                rng.choice(["rank_exited", "rank_exited", "rank_stalled", "start_failed"]),
                rank=order.first_rank,
                exit_code=rng.choice([1, 2]),
                fingerprint=rng.choice(["", "secondary:x", f"f{rng.randrange(3)}"]),
                step=rng.choice([None, self.fleet.next_step()]),
                last_progress_age_s=rng.choice([None, 0.5]),
            )

    def _works_on(self, order: StartRanks) -> bool:
        return self.is_alive and not self.is_paused and self.order is order and not self.is_stopping

    def report(self, order: StartRanks, event: str, **fields: Any) -> None:
        question = Report(
            job="j",
            node=self.node,
            instance=self.instance,
            slot=order.slot,
            round=order.round,
            event=event,
            reason=event,
            **fields,
        )

        def told(reply: Message) -> None:
            if isinstance(reply, Reported) and self._works_on(order) and not reply.is_current:
                self.known = max(self.known, reply.round)
                if reply.round > order.round:
                    self.stop()

        self.fleet.ask(question, told, sender=self)

    def stop(self) -> None:
        if self.order is None or self.is_stopping:
            return
        self.is_stopping = True
        self.fleet.later(self.fleet.rng.uniform(0.05, 1.2), self.stopped)

    def stopped(self) -> None:
        if self.order is None or not self.is_alive:
            return
        self.last_round, self.order, self.is_stopping = self.order.round, None, False
        if not self.is_paused:
            self.ask_join()

    def exit(self, code: int) -> None:
        """Say goodbye, as an agent that is sent away."""
        self.is_alive, self.order, self.exit_code = False, None, code
        leave = Leave(
            job="j",
            node=self.node,
            instance=self.instance,
            round=self.known,
            cause="operator",
            reason="bye",
            exit_code=code,
        )
        self.fleet.ask(leave, lambda _: None)

    def wake(self) -> None:
        if self.stays_paused:
            return
        self.is_paused = False
        missed, self.missed = self.missed, []
        for message in missed:
            self.joined(message) if isinstance(message, Joined) else self.hear(message)
        if self.is_alive:
            self.ask_join()
