"""What an agent does about orders, exits, signals and silence.

joining ─▶ standby ─▶ starting ─▶ running ─▶ stopping ─▶ joining
   └──────────────────────┴──────────┴──▶ leaving (from anywhere)

Pure: each method takes what happened and `now`, and says what is to be done, in order. An agent
decides nothing about the round: it reports, and obeys orders that are not older than what it knows.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from signal import SIGKILL

from everstep.messages import Joined, LeaveJob, Order, Reported, StandBy, StartRanks, StopRanks
from everstep_services.agent.acts import (
    Act,
    Exiting,
    Forward,
    Join,
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


@dataclass(slots=True)
class _Work:
    """The ranks of one round."""

    order: StartRanks
    ranks: dict[int, _Rank]
    start_at: float | None
    has_failed: bool = False
    has_stepped: bool = False

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
    def running_round(self) -> int | None:
        """The round whose ranks have not all been seen to be gone."""
        return self._work.order.round if self._work else None

    @property
    def wake_at(self) -> float | None:
        """When `tick` wants to be called next."""
        times = [self._ask_at]
        if self._work is not None:
            times.append(self._work.start_at)
            times += [
                rank.returned_at + self.limits.exit_within_s
                for rank in self._work.ranks.values()
                if rank.returned_at is not None and not rank.is_gone and not rank.is_overdue
            ]
        if self._goodbye is not None:
            times.append(self._goodbye.kill_at)
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
        acts = self._say_once(reply)
        if self._work is None:
            acts += self._wait(reply)
        wait_s = self.limits.ask_again_s if reply.retry_after_s is None else reply.retry_after_s
        self._ask_at = now + wait_s
        if reply.order is not None:
            acts += self.ordered(reply.order, now)
        elif self._work is not None and reply.round > self._work.order.round:
            acts += self._outlived(reply.round)
        return acts

    def reported(self, tell: Tell, reply: Reported) -> list[Act]:
        """Rendezvous has answered a report."""
        self._hear(reply.round)
        if self._work is None or self._goodbye is not None or reply.is_current:
            return []
        if self._work.order.round == tell.round and reply.round > tell.round:
            return self._outlived(reply.round)
        return []

    def ordered(self, order: Order, now: float) -> list[Act]:
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
                    acts = self._start(order, now)
                case StopRanks():
                    acts = self._stop(order)
                case StandBy() if self._work is None and self.state != "standby":
                    self.state = "standby"
                    acts = [Say("standing by as a spare")]
        return acts

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
            return [Tell(work.order.round, "finished", "every rank exited with 0")]
        return []

    def script_failed(self, rank: int, ending: Exit) -> list[Act]:
        """An exception has ended a rank's script: its process will go, but may take its time."""
        work = self._work
        if work is None or rank not in work.ranks or self._goodbye or self.state == "stopping":
            return []
        work.ranks[rank].has_failed = True
        return self._failed(work, rank, ending)

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
            return [Forward(number)]
        work, grace_s = self._work, self.limits.preempt_grace_s
        reason = f"{name} announced that this node goes"
        self._goodbye = _Goodbye(128 + number, "preempted", reason)
        if work is None or work.are_gone or self.state == "stopping":
            return self._gone() if self._work is None or work is None else self._end(0.0)
        if self.state == "starting":  # there is nothing to save yet, and perhaps nobody to hear
            return self._end(self.limits.stop_grace_s)
        self._goodbye.kill_at = now + grace_s
        told = Tell(work.order.round, "preempted", reason, grace_s=grace_s)
        return [Forward(number), told, Say(f"{reason}: its ranks have {grace_s:g} s")]

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
        if work is not None and work.start_at is not None and work.start_at <= now:
            work.start_at = None
            acts.append(Start(work.order))
        if work is not None:
            acts += self._overdue(work, now)
        if self._goodbye is not None and self._goodbye.kill_at is not None:
            if self._goodbye.kill_at <= now:
                self._goodbye.kill_at = None
                acts += self._end(0.0)
        elif self._ask_at is not None and self._ask_at <= now:
            self._ask_at = now + self.limits.ask_again_s
            if work is None:
                acts.append(Join())
        return acts

    # -- inside --------------------------------------------------------------------------------

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
        """Say what is waited for, when it is waited for long enough to ask again, and changes."""
        was, self.state = self.state, "standby" if reply.standing == "spare" else "joining"
        if self.state == "standby":
            is_news = was != "standby"
            return [Say("standing by as a spare")] if is_news else []
        is_first, said = self._ask_at is None, f"waiting {reply.reason}"
        if is_first or not reply.is_accepted or said in self._said:
            return []
        self._said.add(said)
        return [Say(f"waiting for the round to form: {reply.reason}")]

    def _say_once(self, reply: Joined) -> list[Act]:
        key = f"{reply.standing} {reply.cause}"
        if reply.is_accepted or key in self._said:
            return []
        self._said.add(key)
        return [Say(f"rendezvous does not let us in: {reply.reason}", is_warning=True)]

    def _start(self, order: StartRanks, now: float) -> list[Act]:
        work = self._work
        if work is not None:
            if work.order.round == order.round:
                return []  # the same order again
            return self._outlived(order.round)
        self._ask_at = None
        self.state = "starting"
        numbers = range(order.first_rank, order.first_rank + order.ranks)
        ranks = {number: _Rank(number) for number in numbers}
        self._work = _Work(order, ranks, now + order.delay_s if order.delay_s else None)
        acts: list[Act] = []
        if order.restarts:
            later = f" in {order.delay_s:g} s" if order.delay_s else ""
            acts.append(Say(f"{order.reason}{later}"))
        return acts if order.delay_s else [*acts, Start(order)]

    def _stop(self, order: StopRanks) -> list[Act]:
        work = self._work
        if work is None:
            return []  # a spare has nothing to stop
        if self.state == "stopping":
            return []
        self.state = "stopping"
        said = Say(f"round {work.order.round} is over: {order.reason}")
        if work.start_at is not None:  # it still waited for its turn
            return [said, *self.stopped(work.order.round)]
        return [said, Stop(work.order.round, order.grace_s, order.evidence_s, order.incident)]

    def _outlived(self, newest: int | None) -> list[Act]:
        """Our ranks belong to a round that is over: we were cut off, or paused."""
        work = self._work
        if work is None or self.state == "stopping":
            return []
        self.state = "stopping"
        told = f"round {work.order.round} is over, the job is at round {newest}: stopping its ranks"
        if work.start_at is not None:
            return [Say(told), *self.stopped(work.order.round)]
        return [Say(told), Stop(work.order.round, 0.0, 0.0, None)]

    def _leave_job(self, order: LeaveJob) -> list[Act]:
        if self._goodbye is not None and self._goodbye.kill_at is None:
            return []
        reason = f"the job is {order.state}: {order.reason}"
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
        if work.start_at is not None:
            return self.stopped(work.order.round)
        return [Stop(work.order.round, grace_s, 0.0, None)]

    def _gone_while_leaving(self, ending: Exit) -> list[Act]:
        work, goodbye = self._work, self._goodbye
        assert work is not None
        assert goodbye is not None
        work.has_failed = work.has_failed or not ending.is_good
        if not work.are_gone:
            return []
        if goodbye.cause == "preempted" and not work.has_failed:
            goodbye.code = 91  # they took the time that they had, and ended well
        return self._end(0.0)

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
