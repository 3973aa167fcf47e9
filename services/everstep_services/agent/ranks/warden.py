"""The warden: parent of a node's ranks; it makes sure that none of their processes is left.

It has no event loop, no bus and no settings. Whatever happens to the agent, this small process
sees the end of its control socket and kills everything that it has started. Whatever happens to
this process, the kernel kills the ranks.
"""

import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from everstep_services.agent.ranks import process_tree, spawn, warden_signals
from everstep_services.agent.ranks.liveness_port import answer_all
from everstep_services.agent.ranks.process_tree import become_subreaper
from everstep_services.agent.ranks.survivors import Survivors, listening
from everstep_services.agent.ranks.warden_forge import Forge, ForgeState
from everstep_services.agent.ranks.warden_signals import SignalQueue
from everstep_services.agent.ranks.warden_stop import RoundStop, kill_everything
from trainer_sdk import layout
from trainer_sdk.bootstrap.deferred_signals import HELD
from trainer_sdk.wire import (
    Channel,
    ForgeDown,
    ForgeUp,
    Forked,
    FromAgent,
    FromWarden,
    Gone,
    GoOn,
    Park,
    RankEntry,
    Signal,
    Signalled,
    Spawned,
    StartFailed,
    Undefer,
    Unfit,
    WardenPlan,
    WardenStart,
    WardenStop,
    unpack,
)

_DEAF_TO = (*HELD, signal.SIGQUIT)


class _AgentGoneError(Exception):
    """The other end of the control socket is closed."""


@dataclass(frozen=True, slots=True)
class _Rank:
    round: int
    rank: int
    began: float
    page: str
    entry: RankEntry


