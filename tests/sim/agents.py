"""An agent as rendezvous meets it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

from everstep.messages import (
    CheckResult,
    Join,
    Joined,
    Leave,
    MeasureNetwork,
    Message,
    NameExcuse,
    NetworkFigures,
    NetworkLink,
    Order,
    Report,
    Reported,
    SaveCheckpoint,
    StartRanks,
)
from everstep.node_pairs import schedule
from everstep_services.agent.core.actions import Action, AskToJoin, ExitAgent, SendReport, StopRound
from everstep_services.agent.core.agent import Agent as Core
from everstep_services.agent.settings import AgentSettings

if TYPE_CHECKING:
    from tests.sim.fleet import Fleet

PREEMPTED = 91
SAY_AGAIN_S = 10.0
FAULTS_END_S = 40.0
"""Rounds come to a good end only after this."""
ASK_WITHIN_S = 5.0


@dataclass(eq=False)
class Agent:
    """One agent as rendezvous meets it: it joins, obeys what is not stale, reports, and dies.

    The core of the real agent decides about answers and orders, in whatever order they arrive.
    """

    fleet: "Fleet"
    node: str
    instance: str
    is_alive: bool = True
    is_paused: bool = False
    stays_paused: bool = False
    is_unhealthy: bool = False
    core: Core = field(default_factory=lambda: Core(AgentSettings()))
    order: StartRanks | None = None
    is_stopping: bool = False
    running_state: str = ""
    busy_until: float = 0.0
    """Its rank works on until then, and others may wait for it."""
    has_stalled: bool = False
    stops_after: int | None = None
    """The step after which it must stop."""
    missed: list[tuple[Callable[[Message], None], Message]] = field(default_factory=list)
    asked: int = 0
    """The number of the `join` that is not answered yet; 0 if there is none."""
    joins: int = 0
    is_join_wanted: bool = False
    exit_code: int | None = None
    figures: NetworkFigures | None = None

    def join_for_ever(self) -> None:
        """Ask whenever there is nothing to do, as real agents do."""
        if not self.is_alive:
            return
        if not self.is_paused and (self.order is None or self.fleet.rng.random() < 0.1):
            self.ask_join()
        self.fleet.later(self.fleet.rng.uniform(4.0, 8.0), self.join_for_ever)

    def ask_join(self) -> None:
        """Ask, one question at a time; an answer that is later than its question's end is lost."""
        if self.asked:
            self.is_join_wanted = True
            return
        self.joins += 1
        number = self.asked = self.joins
        self.is_join_wanted = False

        def answered(reply: Message) -> None:
            if self.asked == number:
                self.asked = 0
                self.joined(reply)
                self._ask_again()

        def ended() -> None:
            if self.asked == number:
                self.asked = 0
                self.is_join_wanted = True
                self._ask_again()

        self.fleet.ask(self._join(), answered)
        self.fleet.later(ASK_WITHIN_S, ended)

    def _ask_again(self) -> None:
        if self.is_alive and not self.is_paused and self.is_join_wanted:
            self.ask_join()

    def _join(self) -> Join:
        checks = (CheckResult(check="gpu", state="failed"),) if self.is_unhealthy else ()
        return Join(
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
            last_round=self.core.last_round,
            checks=checks,
            known_round=self.core.round or 0,
            running=self.order,
            running_state=self.running_state,
            evidence_s=0.1,
            stop_s=0.2,
            network=self.figures,
        )

    def joined(self, reply: Message) -> None:
        if isinstance(reply, Joined) and self._takes(self.joined, reply):
            if reply.is_accepted and reply.order is not None:
                self.fleet.record.heard(reply.order, self.instance)
            self._do(self.core.joined(reply, self.fleet.now))

    def hear(self, order: Message) -> None:
        """An order: refused when it is older than what we know."""
        if not isinstance(order, Order) or not self._takes(self.hear, order):
            return
        self.fleet.record.heard(order, self.instance)
        if isinstance(order, SaveCheckpoint):
            self.save(order)
        elif isinstance(order, NameExcuse):
            self.excuse(order)
        else:
            self._do(self.core.ordered(order))

    def _takes(self, hear: Callable[[Message], None], message: Message) -> bool:
        """The dead hear nothing; the paused hear it when they wake."""
        if self.is_alive and self.is_paused:
            self.missed.append((hear, message))
        return self.is_alive and not self.is_paused

    def _do(self, acts: list[Action]) -> None:
        for act in acts:
            match act:
                case AskToJoin():
                    self.ask_join()
                case StartRanks():
                    self.start(act)
                case StopRound():
                    self.stop()
                case ExitAgent():
                    self.exit(act.code)
                case MeasureNetwork() if self.fleet.of_tests.random() < 0.95:
                    self.fleet.later(self.fleet.of_tests.uniform(0.5, 10.0), self.measured, act)
                case _:
                    pass

    def measured(self, order: MeasureNetwork) -> None:
        """It has had its turns; a slow node is slow with all others."""
        nodes = [peer.node for peer in order.peers]
        if not self.is_alive or self.is_paused or self.node not in nodes:
            return
        turns = islice(schedule(nodes), order.turns)
        called = [pair[1] for turn in turns for pair in turn if pair[0] == self.node]
        links = tuple(
            NetworkLink(
                node=node,
                mib_s=100.0,
                sums_mib_s=0.0 if self.fleet.slow_node in {node, self.node} else 100.0,
            )
            for node in called
        )
        self.figures = NetworkFigures(test=order.id, node=self.node, fact="f", links=links)
        self.fleet.record.measured += 1
        self._do(self.core.measured())

    def start(self, order: StartRanks) -> None:
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
            event = rng.choice(["rank_exited", "rank_exited", "rank_stalled", "start_failed"])
            self.report(
                order,
                event,
                asks=self.fleet.of_moves.choice(["", "move"]) if event == "rank_exited" else "",
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
            if isinstance(reply, Reported) and self._takes(told, reply):
                sent = SendReport(order.round, "reached", "")  # for all events alike
                self._do(self.core.reported(sent, reply, self.fleet.now))

        self.fleet.ask(question, told, sender=self)

    def stop(self) -> None:
        self.is_stopping = True
        self.fleet.later(self.fleet.rng.uniform(0.05, 1.2), self.stopped)

    def stopped(self) -> None:
        if self.order is None or not self.is_alive:
            return
        if self.is_paused:
            self.fleet.later(1.0, self.stopped)
            return
        number = self.order.round
        self.order, self.is_stopping = None, False
        self._do(self.core.stopped(number))

    def exit(self, code: int, cause: str = "operator") -> None:
        """Say goodbye, as an agent that is sent away or taken away."""
        self.is_alive, self.order, self.exit_code = False, None, code
        leave = Leave(
            job="j",
            node=self.node,
            instance=self.instance,
            round=self.core.round or 0,
            cause=cause,
            reason="bye",
            exit_code=code,
        )
        self.fleet.ask(leave, lambda _: None)
        if self.fleet.forgets:  # its seat may be made again by a question that comes late
            self.fleet.later(4.0, self.fleet.miss, self)

    def wake(self) -> None:
        if self.stays_paused:
            return
        self.is_paused = False
        missed, self.missed = self.missed, []
        for hear, message in missed:
            hear(message)
        if self.is_alive:
            self.ask_join()
