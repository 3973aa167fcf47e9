"""How an agent leaves: preempted, interrupted or dismissed; and what its ranks may do before."""

from dataclasses import dataclass
from signal import SIGTERM

from everstep.messages import Joined, LeaveJob, SaveCheckpoint
from everstep_services.agent.core.actions import (
    Action,
    ExitAgent,
    LeaveCause,
    PassNotice,
    RecordInterrupt,
    RecordMissed,
    RecordNotice,
    RecordSaved,
    SendReport,
    ShowLine,
    SignalRanks,
)
from everstep_services.agent.core.exit import RankExit
from everstep_services.agent.core.round_part import RoundPart
from everstep_services.agent.settings import AgentSettings

SAVED = 91
"""Preempted, and no work is lost: all was saved, or there was nothing to save."""
_AGREED_WITHIN_S = 20.0
_ASK_AGAIN_S = 0.5


@dataclass(slots=True)
class Departure:
    """Why the agent leaves, and its exit code."""

    code: int
    cause: LeaveCause
    reason: str
    is_sent: bool = False
    has_seat: bool = False
    """Rendezvous sends only this node away, and hears of its end from the agent."""
    ends_job: bool = False
    """The job is over, and its exit code is `code`; a node that leaves alone does not end it."""
    had_work: bool = True
    """Its ranks could have something to save; a spare has no ranks, and others may only start."""
    kill_at: float | None = None
    """Until then the ranks may save and exit."""
    alone_at: float | None = None
    """Until then rendezvous may name the step after which all ranks stop."""
    after_step: int | None = None
    """The step that rendezvous has named, if no rank could be asked yet."""

    def leave(self, part: RoundPart | None, grace_s: float = 0.0) -> list[Action]:
        """Stop what runs; exit once nothing does."""
        if part is not None:
            return part.stop(grace_s)
        exiting = ExitAgent(
            self.code,
            self.cause,
            self.reason,
            is_sent=self.is_sent,
            has_seat=self.has_seat,
            ends_job=self.ends_job,
            had_work=self.had_work,
        )
        return [exiting]

    def heard(self, now: float) -> None:
        """Rendezvous will name the step; a step of our own would part us from other nodes.

        If rendezvous goes away too, the ranks still have half of their time.
        """
        if self.alone_at is not None and self.kill_at is not None:
            self.alone_at = max(
                self.alone_at, min(now + _AGREED_WITHIN_S, (now + self.kill_at) / 2)
            )

    def step_agreed(self) -> None:
        """Rendezvous has named the step: this node no longer has to choose one alone."""
        self.alone_at = None

    def due(self, part: RoundPart | None, now: float) -> list[Action]:
        """Return the actions that are due while the ranks save."""
        if self.kill_at is not None and self.kill_at <= now:
            self.kill_at = self.alone_at = None
            if part is None:
                return []
            missed = [RecordMissed("ranks still ran")] if self.cause == "preempted" else []
            return [*missed, *part.stop()]
        if self.alone_at is not None and self.alone_at <= now:
            self.alone_at = None
            if part is not None:
                return part.asked_alone(self.after_step)
        return []

    def unasked(self, after_step: int | None, now: float) -> None:
        """No script counts steps yet; one may open its session later."""
        if self.kill_at is not None:
            self.after_step = after_step
            self.alone_at = now + _ASK_AGAIN_S

    def rank_gone(self, part: RoundPart, ending: RankExit) -> list[Action]:
        """A rank has ended; the last one tells whether all was saved."""
        part.ended_while_leaving(ending)
        if not part.are_gone:
            return []
        if self.cause != "preempted":
            return part.stop()
        if part.has_failed:
            return [RecordMissed(f"a rank {ending.text}"), *part.stop()]
        self.code = SAVED  # they used the time that they had, and ended well
        saved: list[Action] = []
        if part.stops and part.order.slot == 0 and self.kill_at is not None:
            saved = [RecordSaved(max(part.stops.values()), self.kill_at)]
        return [*saved, *part.stop()]


def preempted(
    number: int, name: str, part: RoundPart | None, settings: AgentSettings, now: float
) -> tuple[Departure, list[Action]]:
    """A signal announces that this node will be taken away."""
    grace_s = settings.preempt_grace_s
    reason = f"{name} announced that this node will be taken away"
    goodbye, noticed = Departure(128 + number, "preempted", reason), RecordNotice(name, grace_s)
    if part is None or part.are_gone or part.state == "stopping":
        goodbye.code, goodbye.had_work = SAVED, False
        return goodbye, [noticed, *goodbye.leave(part)]
    if part.state == "starting":  # nothing to save yet, and perhaps no handler for the signal
        goodbye.code, goodbye.had_work = SAVED, False
        return goodbye, [noticed, *goodbye.leave(part, settings.stop_grace_s)]
    goodbye.kill_at = now + grace_s
    goodbye.alone_at = now + min(settings.agree_within_s, grace_s / 2)
    part.noticed(now)
    told = SendReport(part.round, "preempted", reason, grace_s=grace_s)
    line = ShowLine(f"{reason}: its ranks have {grace_s:g} s")
    return goodbye, [PassNotice(number), noticed, told, line]


def taken(
    order: SaveCheckpoint, part: RoundPart, settings: AgentSettings, now: float
) -> tuple[Departure, list[Action]]:
    """Other nodes of the job are taken away, and this node leaves with them."""
    reason = f"all nodes leave: {order.reason}"
    goodbye = Departure(128 + SIGTERM, "preempted", reason)
    if part.state == "starting":
        goodbye.code, goodbye.had_work = SAVED, False
        return goodbye, goodbye.leave(part, settings.stop_grace_s)
    grace_s = settings.preempt_grace_s if order.within_s is None else order.within_s
    goodbye.kill_at = now + grace_s
    line = ShowLine(f"{reason}: its ranks have {grace_s:g} s")
    return goodbye, [PassNotice(SIGTERM, to_handlers=True), line]


def interrupted(
    number: int, name: str, part: RoundPart | None, settings: AgentSettings, now: float
) -> tuple[Departure, list[Action]]:
    """A person ends the agent."""
    goodbye = Departure(128 + number, "operator", f"{name} from a person or its terminal")
    told = RecordInterrupt(name)
    if part is None:
        return goodbye, [told, *goodbye.leave(None)]
    goodbye.kill_at = now + settings.stop_grace_s
    line = ShowLine(f"{name}: stopping; once more kills at once")
    return goodbye, [SignalRanks(number), line, told]


def sent(order: LeaveJob) -> Departure:
    """Rendezvous has ordered the agent to leave."""
    is_ours = order.state == "excluded"
    reason = order.reason if is_ours else f"the job is {order.state}: {order.reason}"
    cause = _cause_of(order)
    return Departure(
        order.exit_code, cause, reason, is_sent=True, has_seat=is_ours, ends_job=not is_ours
    )


def answered(code: int, reply: Joined) -> Departure:
    """Rendezvous has answered `join` with an exit code: of the job, or of this node alone."""
    is_replaced = reply.standing == "leaving"
    return Departure(
        code,
        "excluded" if is_replaced else "refused",
        reply.reason,
        is_sent=True,
        has_seat=reply.is_accepted,
        ends_job=reply.cause == "job_over" or (reply.is_accepted and not is_replaced),
    )


def _cause_of(order: LeaveJob) -> LeaveCause:
    """Close the set: a state of a newer release means that the job was stopped."""
    match order.state:
        case "done" | "excluded" as state:
            return state
        case _:
            return "stopped"
