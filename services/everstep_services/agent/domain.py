"""What an agent does about orders, exits, signals and silence.

joining ─▶ standby ─▶ starting ─▶ running ─▶ stopping ─▶ joining
   └──────────────────────┴──────────┴──▶ leaving (from anywhere)

Pure: each method takes what happened and `now`, and says what is to be done, in order. An agent
decides nothing about the round: it reports, and obeys orders that are not older than what it knows.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from signal import SIGKILL, SIGTERM

from everstep.messages import (
    AwaitRound,
    Joined,
    LeaveJob,
    NameExcuse,
    Order,
    Reported,
    RunChecks,
    SaveCheckpoint,
    StandBy,
    StartRanks,
    StopRanks,
)
from everstep_services.agent.acts import (
    Acknowledged,
    Act,
    AskToStop,
    Check,
    Excuse,
    Exiting,
    Forward,
    Join,
    Missed,
    Noticed,
    PassOn,
    Reach,
    Saved,
    Say,
    Start,
    Stop,
    Tell,
)
from everstep_services.agent.failures import Exit


@dataclass(frozen=True, slots=True)
class Limits:
    """How patient an agent is."""

    ask_again_s: float = 5.0
    """A node that waits asks this often, in case an order was lost."""
    stop_grace_s: float = 3.0
    """From SIGTERM to SIGKILL, where no order says."""
    preempt_grace_s: float = 600.0
    """From a preemption signal to SIGKILL."""
    agree_within_s: float = 2.0
    """Ranks do not wait longer for the step after which all are to stop."""
    exit_within_s: float = 30.0
    """A rank whose script has returned may take so long to exit."""
    idle_at_end_s: float = 120.0
    """A rank that does nothing for so long, after others have exited with 0, will never exit."""


@dataclass(slots=True)
class _Rank:
    number: int
    is_running: bool = False
    is_gone: bool = False
    has_failed: bool = False
    """It was told, before its process was gone."""
    returned_at: float | None = None
    is_overdue: bool = False
    """It was killed because it did not exit after its script had returned."""


@dataclass(slots=True)
class _Goodbye:
    code: int
    cause: str
    reason: str
    is_sent: bool = False
    kill_at: float | None = None
    alone_at: float | None = None
    """Until then rendezvous may say after which step all ranks are to stop."""


@dataclass(slots=True)
class _Work:
    """The ranks of one round."""

    order: StartRanks
    ranks: dict[int, _Rank]
    has_failed: bool = False
    has_stepped: bool = False
    noticed_at: float | None = None
    """When it was heard that nodes are about to be taken away."""
    is_asked: bool = False
    """Its ranks were told after which step to stop."""
    stops: dict[int, int] = field(default_factory=dict)
    """Ranks that have seen it, and their last steps."""
    is_acknowledged: bool = False

    @property
    def are_gone(self) -> bool:
        return all(rank.is_gone for rank in self.ranks.values())


@dataclass
class Agent:
    """One agent's place in its job."""

    limits: Limits
    state: str = "joining"
    round: int | None = None
    """The newest round that we have heard of: whatever is older is refused."""
    last_round: int | None = None
    last_slot: int | None = None
    refused_orders: int = 0
    _work: _Work | None = None
    _goodbye: _Goodbye | None = None
    _ask_at: float | None = None
    _said: set[str] = field(default_factory=set)

    @property
    def order(self) -> StartRanks | None:
        """The order whose ranks run, or are being started or stopped."""
        return self._work.order if self._work else None

    @property
    def running_state(self) -> str:
        """What became of the ranks of `order` so far, as in `join`."""
        work = self._work
        if work is None or not (work.has_failed or work.are_gone):
            return ""
        return "failed" if work.has_failed else "stopped" if work.stops else "finished"

    @property
    def wake_at(self) -> float | None:
        """When `tick` wants to be called next."""
        times = [self._ask_at]
        if self._work is not None:
            times += [
                rank.returned_at + self.limits.exit_within_s
                for rank in self._work.ranks.values()
                if rank.returned_at is not None and not rank.is_gone and not rank.is_overdue
            ]
        if self._goodbye is not None:
            times += [self._goodbye.kill_at, self._goodbye.alone_at]
        return min((at for at in times if at is not None), default=None)

    # -- rendezvous answers and orders ---------------------------------------------------------

    def begin(self) -> list[Act]:
        """We are there."""
        return [Join()]

    def joined(self, reply: Joined, now: float) -> list[Act]:
        """Rendezvous has answered our `join`."""
        if self._goodbye is not None:
            return []
        self._hear(reply.round)
        if reply.exit_code is not None:
            return self._leave(reply.exit_code, "refused", reply.reason, is_sent=True)
        acts = self._say_refused(reply)
        if self._work is None:
            acts += self._wait(reply)
        wait_s = self.limits.ask_again_s if reply.retry_after_s is None else reply.retry_after_s
        self._ask_at = now + wait_s
        if reply.order is not None:
            acts += self.ordered(reply.order)
        elif self._work is not None and reply.round > self._work.order.round:
            acts += self._outlived(reply.round)
        return acts

    def reported(self, tell: Tell, reply: Reported) -> list[Act]:
        """Rendezvous has answered a report."""
        self._hear(reply.round)
        if self._work is None or self._goodbye is not None or reply.is_current:
            return []
        if self._work.order.round != tell.round:
            return []
        if reply.round > tell.round:
            return self._outlived(reply.round)
        return [Join()]  # it does not know us: its document may be lost, and `join` makes it again

    def ordered(self, order: Order) -> list[Act]:
        """An order was heard. An older one than we know of changes nothing."""
        if self.round is not None and order.round < self.round:
            self.refused_orders += 1
            return []
        self._hear(order.round)
        acts: list[Act] = []
        if isinstance(order, LeaveJob):
            acts = self._leave_job(order)
        elif self._goodbye is None:
            match order:
                case StartRanks():
                    acts = self._start(order)
                case StopRanks():
                    acts = self._stop(order)
                case StandBy() if self._work is None and self.state != "standby":
                    self.state = "standby"
                    acts = [Say("standing by as a spare")]
                case _:
                    acts = self._asked(order)
        return acts

    def _asked(self, order: Order) -> list[Act]:
        """An order that leaves the ranks as they are."""
        match order:
            case NameExcuse() if self._work is not None:
                return [Excuse(order)]
            case RunChecks():
                return [Check(order)]
            case AwaitRound():
                return self._say_once(f"job {order.job} {order.reason}")
            case _:
                return []

    def asked_to_save(self, order: SaveCheckpoint, now: float) -> list[Act]:
        """All ranks of the round are to save after the same step, and perhaps to end."""
        self._hear(order.round)
        work = self._work
        if work is None or work.order.round != order.round or work.has_failed or self._is_ending:
            return []
        if order.after_step is None:
            return [Reach(order.round)]
        if not order.then_stop or work.is_asked:
            return []
        acts = self._taken(order, now) if order.then_leave and self._goodbye is None else []
        work.is_asked = True
        if order.occasion == "preemption" and work.noticed_at is None:
            work.noticed_at = now
        if self._goodbye is not None:
            self._goodbye.alone_at = None
        return [*acts, AskToStop(order.after_step)]

    def bus_back(self) -> list[Act]:
        """The bus was away: what we missed, rendezvous tells those who ask."""
        return [] if self._goodbye is not None else [Join()]

    # -- ranks ---------------------------------------------------------------------------------

    def rank_runs(self, rank: int) -> list[Act]:
        """A rank's process has begun."""
        work = self._work
        if work is None or rank not in work.ranks:
            return []
        work.ranks[rank].is_running = True
        if self.state != "starting" or not all(one.is_running for one in work.ranks.values()):
            return []
        self.state = "running"
        return [Tell(work.order.round, "started", "all ranks run")]

    def rank_stepped(self, rank: int, step: int) -> list[Act]:
        """A rank has made its first step of the round."""
        work = self._work
        if work is None or work.has_stepped or rank != work.order.first_rank:
            return []
        work.has_stepped = True
        if work.order.slot != 0:
            return []
        return [Tell(work.order.round, "first_step", "the first step is made", rank, step=step)]

    @property
    def last_ranks(self) -> frozenset[int]:
        """Ranks that still run although another one here has exited with 0."""
        work = self._work
        if work is None or self.state != "running" or work.has_failed:
            return frozenset()
        if not any(rank.is_gone for rank in work.ranks.values()):
            return frozenset()
        return frozenset(rank.number for rank in work.ranks.values() if not rank.is_gone)

    def idle(self, idle_s: Mapping[int, float]) -> list[Act]:
        """How long the last ranks have done nothing: no processor time, no bytes."""
        acts: list[Act] = []
        for number in sorted(self.last_ranks & idle_s.keys()):
            assert self._work is not None
            rank = self._work.ranks[number]
            if idle_s[number] >= self.limits.idle_at_end_s and not rank.is_overdue:
                why = f"has done nothing for {idle_s[number]:.0f} s after others had exited with 0"
                acts += self._forgive(rank, why)
        return acts

    def script_returned(self, rank: int, now: float) -> list[Act]:
        """A rank's script has come to its good end; its process may still be at work."""
        if self._work is not None and rank in self._work.ranks:
            self._work.ranks[rank].returned_at = now
        return []

    def rank_gone(self, rank: int, ending: Exit) -> list[Act]:
        """A rank's process has ended, and not because it was ordered to."""
        work = self._work
        if work is None or rank not in work.ranks or self.state == "stopping":
            return []
        work.ranks[rank].is_gone = True
        if work.ranks[rank].is_overdue:
            ending = ending.forgiven()
        if self._goodbye is not None:
            return self._gone_while_leaving(ending)
        if not ending.is_good:
            return [] if work.ranks[rank].has_failed else self._failed(work, rank, ending)
        if work.are_gone and not work.has_failed:
            if work.stops:
                reason = f"every rank has stopped after step {max(work.stops.values())}"
                return [Tell(work.order.round, "stopped", reason)]
            return [Tell(work.order.round, "finished", "every rank exited with 0")]
        return []

    def rank_stops(self, rank: int, step: int, now: float) -> list[Act]:
        """The script of a rank has seen that it should stop, after this step."""
        work = self._work
        if work is None or rank not in work.ranks:
            return []
        work.stops[rank] = step
        if work.noticed_at is None or work.is_acknowledged or len(work.stops) < len(work.ranks):
            return []
        work.is_acknowledged = True
        return [Acknowledged(max(work.stops.values()), now - work.noticed_at)]

    def script_failed(self, rank: int, ending: Exit) -> list[Act]:
        """An exception has ended a rank's script: its process will go, but may take its time."""
        work = self._work
        if work is None or rank not in work.ranks or self._goodbye or self.state == "stopping":
            return []
        work.ranks[rank].has_failed = True
        return self._failed(work, rank, ending)

    @property
    def live_ranks(self) -> tuple[int, ...]:
        """The ranks that are expected to make progress."""
        work = self._work
        if work is None or self._goodbye or self.state not in {"starting", "running"}:
            return ()
        return tuple(rank.number for rank in work.ranks.values() if not rank.is_gone)

    def rank_stalled(self, rank: int, reason: str, waited_s: float, fact: str) -> list[Act]:
        """A rank has made no progress past its limit."""
        if self._work is None or rank not in self.live_ranks:
            return []
        round = self._work.order.round
        return [Tell(round, "rank_stalled", reason, rank, waited_s=waited_s, fact=fact)]

    def rank_moves(self, rank: int, reason: str, fact: str) -> list[Act]:
        """A rank that had stalled has made progress."""
        if self._work is None or rank not in self.live_ranks:
            return []
        return [Tell(self._work.order.round, "rank_recovered", reason, rank, fact=fact)]

    def start_failed(self, round: int, reason: str) -> list[Act]:
        """The ranks of a round could not be started."""
        if self._work is None or self._work.order.round != round:
            return []
        self._work.has_failed = True
        return [Tell(round, "start_failed", reason)]

    def stopped(self, round: int) -> list[Act]:
        """No process of the round is left."""
        if self._work is None or self._work.order.round != round:
            return []
        self.last_round, self.last_slot = round, self._work.order.slot
        self._work = None
        if self._goodbye is not None:
            return self._gone()
        self.state = "joining"
        return [Join()]

    # -- people, schedulers, time ----------------------------------------------------------------

    def preempted(self, number: int, name: str, now: float) -> list[Act]:
        """A signal says that this node is about to be taken away."""
        if self._goodbye is not None:
            return [PassOn(number)]
        work, grace_s = self._work, self.limits.preempt_grace_s
        reason = f"{name} announced that this node goes"
        noticed = Noticed(name, grace_s)
        self._goodbye = _Goodbye(128 + number, "preempted", reason)
        if work is None or work.are_gone or self.state == "stopping":
            return [noticed, *(self._gone() if work is None else self._end(0.0))]
        if self.state == "starting":  # there is nothing to save yet, and perhaps nobody to hear
            return [noticed, *self._end(self.limits.stop_grace_s)]
        self._goodbye.kill_at = now + grace_s
        self._goodbye.alone_at = now + self.limits.agree_within_s
        work.noticed_at = now if work.noticed_at is None else work.noticed_at
        told = Tell(work.order.round, "preempted", reason, grace_s=grace_s)
        said = Say(f"{reason}: its ranks have {grace_s:g} s")
        return [PassOn(number), noticed, told, said]

    def interrupted(self, number: int, name: str, now: float) -> list[Act]:
        """A person wants us gone; the second time at once."""
        code = 128 + number
        if self._goodbye is not None and self._goodbye.cause == "operator":
            return self._end(0.0)
        self._goodbye = _Goodbye(code, "operator", f"{name} from a person or its terminal")
        if self._work is None:
            return self._gone()
        self._goodbye.kill_at = now + self.limits.stop_grace_s
        return [Forward(number), Say(f"{name}: stopping; once more kills at once")]

    def give_up(self, code: int, reason: str) -> list[Act]:
        """We cannot go on: the keeper is lost for good, or nobody answers."""
        self._goodbye = _Goodbye(code, "failed", reason)
        return self._gone() if self._work is None else self._end(0.0)

    def tick(self, now: float) -> list[Act]:
        """Whatever is due."""
        acts: list[Act] = []
        work = self._work
        if work is not None:
            acts += self._overdue(work, now)
        if self._goodbye is not None and self._goodbye.kill_at is not None:
            acts += self._running_out(self._goodbye, now)
        elif self._ask_at is not None and self._ask_at <= now:
            self._ask_at = now + self.limits.ask_again_s
            if work is None:
                acts.append(Join())
        return acts

    # -- inside --------------------------------------------------------------------------------

    @property
    def _is_ending(self) -> bool:
        return self.state not in {"starting", "running"}

    def _taken(self, order: SaveCheckpoint, now: float) -> list[Act]:
        """Other nodes of the job are taken away, and we go with them."""
        code, reason = 128 + SIGTERM, f"all nodes go: {order.reason}"
        self._goodbye = _Goodbye(code, "preempted", reason)
        if self.state == "starting":
            return self._end(self.limits.stop_grace_s)
        grace_s = self.limits.preempt_grace_s if order.within_s is None else order.within_s
        self._goodbye.kill_at = now + grace_s
        return [PassOn(SIGTERM), Say(f"{reason}: its ranks have {grace_s:g} s")]

    def _running_out(self, goodbye: _Goodbye, now: float) -> list[Act]:
        """What is due while ranks save."""
        work = self._work
        if goodbye.kill_at is not None and goodbye.kill_at <= now:
            goodbye.kill_at = goodbye.alone_at = None
            missed = [Missed("ranks still ran")] if goodbye.cause == "preempted" and work else []
            return [*missed, *self._end(0.0)]
        if goodbye.alone_at is not None and goodbye.alone_at <= now:
            goodbye.alone_at = None
            if work is not None and not work.is_asked:
                work.is_asked = True
                return [AskToStop(None)]
        return []

    def _failed(self, work: _Work, rank: int, ending: Exit) -> list[Act]:
        is_first, work.has_failed = not work.has_failed, True
        # Of those that fall with the first only what may be the cause is told.
        if not is_first and ending.is_secondary:
            return []
        reason = f"rank {rank} {ending.text}"
        return [Tell(work.order.round, "rank_exited", reason, rank, ending)]

    def _hear(self, round: int | None) -> None:
        if round is not None and (self.round is None or round > self.round):
            self.round = round

    def _wait(self, reply: Joined) -> list[Act]:
        """We have no ranks to run now."""
        was, self.state = self.state, "standby" if reply.standing == "spare" else "joining"
        is_news = self.state == "standby" != was
        return [Say("standing by as a spare")] if is_news else []

    def _say_refused(self, reply: Joined) -> list[Act]:
        if reply.is_accepted:
            return []
        text = f"rendezvous does not let us in: {reply.reason}"
        return self._say_once(text, key=f"{reply.standing} {reply.cause}", is_warning=True)

    def _say_once(self, text: str, *, key: str = "", is_warning: bool = False) -> list[Act]:
        key = key or text
        if key in self._said:
            return []
        self._said.add(key)
        return [Say(text, is_warning=is_warning)]

    def _start(self, order: StartRanks) -> list[Act]:
        work = self._work
        if work is not None:
            if work.order.round == order.round:
                return []  # the same order again
            return self._outlived(order.round)
        self._ask_at = None
        self.state = "starting"
        numbers = range(order.first_rank, order.first_rank + order.ranks)
        self._work = _Work(order, {number: _Rank(number) for number in numbers})
        return [*([Say(order.reason)] if order.restarts else []), Start(order)]

    def _stop(self, order: StopRanks) -> list[Act]:
        work = self._work
        if work is None:
            return []  # a spare has nothing to stop
        if self.state == "stopping":
            return []
        self.state = "stopping"
        said = Say(f"round {work.order.round} is over: {order.reason}")
        return [said, Stop(work.order.round, order.grace_s, order.evidence_s, order.incident)]

    def _outlived(self, newest: int | None) -> list[Act]:
        """Our ranks belong to a round that is over: we were cut off, or paused."""
        work = self._work
        if work is None or self.state == "stopping":
            return []
        self.state = "stopping"
        told = f"round {work.order.round} is over, the job is at round {newest}: stopping its ranks"
        return [Say(told), Stop(work.order.round, 0.0, 0.0, None)]

    def _leave_job(self, order: LeaveJob) -> list[Act]:
        if self._goodbye is not None and self._goodbye.kill_at is None:
            return []
        is_ours = order.state == "excluded"
        reason = order.reason if is_ours else f"the job is {order.state}: {order.reason}"
        self._goodbye = _Goodbye(order.exit_code, order.state, reason, is_sent=True)
        return self._gone() if self._work is None else self._end(order.grace_s)

    def _leave(self, code: int, cause: str, reason: str, *, is_sent: bool) -> list[Act]:
        self._goodbye = _Goodbye(code, cause, reason, is_sent)
        return self._gone() if self._work is None else self._end(self.limits.stop_grace_s)

    def _end(self, grace_s: float) -> list[Act]:
        """Stop what runs; we exit when it is gone."""
        work = self._work
        if work is None or self.state == "stopping":
            return []
        self.state = "stopping"
        return [Stop(work.order.round, grace_s, 0.0, None)]

    def _gone_while_leaving(self, ending: Exit) -> list[Act]:
        work, goodbye = self._work, self._goodbye
        assert work is not None
        assert goodbye is not None
        work.has_failed = work.has_failed or not ending.is_good
        if not work.are_gone:
            return []
        if goodbye.cause != "preempted":
            return self._end(0.0)
        if work.has_failed:
            return [Missed(f"a rank {ending.text}"), *self._end(0.0)]
        goodbye.code = 91  # they took the time that they had, and ended well
        saved: list[Act] = []
        if work.stops and work.order.slot == 0 and goodbye.kill_at is not None:
            saved = [Saved(max(work.stops.values()), goodbye.kill_at)]
        return [*saved, *self._end(0.0)]

    def _gone(self) -> list[Act]:
        goodbye = self._goodbye
        assert goodbye is not None
        self.state = "leaving"
        return [Exiting(goodbye.code, goodbye.cause, goodbye.reason, goodbye.is_sent)]

    def _overdue(self, work: _Work, now: float) -> list[Act]:
        acts: list[Act] = []
        for rank in work.ranks.values():
            if rank.returned_at is None or rank.is_gone or rank.is_overdue:
                continue
            if rank.returned_at + self.limits.exit_within_s <= now:
                limit_s = self.limits.exit_within_s
                acts += self._forgive(
                    rank, f"has not exited {limit_s:g} s after its script had returned"
                )
        return acts

    def _forgive(self, rank: _Rank, why: str) -> list[Act]:
        """Its work is done: only its end hangs."""
        rank.is_overdue = True
        text = f"rank {rank.number} {why}: killed, and counted as done"
        return [Say(text, is_warning=True), Forward(SIGKILL, (rank.number,))]
