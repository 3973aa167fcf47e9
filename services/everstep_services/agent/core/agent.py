"""The state of one agent, and its decisions about orders, exits, signals and silence.

joining ─▶ standby ─▶ starting ─▶ running ─▶ stopping ─▶ joining
   └──────────────────────┴──────────┴──▶ leaving (from anywhere)

Pure: each method takes an event and `now`, and returns the actions to take, in order. An agent
decides nothing about the round: it reports, and obeys orders that are not older than the newest
round that it knows. `Agent` is the only way to this state, and owns its two parts: `RoundPart`
(the ranks of this node in one round) and `Departure` (why and how the agent leaves). Each part
changes only its own fields; `Agent` and `Departure` call methods of the other parts.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from msgspec.structs import replace

from everstep.incident_causes import WAITS, meaning_of
from everstep.messages import (
    AwaitRound,
    CollectEvidence,
    CopyReplica,
    FaultInjected,
    Joined,
    LeaveJob,
    MeasureNetwork,
    NameExcuse,
    Order,
    ReleaseImages,
    Reported,
    RunChecks,
    SaveCheckpoint,
    SaveParked,
    StandBy,
    StartRanks,
    StopRanks,
)
from everstep_services.agent.core import departure
from everstep_services.agent.core.actions import (
    Action,
    AskRanksToSave,
    AskToJoin,
    EndParked,
    PassNotice,
    ReportEvent,
    ReportProgress,
    SendReport,
    ShowLine,
)
from everstep_services.agent.core.departure import Departure
from everstep_services.agent.core.exit import RankExit
from everstep_services.agent.core.round_part import (
    ASK_AGAIN_S,
    PartState,
    RanksOutcome,
    RoundPart,
)
from everstep_services.agent.settings import AgentSettings

_SHOW_UNHEARD_AFTER_S = 5.0
"""Another replica of rendezvous takes over earlier."""

AgentState = Literal["joining", "standby", "leaving"] | PartState


@dataclass
class Agent:
    """The state of one agent in its job."""

    settings: AgentSettings
    round: int | None = None
    """The newest round that this agent knows; orders of older rounds are refused."""
    last_round: int | None = None
    last_slot: int | None = None
    refused_orders: int = 0
    _part: RoundPart | None = None
    _departure: Departure | None = None
    _is_spare: bool = False
    _ask_at: float | None = None
    _said: set[str] = field(default_factory=set)
    _stopped_round: int | None = None
    """The newest round of an order to stop: ranks of this round are not started any more."""
    _cause: StopRanks | None = None
    """The order to stop whose cause was shown for the end of a round."""
    _withheld: StopRanks | None = None
    """The order whose cause is not shown yet, because a better one may follow."""
    _parked: int = 0
    """How many ranks of the last round are parked for the next one."""
    unsaved: int = 0
    """How many of them have not saved their states since."""

    @property
    def state(self) -> AgentState:
        """The state, named as in the picture above."""
        if self._part is not None:
            return self._part.state
        if self._departure is not None:
            return "leaving"
        return "standby" if self._is_spare else "joining"

    @property
    def order(self) -> StartRanks | None:
        """The order whose ranks run, or are being started or stopped."""
        return self._part.order if self._part else None

    def wants(self, order: StartRanks) -> bool:
        """Whether the ranks of this order, which were not started yet, must be started."""
        return self._part is not None and self._part.order == order and self._part.is_wanted

    @property
    def running_state(self) -> RanksOutcome:
        """The outcome of the ranks of `order` so far, named as in `join`."""
        return self._part.came_to if self._part else ""

    @property
    def live_ranks(self) -> tuple[int, ...]:
        """The ranks that are expected to make progress."""
        return self._part.live if self._part else ()

    @property
    def last_ranks(self) -> frozenset[int]:
        """Ranks that still run although another one here has exited with 0."""
        return self._part.last if self._part else frozenset()

    @property
    def wake_at(self) -> float | None:
        """When `tick` must be called next."""
        times = [self._ask_at if self._part is None else self._part.wake_at]
        if self._departure is not None:
            times += [self._departure.kill_at, self._departure.alone_at]
        return min((at for at in times if at is not None), default=None)

    # -- rendezvous answers and orders ---------------------------------------------------------

    def begin(self) -> list[Action]:
        """The agent has started."""
        return [AskToJoin()]

    def joined(self, reply: Joined, now: float) -> list[Action]:
        """Rendezvous has answered our `join`."""
        if self._departure is not None:
            return []
        self._hear(reply.round)
        if reply.exit_code is not None:
            dismissed = departure.answered(reply.exit_code, reply)
            return self._go(dismissed, self.settings.stop_grace_s)
        acts = self._say_withheld() + self._say_refused(reply)
        if self._part is None:
            if self.round is None or reply.round >= self.round:  # an order may overtake an answer
                acts += self._stand(is_spare=reply.standing == "spare")
            wait_s = ASK_AGAIN_S if reply.retry_after_s is None else reply.retry_after_s
            self._ask_at = now + wait_s
        if reply.order is not None:
            acts += self.ordered(reply.order, is_stale=reply.cause == "stale")
        elif self._part is not None and reply.round > self._part.round:
            acts += self._outlived(self._part, reply.round)
        return acts

    def reported(self, tell: SendReport, reply: Reported, now: float) -> list[Action]:
        """Rendezvous has answered a report."""
        self._hear(reply.round)
        part = self._part
        if self._departure is not None and tell.event == "preempted" and reply.is_current:
            self._departure.heard(now)
        if part is None or part.round != tell.round or self._departure is not None:
            return []
        acts = part.heard(now)
        if tell.event == "rank_stalled" and tell.rank is not None:
            acts += part.stall_heard(tell.rank, reply, now)
        if reply.is_current:
            return acts
        if reply.round > tell.round:
            return acts + self._outlived(part, reply.round)
        # rendezvous does not know us: its document may be lost, and `join` makes it again
        return [*acts, AskToJoin()]

    def ordered(
        self, order: Order, *, is_stale: bool = False, is_accused: bool = False
    ) -> list[Action]:
        """Obey an order, unless it is older than the newest round that is known.

        `is_stale`: only our ranks must stop; the round of the order may not be over. `is_accused`:
        the round is over because of a check that fails on this node.
        """
        if self.round is not None and order.round < self.round:
            self.refused_orders += 1
            return []
        self._hear(order.round)
        match order:
            case LeaveJob():
                return self._leave_job(order)
            case _ if self._departure is not None:
                return []
            case StartRanks():
                return self._start(order)
            case StopRanks():
                if not is_stale:
                    self._stopped_round = order.round
                can_keep = order.are_kept or meaning_of(order.cause).keeps_ranks
                keeps = can_keep and not (is_stale or is_accused)
                return self._stop(self._part, order, keeps=keeps)
            case _:
                return self._asked(order)

    def _asked(self, order: Order) -> list[Action]:
        """Obey an order that leaves the ranks as they are."""
        match order:
            case StandBy() if self._part is None:
                return self._stand(is_spare=True)
            case SaveParked() if self.unsaved and order.round == self.last_round:
                return [ShowLine("the ranks that are parked save their states"), order]
            case NameExcuse() if self._part is not None:
                return [order]
            case (
                RunChecks() | MeasureNetwork() | CollectEvidence() | CopyReplica() | ReleaseImages()
            ):
                return [order]
            case AwaitRound():
                return self._say_once(f"job {order.job} {order.reason}")
            case _:
                return []

    def asked_to_save(self, order: SaveCheckpoint, now: float) -> list[Action]:
        """All ranks of the round must save after the same step, and perhaps exit."""
        self._hear(order.round)
        part = self._part
        if part is None or part.round != order.round or part.has_failed or part.state == "stopping":
            return []
        if order.after_step is None:
            return [ReportProgress(order.round)]
        if not order.then_stop:
            return [AskRanksToSave(order.after_step)]
        if part.is_asked:
            return []
        acts: list[Action] = []
        if order.then_leave and self._departure is None:
            acts = self._goes(*departure.taken(order, part, self.settings, now))
        if self._departure is not None:
            self._departure.step_agreed()
        return [*acts, *part.asked(order, order.after_step, now)]

    def unasked(self, after_step: int | None, now: float) -> list[Action]:
        """No rank could be asked to stop: the SDK counts no steps here, or none yet."""
        if self._part is not None:
            self._part.unasked()  # the order will be repeated
            if self._departure is not None:
                self._departure.unasked(after_step, now)
        return []

    def bus_back(self) -> list[Action]:
        """The bus was away: ask rendezvous, which repeats the order in force."""
        return [] if self._departure is not None else [AskToJoin()]

    # -- ranks ---------------------------------------------------------------------------------

    def rank_runs(self, rank: int) -> list[Action]:
        """A rank's process has begun."""
        return self._part.runs(rank) if self._part else []

    def rank_stepped(self, rank: int, step: int) -> list[Action]:
        """A rank has made its first step of the round."""
        return self._part.stepped(rank, step) if self._part else []

    def rank_stops(self, rank: int, step: int, now: float) -> list[Action]:
        """The script of a rank has seen that it should stop, after this step."""
        return self._part.stops_after(rank, step, now) if self._part else []

    def rank_stalled(  # noqa: PLR0913  the content of a report
        self,
        rank: int,
        reason: str,
        waited_s: float,
        fact: str,
        now: float,
        entered_in: Mapping[str, int] | None = None,
        *,
        waits_for_others: bool = False,
        is_doubtful: bool = False,
        is_stopped: bool = False,
        is_fatal: bool = True,
    ) -> list[Action]:
        """A rank has made no progress past its limit; reported again until something follows.

        `is_doubtful`: `reason` says that the cause may be another one.
        """
        part = self._part
        if part is None:
            return []
        told = SendReport(
            part.round, "rank_stalled", reason, rank, waited_s=waited_s, fact=fact,
            entered_in=entered_in or {}, fingerprint=WAITS if waits_for_others else "",
            is_stopped=is_stopped, is_fatal=is_fatal,
        )  # fmt: skip
        return part.stalled(told, rank, now, is_doubtful=is_doubtful)

    def rank_moves(self, rank: int, reason: str, fact: str) -> list[Action]:
        """A rank that had stalled has made progress."""
        return self._part.moves(rank, reason, fact) if self._part else []

    def check_failed(self, check: str, policy: str, reason: str, fact: str) -> list[Action]:
        """A probe has failed whose policy wants another round."""
        return self._of_check("check_failed", check, reason, fact=fact, policy=policy)

    def check_recovered(self, check: str, reason: str, fact: str) -> list[Action]:
        """A probe that had failed passes again."""
        return self._of_check("check_recovered", check, reason, fact=fact)

    def check_compared(self, check: str, state: str, reason: str) -> list[Action]:
        """The result of a check that rendezvous compares between nodes, spares among them."""
        if self._part is None and self._is_spare and self.round is not None:
            told = SendReport(self.round, "check_compared", reason, check=check, check_state=state)
            return [told]
        return self._of_check("check_compared", check, reason, state=state)

    def _of_check(
        self,
        event: ReportEvent,
        check: str,
        reason: str,
        *,
        fact: str | None = None,
        policy: str = "",
        state: str = "",
    ) -> list[Action]:
        part = self._part
        if part is None:
            return []
        told = SendReport(
            part.round, event, reason, fact=fact, check=check, policy=policy, check_state=state
        )
        return part.check(told)

    def idle(self, idle_s: Mapping[int, float]) -> list[Action]:
        """The last ranks have been idle for this long: no processor time, no bytes."""
        return self._part.idle(idle_s) if self._part else []

    def script_returned(self, rank: int, now: float) -> list[Action]:
        """A rank's script has returned; its process may still be at work."""
        if self._part is not None:
            self._part.returned(rank, now)
        return []

    def injected(self, fault: FaultInjected) -> None:
        """Somebody makes a fault on purpose in a rank of ours."""
        if self._part is not None and fault.rank is not None and fault.round == self._part.round:
            self._part.injected(fault.rank, fault.by, fault.fault)

    def script_failed(self, rank: int, ending: RankExit) -> list[Action]:
        """An exception has ended a rank's script; its process will exit, but may take its time."""
        return self._part.raised(rank, ending) if self._part else []

    def rank_gone(self, rank: int, ending: RankExit) -> list[Action]:
        """A rank's process has ended without an order."""
        part = self._part
        counted = None if part is None else part.gone(rank, ending)
        if part is None or counted is None:
            return []
        if self._departure is not None:
            return self._departure.rank_gone(part, counted)
        return part.follows(rank, counted)

    def rank_fell(self, rank: int, ending: RankExit) -> list[Action]:
        """A rank's process ended by itself, although its round is being stopped."""
        if self._part is None or self._departure is not None:
            return []
        return self._part.fell(rank, ending)

    def measured(self) -> list[Action]:
        """Bring the figures of a network test: the next round may wait for them."""
        return [AskToJoin()] if self._part is None and self._departure is None else []

    def start_failed(self, round: int, reason: str) -> list[Action]:
        """The ranks of a round could not be started."""
        if self._part is None or self._part.round != round:
            return []
        return self._part.failed_to_start(reason)

    def saved(self) -> list[Action]:
        """The parked ranks have saved, or have failed to."""
        if not self.unsaved:
            return []
        self.unsaved = 0
        return [] if self._departure is not None else [AskToJoin()]

    def stopped(self, round: int, *, parked: int = 0) -> list[Action]:
        """No process of the round is left, but perhaps ranks that are parked for the next one."""
        if self._part is None or self._part.round != round:
            return []
        self.last_round, self.last_slot = round, self._part.order.slot
        self._part, self._is_spare = None, False
        self._parked = self.unsaved = parked
        if self._departure is None:
            return [AskToJoin()]  # before its answer comes what our last reports have changed
        return self._say_withheld() + self._departure.leave(None)

    # -- people, schedulers, time ----------------------------------------------------------------

    def preempted(self, number: int, name: str, now: float) -> list[Action]:
        """A signal announces that this node will be taken away."""
        if self._departure is not None:
            return [PassNotice(number)]
        return self._goes(*departure.preempted(number, name, self._part, self.settings, now))

    def interrupted(self, number: int, name: str, now: float) -> list[Action]:
        """A person ends the agent; the second time, its ranks are killed at once."""
        if self._departure is not None and self._departure.cause == "operator":
            return self._part.stop() if self._part else []
        return self._goes(*departure.interrupted(number, name, self._part, self.settings, now))

    def unheard(self, now: float, reason: str) -> list[Action]:
        """The control plane is silent. An agent whose ranks are over does not wait for ever."""
        part, limit_s = self._part, self.settings.unheard_within_s
        unheard_s = 0.0 if part is None or self._departure is not None else part.unheard(now)
        if part is None or unheard_s < min(_SHOW_UNHEARD_AFTER_S, limit_s):
            return []
        code = part.unheard_code
        if unheard_s < limit_s:
            text = (
                f"the ranks of this node are over, and nobody answers ({reason}): the agent waits "
                f"for an answer, for at most {limit_s:g} s, and then exits with {code}"
            )
            is_news, part.is_unheard_shown = not part.is_unheard_shown, True
            return [ShowLine(text, is_warning=True)] if is_news else []
        waited = f"for {limit_s:g} s nobody has answered ({reason})"
        goodbye = (
            Departure(0, "done", f"every rank exited with 0, and {waited}")
            if code == 0
            else Departure(code, "failed", f"this node's ranks are over, and {waited}: requeue it")
        )
        return self._go(goodbye, self.settings.stop_grace_s)

    def give_up(self, code: int, reason: str) -> list[Action]:
        """The agent cannot go on: the warden is lost for good, or nobody answers."""
        return self._go(Departure(code, "failed", reason))

    def tick(self, now: float) -> list[Action]:
        """Return the actions that are due."""
        acts = self._part.due(now) if self._part else []
        if self._departure is not None:
            acts += self._departure.due(self._part, now)
        elif self._part is None and self._ask_at is not None and self._ask_at <= now:
            self._ask_at = now + ASK_AGAIN_S
            acts.append(AskToJoin())
        return acts

    # -- inside --------------------------------------------------------------------------------

    def _hear(self, round: int | None) -> None:
        if round is not None and (self.round is None or round > self.round):
            self.round = round

    def _stand(self, *, is_spare: bool) -> list[Action]:
        """The node has no ranks to run now."""
        is_news = is_spare and not self._is_spare
        self._is_spare = is_spare
        if not is_news:
            return []
        ends = [EndParked(self.settings.stop_grace_s)] if self._parked else []
        self._parked = self.unsaved = 0
        return [ShowLine("standing by as a spare"), *ends]

    def _say_refused(self, reply: Joined) -> list[Action]:
        if reply.is_accepted:
            return []
        text = f"rendezvous refused this node: {reply.reason}"
        return self._say_once(text, key=f"{reply.standing} {reply.cause}", is_warning=True)

    def _say_once(self, text: str, *, key: str = "", is_warning: bool = False) -> list[Action]:
        key = key or text
        if key in self._said:
            return []
        self._said.add(key)
        return [ShowLine(text, is_warning=is_warning)]

    def _start(self, order: StartRanks) -> list[Action]:
        part = self._part
        if part is not None:
            # the same order may come again
            return [] if part.round == order.round else self._outlived(part, order.round)
        if order.round == self.last_round:  # an order that came before it was overtaken
            return []
        if order.round == self._stopped_round:  # overtaken by the order to stop
            self.last_round, self.last_slot = order.round, order.slot
            return [AskToJoin()]
        acts = self._say_withheld()
        if self._is_spare:
            acts.append(ShowLine(f"this spare joins round {order.round}"))
        self._ask_at, self._is_spare, self._parked, self.unsaved = None, False, 0, 0
        self._part = RoundPart(order, self.settings)
        return [
            *acts,
            *([ShowLine(order.reason)] if order.restarts or order.incident else []),
            order,
        ]

    def _stop(self, part: RoundPart | None, order: StopRanks, *, keeps: bool) -> list[Action]:
        """Stop the ranks. The order may come again, with a better cause, after they stopped."""
        told = None if self._cause is None else self._cause.round
        held = self._withheld
        if held is not None and held.round == order.round and order.weight < held.weight:
            order = replace(order, reason=held.reason, weight=held.weight)
        if part is None:
            is_known = held is not None and held.round == order.round
            return self._say_cause(order) if is_known or told == order.round else []
        acts: list[Action] = []
        if order.cause_within_s > 0 and told != part.round:
            self._withheld = order
        else:
            acts = self._say_cause(order)
        return acts + part.stop(
            order.grace_s,
            evidence_s=order.evidence_s,
            incident=order.incident,
            wait_s=order.cause_within_s,
            keeps=keeps,
            is_planned=order.are_kept,
        )

    def _say_withheld(self) -> list[Action]:
        """Show a cause although a better one might have followed; not while ranks are stopped."""
        return self._say_cause(self._withheld) if self._withheld and self._part is None else []

    def _say_cause(self, order: StopRanks) -> list[Action]:
        """Show the cause, and once more if it turns out to be a consequence of something else."""
        shown, self._withheld = self._cause, None
        if shown is None or shown.round != order.round:
            self._cause = order
            return [ShowLine(f"round {order.round} is over: {order.reason}")]
        if order.weight < shown.weight or order.reason == shown.reason:
            return []  # it was overtaken by a better one, or comes again
        self._cause = order
        return [ShowLine(f"what ended round {order.round}: {order.reason}")]

    def _outlived(self, part: RoundPart, newest: int) -> list[Action]:
        """Our ranks belong to a round that is over: the agent was cut off, or paused."""
        acts: list[Action] = []
        if part.state != "stopping":
            text = f"round {part.round} is over, the job is at round {newest}: stopping its ranks"
            acts.append(ShowLine(text))
        return acts + part.stop()

    def _leave_job(self, order: LeaveJob) -> list[Action]:
        if self._departure is not None and self._departure.kill_at is None:
            return []
        return self._go(departure.sent(order), order.grace_s)

    def _go(self, goodbye: Departure, grace_s: float = 0.0) -> list[Action]:
        return self._goes(goodbye, goodbye.leave(self._part, grace_s))

    def _goes(self, goodbye: Departure, acts: list[Action]) -> list[Action]:
        self._departure = goodbye
        if self._part is not None:
            self._part.leaves()
        return self._say_withheld() + acts
