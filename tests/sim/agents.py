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
    NameExcuse,
    Order,
    Report,
    Reported,
    SaveCheckpoint,
    StartRanks,
    StopRanks,
)

if TYPE_CHECKING:
    from tests.sim.fleet import Fleet

PREEMPTED = 91
SAY_AGAIN_S = 10.0
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
    running_state: str = ""
    busy_until: float = 0.0
    """Its rank works on until then, and others may wait for it."""
    has_stalled: bool = False
    stops_after: int | None = None
    """The step after which it must stop."""
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
            group=self.fleet.group_of(self.node),
            last_round=self.last_round,
            checks=checks,
            known_round=self.known,
            running=self.order,
            running_state=self.running_state,
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
        elif isinstance(order, NameExcuse):
            self.excuse(order)
        elif isinstance(order, SaveCheckpoint):
            self.save(order)

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
        self.order, self.running_state = order, ""
        self.busy_until, self.has_stalled, self.stops_after = 0.0, False, None
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
        if self.running_state == "stopped":
            return
        if self._works_on(order) and not self.has_stalled and self.fleet.now > FAULTS_END_S:
            self.running_state = self.running_state or "finished"
            self.report(order, "finished")
        elif self.is_alive and self.order is order and not self.is_stopping:
            self.fleet.later(5.0, self.finish, order)

    def stall(self, order: StartRanks, waited_s: float = 4.0) -> None:
        """Its rank makes no progress; said again and again until something comes of it."""
        if not self.has_stalled or self.order is not order or not self.is_alive:
            return
        if self._works_on(order):
            self.report(order, "rank_stalled", rank=order.first_rank, waited_s=waited_s)
        self.fleet.later(SAY_AGAIN_S, self.stall, order, waited_s + SAY_AGAIN_S)

    def recover(self, order: StartRanks) -> None:
        if self.is_alive and self.is_paused and self.order is order:
            self.fleet.later(1.0, self.recover, order)
        elif self.has_stalled and self._works_on(order):
            self.has_stalled = False
            self.report(order, "rank_recovered", rank=order.first_rank)

    def excuse(self, asked: NameExcuse) -> None:
        order, left_s = self.order, self.busy_until - self.fleet.now
        if order is None or not self._works_on(order) or asked.round != order.round:
            return
        if left_s > 0 and asked.node != self.node:
            self.report(order, "excused", rank=asked.rank, excuse_s=left_s)

    def save(self, asked: SaveCheckpoint) -> None:
        order = self.order
        if order is None or asked.round != order.round or not self._works_on(order):
            return
        if asked.after_step is None:
            step = self.fleet.next_step()
            self.report(order, "reached", step=step, step_s=0.2, last_progress_age_s=0.1)
            return
        self.fleet.record.saves(asked)
        if asked.then_stop and self.stops_after is None:
            self.stops_after = asked.after_step
            wait_s = self.fleet.rng.uniform(0.1, 3.0)
            self.fleet.later(wait_s, self.saved, order, asked.then_leave)

    def saved(self, order: StartRanks, leaves: bool) -> None:
        """Its rank has stopped after the step that was agreed on."""
        if not self._works_on(order) or self.running_state:
            return
        if leaves:
            self.exit(PREEMPTED, "preempted")
            return
        self.running_state = "stopped"
        self.report(order, "stopped")

    def fail(self) -> None:
        """A rank dies."""
        order = self.order
        if order is not None and self._works_on(order):
            rng, self.running_state = self.fleet.rng, "failed"
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
                else:
                    self.ask_join()

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

    def exit(self, code: int, cause: str = "operator") -> None:
        """Say goodbye, as an agent that is sent away or taken away."""
        self.is_alive, self.order, self.exit_code = False, None, code
        leave = Leave(
            job="j",
            node=self.node,
            instance=self.instance,
            round=self.known,
            cause=cause,
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