@dataclass(eq=False, repr=False)
class Warden:
    """One agent's ranks, one round at a time."""

    _channel: Channel[FromAgent]
    _plan: WardenPlan
    _wakes: socket.socket
    _door: socket.socket | None = None
    _survivors: Survivors = field(default_factory=Survivors)

    def __post_init__(self) -> None:
        self._ranks: dict[int, _Rank] = {}
        self._unclaimed: dict[int, int] = {}
        self._pending: WardenStart | None = None
        self._asked_at = 0.0
        self._stopping: RoundStop | None = None
        self._signals = SignalQueue(self._send)
        self._ended_by: dict[int, int] = {}
        """Ranks that were killed in place of a signal that they had deferred."""
        self._leaves = False
        """Processes below this one may live on at the end."""
        self._forge = Forge(self._plan, self._tell)
        self._warm = self._plan.warm and self._plan.command.kind != "program"

    def serve(self) -> None:
        """Run until the agent closes its end of the control socket; then nothing is left."""
        if self._warm:
            self._forge.start()
        try:
            if self._channel.early:
                self._hear_agent()
                self._tick(time.monotonic())
            while True:
                self._turn()
        except _AgentGoneError:
            self._forge.kill()
            if not self._leaves:
                kill_everything(self._wakes)

    def _turn(self) -> None:
        ready = self._wait()
        # The forge first: it names its ranks before they can be reaped.
        if self._forge.channel is not None and self._forge.channel.fileno() in ready:
            self._hear_forge()
        if self._wakes.fileno() in ready:
            self._wakes.recv(4096)
            self._reap()
        if self._door is not None and self._door.fileno() in ready:
            answer_all(self._door, self._plan.token)
        self._survivors.hear(ready, self._may_be_rank)
        if self._channel.fileno() in ready:
            self._hear_agent()
        self._tick(time.monotonic())

    def _hear_agent(self) -> None:
        try:
            lines = list(self._channel.receive())
        except (EOFError, OSError) as error:
            raise _AgentGoneError from error
        for line in lines:
            self._obey(line)

    def _wait(self) -> set[int]:
        with selectors.DefaultSelector() as selector:
            own = (self._channel, self._wakes, self._forge.channel, self._door)
            for source in (*own, *self._survivors.sources):
                if source is not None:
                    selector.register(source, selectors.EVENT_READ)
            timeout = self._timeout(time.monotonic())
            return {key.fd for key, _ in selector.select(timeout)}

    def _timeout(self, now: float) -> float | None:
        moments: list[float] = []
        if self._forge.again_at is not None:
            moments.append(self._forge.again_at)
        if self._forge.state is ForgeState.FORKING:
            moments.append(self._forge.late_at)
        elif self._pending is not None:
            moments.append(self._asked_at + self._pending.forge_within_s)
        if self._stopping is not None:
            moments.append(self._stopping.next_at(now))
        waits = (self._signals.next_at, self._survivors.next_at)
        moments += [at for at in waits if at is not None]
        return max(min(moments) - now, 0.0) if moments else None

    def _tick(self, now: float) -> None:
        if self._forge.again_at is not None and now >= self._forge.again_at:
            self._forge.start()
        if self._forge.is_late(now):
            self._forge_gone()
        self._start_pending(now)
        for unhandled in self._signals.due(now):
            self._tell(Signalled(unhandled=unhandled))
        for pid in self._survivors.overdue(now):
            self._end_unparked(pid, now)
        if self._stopping is not None:
            living = {pid: rank.rank for pid, rank in self._ranks.items()}
            report = self._stopping.advance(now, living, self._ended_by)
            if report is not None:
                self._stopping = None
                self._tell(report)

    def _obey(self, line: FromAgent) -> None:
        match line:
            case WardenStart():
                self._leaves = False
                going = self._placed(line)
                missing = tuple(entry for entry in line.ranks if entry.rank not in going)
                if missing:  # first: all others wait for a new rank
                    start = msgspec.structs.replace(line, ranks=missing)
                    self._pending, self._asked_at = start, time.monotonic()
                    if self._can_be_warm(start):
                        self._start_pending(self._asked_at)
                    else:
                        self._start_cold()
                self._continue_parked(line, going)
            case Signal() | Undefer():
                self._signals.hear(line, time.monotonic())
            case WardenStop():
                self._stop(line)
            case WardenPlan():
                raise AssertionError("the plan comes once")

    def _can_be_warm(self, start: WardenStart) -> bool:
        if not (self._warm and start.warm):
            return False
        for entry in start.ranks:
            name = spawn.why_not_warm(entry, self._plan)
            if name:
                reason = f"rank {entry.rank} has another {name}, which Python reads as it starts"
                self._tell(ForgeDown(reason=reason, final=False))
                return False
        return True

    # Ranks that survive a round.

    def _may_be_rank(self, pid: int) -> bool:
        return pid in self._ranks or self._forge.state is ForgeState.FORKING

    def _placed(self, start: WardenStart) -> dict[int, int]:
        """The parked process for each rank that has one; the others are ended."""
        if not self._survivors.parked:
            return {}
        self._reap()
        placed: dict[int, int] = {}
        waiting = [pid for pid in self._survivors.parked if pid in self._ranks]
        for entry in start.ranks:
            fits = (it for it in waiting if spawn.can_go_on(self._ranks[it].entry, entry))
            if pid := next(fits, 0):
                waiting.remove(pid)
                placed[entry.rank] = pid
        for pid in set(self._survivors.parked).difference(placed.values()):
            self._put_away(pid)
        left = self._survivors.others({self._forge.pid, *self._ranks})
        for pid, parent in left.items():  # what ranks that have died meanwhile had started
            process_tree.kill(pid, parent)
        return placed

    def _continue_parked(self, start: WardenStart, going: Mapping[int, int]) -> None:
        """Let parked processes go on as these ranks."""
        for entry in start.ranks:
            if (pid := going.get(entry.rank)) is None:
                continue
            line = GoOn(
                round=start.round,
                rank=entry.rank,
                environ=entry.environ,
                stdout=entry.stdout,
                stderr=entry.stderr,
            )
            if self._survivors.go_on(pid, line):
                self._born(start.round, entry, pid, "kept")
            else:
                self._put_away(pid)
                reason = f"the process of rank {entry.rank} has ended while it was parked"
                self._tell(StartFailed(round=start.round, reason=reason))

    def _end_unparked(self, pid: int, now: float) -> None:
        """A rank has not parked, or has hung up while it was parked: it ends as others do."""
        if self._stopping is None:
            self._put_away(pid)
        elif pid in self._ranks:
            self._stopping.asked_later(pid, now)
            self._act(pid, self._ranks[pid], Signal(number=signal.SIGTERM), has_come=False)

    def _put_away(self, pid: int) -> None:
        """Kill a parked rank that has no place: the next round must not wait for its memory."""
        self._survivors.forget(pid)
        if self._ranks.pop(pid, None) is not None:
            process_tree.kill_tree(pid)

    # Starting.

    def _start_pending(self, now: float) -> None:
        start = self._pending
        if start is None or self._forge.state is ForgeState.FORKING:
            return
        if self._forge.state is ForgeState.READY and self._forge.fork(start):
            return
        coming = self._forge.state is ForgeState.STARTING
        if not coming or now >= self._asked_at + start.forge_within_s:
            self._start_cold()

    def _start_cold(self) -> None:
        start, self._pending = self._pending, None
        assert start is not None, "called only with a batch"
        try:
            for entry in start.ranks:
                self._born(start.round, entry, spawn.start_cold(entry, self._plan), "cold")
        except OSError as error:
            self._tell(StartFailed(round=start.round, reason=f"the node cannot fork: {error}"))

    def _born(
        self, number: int, entry: RankEntry, pid: int, start: Literal["warm", "cold", "kept"]
    ) -> None:
        page = unpack(entry.environ).get(layout.PAGE_VARIABLE, "")
        self._ranks[pid] = _Rank(number, entry.rank, time.monotonic(), page, entry)
        self._tell(Spawned(round=number, rank=entry.rank, pid=pid, start=start))
        if pid in self._unclaimed:
            self._exited(pid, self._unclaimed.pop(pid))

    def _hear_forge(self) -> None:
        assert self._forge.channel is not None, "it was ready to read"
        try:
            for line in self._forge.channel.receive():
                self._heard(line)
        except (EOFError, OSError):
            self._forge_gone()

    def _heard(self, line: ForgeUp | Forked | Unfit) -> None:
        match line:
            case ForgeUp():
                self._forge.ready(line)
            case Forked():
                start, self._pending = self._pending, None
                self._forge.forked()
                self._unclaimed = {p: s for p, s in self._unclaimed.items() if p in line.pids}
                if start is not None:
                    for entry, pid in zip(start.ranks, line.pids, strict=True):
                        self._born(start.round, entry, pid, "warm")
            case Unfit():
                self._forge.unfit(line)

    def _forge_gone(self) -> None:
        was_forking = self._forge.state is ForgeState.FORKING
        self._forge.gone()
        if was_forking:  # some ranks may exist, and nobody knows their numbers
            self._unclaimed.clear()
            self._kill_all_but(self._ranks.keys())

    def _kill_all_but(self, spared: Collection[int]) -> None:
        """Also processes that were born, or orphaned, during the search for the others."""
        seen: set[int] = {self._forge.pid}
        while new := {
            pid: parent
            for pid, parent in process_tree.descendants(os.getpid(), spared=spared).items()
            if pid not in seen
        }:
            seen.update(new)
            for pid, parent in new.items():
                process_tree.kill(pid, parent)

    # Signals, exits and the end.

    def _send(self, line: Signal, *, has_come: bool) -> tuple[int, ...]:
        """Signal ranks, `has_come` if they have it already; return those without a handler."""
        unhandled: list[int] = []
        for pid, rank in self._ranks.items():
            if line.ranks is not None and rank.rank not in line.ranks:
                continue
            if not self._act(pid, rank, line, has_come=has_come):
                unhandled.append(rank.rank)
        return tuple(sorted(unhandled))

    def _act(self, pid: int, rank: _Rank, line: Signal, *, has_come: bool) -> bool:
        """Make a signal act on a rank; False if it has no handler and would die for nothing.

        The rank is not reaped yet, so its number is still its own.
        """
        number = line.number
        only_announces = line.to_handlers or number in warden_signals.ANNOUNCE
        is_python = self._plan.command.kind != "program"
        if warden_signals.is_deferred(pid, number, rank.page, is_armed_first=is_python):
            if only_announces:
                return False
            # the default action, also for a rank that waits inside a library
            self._ended_by.setdefault(pid, number)
            writes = process_tree.catches(pid, layout.LAST_SIGNAL)
            os.kill(pid, layout.LAST_SIGNAL if writes and self._stopping else signal.SIGKILL)
        elif only_announces and not process_tree.catches(pid, number):
            return False
        elif not has_come:
            os.kill(pid, number)
        return True

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if not self._forge.reaped(pid):
                self._exited(pid, status)

    def _exited(self, pid: int, status: int) -> None:
        rank = self._ranks.pop(pid, None)
        self._survivors.forget(pid)
        if rank is None:
            if (
                self._forge.state is ForgeState.FORKING
            ):  # a process that the forge has not named yet
                self._unclaimed[pid] = status
            return
        killed = os.WIFSIGNALED(status)
        ended_by = self._ended_by.pop(pid, None) if killed else None
        self._tell(
            Gone(
                round=rank.round,
                rank=rank.rank,
                pid=pid,
                code=None if killed else os.WEXITSTATUS(status),
                signal=(ended_by or os.WTERMSIG(status)) if killed else None,
                core_dumped=killed and os.WCOREDUMP(status),
                lasted_s=time.monotonic() - rank.began,
                told=self._stopping is not None
                and (ended_by is not None or self._stopping.may_have_ended(rank.rank, status)),
            )
        )

    def _stop(self, order: WardenStop) -> None:
        if self._forge.state is not ForgeState.FORKING:
            self._pending = None
        self._reap()  # ranks that had ended by themselves were not ordered to
        self._survivors.settle(self._may_be_rank)
        ranks = {rank.rank for rank in self._ranks.values()}
        self._leaves = order.is_done and order.leaves and not ranks
        now = time.monotonic()
        self._stopping = RoundStop(order, ranks, self._forge, self._survivors, now)
        if order.save is not None:
            waiting = self._survivors.parked
            parked = sorted((it.rank, pid) for pid, it in self._ranks.items() if pid in waiting)
            for number, (_, pid) in enumerate(parked, order.save.rank):
                line = msgspec.structs.replace(order.save, rank=number)
                self._survivors.save(pid, line, now)
            return
        for pid, rank in self._ranks.items():
            folder = os.path.dirname(rank.page)
            park = Park(round=rank.round, is_planned=order.is_planned)
            if rank.rank in order.keeps and self._survivors.park(pid, park, folder, now):
                continue
            self._survivors.forget(pid)
            self._act(pid, rank, Signal(number=signal.SIGTERM), has_come=False)

    def _tell(self, line: FromWarden) -> None:
        try:
            self._channel.send(line)
        except OSError as error:
            raise _AgentGoneError from error


def main(descriptor: int, lock: int, *doors: int) -> None:
    """Be the warden of the agent at the other end of this socket, and hold the lock with it."""
    for inherited in (descriptor, lock, *doors):
        os.set_inheritable(inherited, False)  # noqa: FBT003 - positional only
    # A signal to a whole job is meant for its ranks, and the agent decides. Blocked, not ignored,
    # so that the warden can see that the signal came to all processes.
    signal.pthread_sigmask(signal.SIG_BLOCK, _DEAF_TO)
    become_subreaper()
    wakes, waker = socket.socketpair()
    waker.settimeout(0)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
    channel: Channel[FromAgent] = Channel(socket.socket(fileno=descriptor), FromAgent)
    plan = channel.receive_first()
    assert isinstance(plan, WardenPlan), "the agent's first line"
    door = next((socket.socket(fileno=door) for door in doors), None)
    Warden(channel, plan, wakes, door, listening(plan.folder)).serve()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
