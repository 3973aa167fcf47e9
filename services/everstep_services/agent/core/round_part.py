"""The part of a node in one round: its ranks, from the order to start them until none is left."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from signal import SIGKILL
from typing import Literal

from everstep.incident_causes import CONSEQUENCE, PLAIN, WAITS
from everstep.messages import Reported, SaveCheckpoint, StartRanks
from everstep_services.agent.core.actions import (
    Action,
    AskRanksToStop,
    RecordStopSeen,
    SendReport,
    ShowLine,
    SignalRanks,
    StopRound,
    StopWithoutWait,
)
from everstep_services.agent.core.exit import RankExit, exit_sentence
from everstep_services.agent.settings import AgentSettings

UNHEARD = 94

PartState = Literal["starting", "running", "stopping"]
RanksOutcome = Literal["", "failed", "stopped", "finished"]
"""The outcome of the ranks so far, as in `Join.running_state`; empty while they are at work."""


ASK_AGAIN_S = 5.0
"""A waiting node asks this often, in case an order was lost."""
_STALL_AGAIN_S = 10.0
"""A stall without consequences is reported again this long after rendezvous has heard of it."""
_EXIT_WITHIN_S = 30.0
"""A rank whose script has returned may take this long to exit."""
_IDLE_AT_END_S = 120.0
"""A rank that is idle for this long, after others have exited with 0, will never exit."""
_NAMED_MOST = 8


@dataclass(slots=True)
class _Stall:
    told: SendReport
    at: float
    weight: int
    """How sure the console is that this rank is the reason, as in `Reported`."""
    again_at: float | None = None
    """None until the last report of it was heard: the bus may be away."""


@dataclass(slots=True)
class _Rank:
    number: int
    is_running: bool = False
    is_gone: bool = False
    is_done: bool = False
    """It exited with 0."""
    has_failed: bool = False
    """Its failure was reported before its process was gone."""
    returned_at: float | None = None
    is_overdue: bool = False
    """It was killed because it did not exit after its script had returned."""
    stall: _Stall | None = None
    injected_by: str = ""
    """Who made a fault in it on purpose, and which."""
    fault: str = ""

    @property
    def hangs(self) -> bool:
        """It has stalled, and waits for no other rank."""
        stall = self.stall
        return stall is not None and stall.weight > 0 and stall.told.fingerprint != WAITS

    def why(self, reason: str) -> str:
        """The reason for a report of it, for a person."""
        made = f", after {self.injected_by} injected {self.fault}" if self.injected_by else ""
        return f"{reason}{made}"


@dataclass(slots=True)
class RoundPart:
    """starting ─▶ running ─▶ stopping."""

    order: StartRanks
    settings: AgentSettings
    state: PartState = "starting"
    is_leaving: bool = False
    """The node leaves: its ranks may save and exit, and nothing of this matters to the round."""
    has_failed: bool = False
    noticed_at: float | None = None
    """When the agent heard that nodes will be taken away."""
    unheard_at: float | None = None
    """Since when nobody has answered although the ranks are over."""
    is_unheard_shown: bool = False
    """The console tells that the agent waits for an answer."""
    is_asked: bool = False
    """Its ranks were asked to stop after a certain step."""
    stops: dict[int, int] = field(default_factory=dict)
    """The ranks that have seen the request, and their last steps."""
    _explained: int = 0
    """The weight of the best explanation of its stalls that the console has shown."""
    _waits: bool = False
    """Its ranks will be stopped, and may end by themselves first."""
    _has_stepped: bool = False
    _is_acknowledged: bool = False
    _ranks: dict[int, _Rank] = field(init=False)

    def __post_init__(self) -> None:
        first = self.order.first_rank
        numbers = range(first, first + self.order.ranks)
        self._ranks = {number: _Rank(number) for number in numbers}

    @property
    def round(self) -> int:
        """The number of the round."""
        return self.order.round

    @property
    def is_wanted(self) -> bool:
        """Its ranks must be started, perhaps only to end by themselves."""
        return self.state == "starting" or (self.state == "stopping" and self._waits)

    @property
    def are_gone(self) -> bool:
        """No rank is left, although processes that ranks started may be."""
        return all(rank.is_gone for rank in self._ranks.values())

    @property
    def came_to(self) -> RanksOutcome:
        """The outcome of the ranks so far, named as in `join`."""
        if not (self.has_failed or self.are_gone):
            return ""
        return "failed" if self.has_failed else "stopped" if self.stops else "finished"

    @property
    def live(self) -> tuple[int, ...]:
        """The ranks that are expected to make progress."""
        if self.is_leaving or self.state == "stopping":
            return ()
        return tuple(rank.number for rank in self._ranks.values() if not rank.is_gone)

    @property
    def last(self) -> frozenset[int]:
        """Ranks that still run although another one here has exited with 0."""
        left = frozenset(rank.number for rank in self._ranks.values() if not rank.is_gone)
        is_over = self.state == "running" and not self.has_failed and len(left) < len(self._ranks)
        return left if is_over else frozenset()

    @property
    def unheard_code(self) -> int:
        """The exit code if nobody answers any more.

        0 if all that the job needs has succeeded here, 94 where others may need this node.
        """
        return 0 if self.came_to == "finished" and self.order.slots == 1 else UNHEARD

    def unheard(self, now: float) -> float:
        """How long nobody has answered since no rank is at work."""
        if not (self.has_failed or self.are_gone) or self.state == "stopping":
            return 0.0
        self.unheard_at = now if self.unheard_at is None else self.unheard_at
        return now - self.unheard_at

    def heard(self, now: float) -> list[Action]:
        """The control plane has answered."""
        since, self.unheard_at = self.unheard_at, None
        if since is None or not self.is_unheard_shown:
            return []
        self.is_unheard_shown = False
        return [ShowLine(f"rendezvous answers again: the agent had waited for {now - since:.0f} s")]

    def leaves(self) -> None:
        """The node leaves: its ranks may save and exit."""
        self.is_leaving = True

    # -- they come and go ------------------------------------------------------------------------

    def runs(self, rank: int) -> list[Action]:
        """A rank's process has begun."""
        if rank not in self._ranks:
            return []
        self._ranks[rank].is_running = True
        if self.state != "starting" or not all(rank.is_running for rank in self._ranks.values()):
            return []
        self.state = "running"
        return [SendReport(self.round, "started", "all ranks run")]

    def stepped(self, rank: int, step: int) -> list[Action]:
        """A rank has made its first step of the round."""
        if self._has_stepped or rank != self.order.first_rank:
            return []
        self._has_stepped = True
        if self.order.slot != 0:
            return []
        return [SendReport(self.round, "first_step", "the first step is made", rank, step=step)]

    def injected(self, rank: int, by: str, fault: str) -> None:
        """Somebody makes a fault in a rank on purpose."""
        if rank in self._ranks:
            self._ranks[rank].injected_by, self._ranks[rank].fault = by, fault

    def failed_to_start(self, reason: str) -> list[Action]:
        """The ranks could not be started."""
        self.has_failed = True
        return [SendReport(self.round, "start_failed", reason)]

    def returned(self, rank: int, now: float) -> None:
        """A rank's script has returned; its process may still be at work."""
        if rank in self._ranks:
            self._ranks[rank].returned_at = now

    def raised(self, rank: int, ending: RankExit) -> list[Action]:
        """An exception has ended a rank's script."""
        if rank not in self._ranks or self.is_leaving or self.state == "stopping":
            return []
        self._ranks[rank].has_failed = True
        return self._failed(rank, ending)

    def gone(self, rank: int, ending: RankExit) -> RankExit | None:
        """Return how this end counts; None if it was ordered, or the rank is unknown."""
        if rank not in self._ranks or self.state == "stopping":
            return None
        self._ranks[rank].is_gone = True
        self._ranks[rank].is_done = ending.is_good
        return ending.forgiven() if self._ranks[rank].is_overdue else ending

    def fell(self, rank: int, ending: RankExit) -> list[Action]:
        """A rank ended by itself although its round is being stopped: it may be the cause."""
        state = self._ranks.get(rank)
        if state is None or state.has_failed or self.is_leaving or ending.is_good:
            return []
        state.has_failed = True
        return self._failed(rank, ending)

    def ended_while_leaving(self, ending: RankExit) -> None:
        """A rank has ended while the node leaves; nothing follows for the round."""
        self.has_failed = self.has_failed or not ending.is_good

    def follows(self, rank: int, ending: RankExit) -> list[Action]:
        """Return the consequences of a rank's end for an agent that stays."""
        if not ending.is_good:
            return [] if self._ranks[rank].has_failed else self._failed(rank, ending)
        if not self.are_gone or self.has_failed:
            return []
        if self.stops:
            reason = f"every rank has stopped after step {max(self.stops.values())}"
            return [SendReport(self.round, "stopped", reason)]
        return [SendReport(self.round, "finished", "every rank exited with 0")]

    def stop(
        self,
        grace_s: float = 0.0,
        *,
        evidence_s: float = 0.0,
        incident: str | None = None,
        wait_s: float = 0.0,
        keeps: bool = False,
        is_planned: bool = False,
    ) -> list[Action]:
        """Stop every rank, or park it. If that is under way, only cancel the wait."""
        if self.state == "stopping":
            if wait_s or not self._waits:
                return []
            self._waits = False
            return [StopWithoutWait()]
        self.state, self._waits = "stopping", wait_s > 0
        is_done = self.came_to == "finished" and not self.is_leaving
        kept = self._survivors if keeps and not self.is_leaving else ()
        return [
            StopRound(self.round, grace_s, evidence_s, incident, wait_s, is_done, kept, is_planned)
        ]

    @property
    def _survivors(self) -> tuple[int, ...]:
        """The ranks that have neither failed nor stalled by themselves."""
        ranks = self._ranks.values()
        return tuple(it.number for it in ranks if not (it.is_gone or it.has_failed or it.hangs))

    def _failed(self, rank: int, ending: RankExit) -> list[Action]:
        is_first, self.has_failed = not self.has_failed, True
        # of the ranks that fail after the first, only those are reported that may be the cause
        if not is_first and ending.is_secondary:
            return []
        reason = self._ranks[rank].why(exit_sentence(rank, ending, self.order.world_size))
        ranks = self._ranks.values()
        left = [str(it.number) for it in ranks if it.is_done or it.returned_at is not None]
        if ending.is_secondary and left:
            noun = "rank" if len(left) == 1 else "ranks"
            reason += f"; {noun} {', '.join(left[:_NAMED_MOST])} had left before"
        by = self._ranks[rank].injected_by
        return [SendReport(self.round, "rank_exited", reason, rank, ending, injected_by=by)]

    # -- they stop after a step ------------------------------------------------------------------

    def asked(self, order: SaveCheckpoint, after_step: int, now: float) -> list[Action]:
        """All ranks of the round must stop after this step."""
        self.is_asked = True
        if order.occasion == "preemption":
            self.noticed(now)
        return [AskRanksToStop(after_step)]

    def asked_alone(self, after_step: int | None) -> list[Action]:
        """Rendezvous has named no step in time: the ranks of this node stop without it."""
        if self.is_asked:
            return []
        self.is_asked = True
        return [AskRanksToStop(after_step)]

    def unasked(self) -> None:
        """No rank could be asked to stop."""
        self.is_asked = False

    def noticed(self, now: float) -> None:
        """A node of the job will be taken away; the first such notice counts."""
        if self.noticed_at is None:
            self.noticed_at = now

    def stops_after(self, rank: int, step: int, now: float) -> list[Action]:
        """The script of a rank has seen the request to stop."""
        if rank not in self._ranks:
            return []
        self.stops[rank] = step
        are_all = len(self.stops) == len(self._ranks)
        if self.noticed_at is None or self._is_acknowledged or not are_all:
            return []
        self._is_acknowledged = True
        return [RecordStopSeen(max(self.stops.values()), now - self.noticed_at)]

    # -- they stall ------------------------------------------------------------------------------

    def stalled(
        self, told: SendReport, rank: int, now: float, *, is_doubtful: bool
    ) -> list[Action]:
        """A rank has made no progress past its limit."""
        if rank not in self.live:
            return []
        state = self._ranks[rank]
        told = replace(told, reason=state.why(told.reason), injected_by=state.injected_by)
        state.stall = _Stall(told, now, 0 if is_doubtful else PLAIN)
        return [ShowLine(told.reason, is_warning=True), told]

    def stall_heard(self, rank: int, reply: Reported, now: float) -> list[Action]:
        """Rendezvous has heard of this stall; it is reported again later.

        Show what it knows of the reason, once, and later only what explains the stall better.
        """
        stall = self._ranks[rank].stall if rank in self._ranks else None
        if stall is None:
            return []
        stall.again_at = now + _STALL_AGAIN_S
        is_shown = any(reply.cause == other.told.reason for other in self._stalls())
        if (
            is_shown
            or self.state == "stopping"
            or reply.weight <= max(self._explained, stall.weight)
        ):
            return []
        self._explained = reply.weight
        verb = "waits" if reply.weight > CONSEQUENCE else "may wait"
        return [ShowLine(f"what rank {rank} {verb} for: {reply.cause}")]

    def moves(self, rank: int, reason: str, fact: str) -> list[Action]:
        """A rank that had stalled has made progress."""
        if rank not in self.live:
            return []
        self._ranks[rank].stall = None
        if not self._stalls():
            self._explained = 0
        return [ShowLine(reason), SendReport(self.round, "rank_recovered", reason, rank, fact=fact)]

    # -- checks ----------------------------------------------------------------------------------

    def check(self, told: SendReport) -> list[Action]:
        """A probe has a result that rendezvous must know, while the round goes on."""
        return [told] if self.live else []

    # -- time ------------------------------------------------------------------------------------

    @property
    def wake_at(self) -> float | None:
        """When `due` must be called next."""
        times = [self._exit_by(rank) for rank in self._ranks.values()]
        times += [stall.again_at for stall in self._stalls()]
        return min((at for at in times if at is not None), default=None)

    def due(self, now: float) -> list[Action]:
        """Handle exits that hang, and report stalls again."""
        acts: list[Action] = []
        for rank in self._ranks.values():
            exit_by = self._exit_by(rank)
            if exit_by is not None and exit_by <= now:
                limit_s = _EXIT_WITHIN_S
                why = f"has not exited {limit_s:g} s after its script had returned"
                acts += self._forgive(rank, why)
        for stall in self._stalls():
            if stall.again_at is not None and stall.again_at <= now:
                stall.again_at = None
                waited_s = (stall.told.waited_s or 0.0) + now - stall.at
                acts.append(replace(stall.told, waited_s=waited_s))
        return acts

    def idle(self, idle_s: Mapping[int, float]) -> list[Action]:
        """The last ranks have been idle for this long: no processor time, no bytes."""
        acts: list[Action] = []
        for number in sorted(self.last & idle_s.keys()):
            rank = self._ranks[number]
            if idle_s[number] >= _IDLE_AT_END_S and not rank.is_overdue:
                why = f"has done nothing for {idle_s[number]:.0f} s after others had exited with 0"
                acts += self._forgive(rank, why)
        return acts

    def _exit_by(self, rank: _Rank) -> float | None:
        if rank.returned_at is None or rank.is_gone or rank.is_overdue:
            return None
        return rank.returned_at + _EXIT_WITHIN_S

    def _stalls(self) -> list[_Stall]:
        stalls = (self._ranks[number].stall for number in self.live)
        return [stall for stall in stalls if stall is not None]

    def _forgive(self, rank: _Rank, why: str) -> list[Action]:
        """Kill a rank that has done its work and whose exit hangs."""
        rank.is_overdue = True
        text = f"rank {rank.number} {why}: killed, and counted as done"
        return [ShowLine(text, is_warning=True), SignalRanks(SIGKILL, (rank.number,))]
