"""Stops a round's processes: asks the ranks, waits for the grace, then kills the rest."""

import os
import select
import signal
import socket
import time
from collections.abc import Collection, Mapping

from everstep_services.agent.ranks import process_tree
from everstep_services.agent.ranks.survivors import Survivors
from everstep_services.agent.ranks.warden_forge import Forge, ForgeState
from trainer_sdk.wire import AllStopped, WardenStop

_LOOK_AGAIN_S = 0.02
_LEAVE_WITHIN_S = 0.3
_STACKS_WITHIN_S = 0.2
"""A rank needs a millisecond for its stacks; more only if it is stopped, or has no processor."""
_NAMED = 10
_EVERYTHING_WITHIN_S = 10.0


class RoundStop:
    """One order to stop, until nothing of the round is left but what is parked."""

    def __init__(
        self, order: WardenStop, ranks: set[int], forge: Forge, survivors: Survivors, now: float
    ) -> None:
        self._order = order
        self._ranks = ranks
        self._forge = forge
        self._survivors = survivors
        self._asked_at = now
        self._asked_later: dict[int, float] = {}
        """Processes that have not parked in time."""
        self._killed: set[int] = set()
        self._newborn: set[int] = set()
        self._were_parked: set[int] = set()
        self._swept: set[int] = set()
        self._sweeping_since: float | None = None
        self._outlived: dict[int, str] = {}

    def next_at(self, now: float) -> float:
        """When to look again, even if no process has ended by then."""
        if self._sweeping_since is None:
            asked = (self._asked_at, *self._asked_later.values())
            moments = (at + s for at in asked for s in (_STACKS_WITHIN_S, self._order.grace_s))
            return min((at for at in moments if at > now), default=now + _LOOK_AGAIN_S)
        return now + _LOOK_AGAIN_S

    def asked_later(self, pid: int, now: float) -> None:
        """A process was asked to park first, and is asked to end only now."""
        self._asked_later[pid] = now

    def advance(
        self, now: float, living: Mapping[int, int], ending: Collection[int] = ()
    ) -> AllStopped | None:
        """Continue; return the report when all is done. `living` maps process ids to ranks.

        The ranks `ending` have got the signal by which they write their stacks and end.
        """
        if self._forge.state is ForgeState.FORKING:
            return None  # ranks that it is making are stopped once they have a number
        kept = {pid: living[pid] for pid in self._survivors.parked if pid in living}
        self._were_parked.update(kept.values())
        living = {pid: rank for pid, rank in living.items() if pid not in kept}
        self._kill_newborn(living)
        self._kill_late(now, living.keys() & ending)
        overdue = {pid: rank for pid, rank in living.items() if self._is_overdue(pid, now)}
        self._kill_ranks(overdue)
        if len(overdue) < len(living):
            return None
        if self._sweeping_since is None:
            self._sweeping_since = now
        left = self._survivors.others({self._forge.pid, *kept})
        if self._order.is_done and left:
            if now < self._sweeping_since + _LEAVE_WITHIN_S:
                return None
            self._outlived = self._outlived or {pid: process_tree.command(pid) for pid in left}
            if self._order.leaves:
                left = {}
        if left and now < self._sweeping_since + self._order.kill_within_s:
            killed = (pid for pid, parent in left.items() if process_tree.kill(pid, parent))
            self._swept.update(pid for pid in killed if pid not in living)
            return None
        return AllStopped(
            ranks=tuple(sorted(self._ranks.difference(kept.values()))),
            killed=tuple(sorted(self._killed)),
            swept=len(self._swept),
            left=tuple(sorted(left)),
            stop_s=now - self._asked_at,
            outlived=tuple(f"{pid} {command}" for pid, command in self._outlived.items())[:_NAMED],
            kept=tuple(sorted(kept.values())),
        )

    def may_have_ended(self, rank: int, status: int) -> bool:
        """Whether this order may have ended a rank so: with SIGKILL only if that was sent.

        A rank that was parked has nothing to do with the end of its round any more.
        """
        is_killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        return not is_killed or rank in self._killed | self._newborn | self._were_parked

    def _is_overdue(self, pid: int, now: float) -> bool:
        asked_at = self._asked_later.get(pid, self._asked_at)
        return pid not in self._survivors.parking and now >= asked_at + self._order.grace_s

    def _kill_newborn(self, living: Mapping[int, int]) -> None:
        for pid, rank in living.items():
            if rank not in self._ranks:  # born after the order: it has nothing to save
                self._ranks.add(rank)
                self._newborn.add(rank)
                os.kill(pid, signal.SIGKILL)

    def _kill_late(self, now: float, ending: Collection[int]) -> None:
        for pid in ending:
            if now >= self._asked_later.get(pid, self._asked_at) + _STACKS_WITHIN_S:
                os.kill(pid, signal.SIGKILL)

    def _kill_ranks(self, living: Mapping[int, int]) -> None:
        for pid, rank in living.items():
            if rank not in self._killed:
                self._killed.add(rank)
                _kill_group(pid)


def _kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)  # a rank leads its own group; it is not reaped yet
    except ProcessLookupError:
        return


def kill_everything(wakes: socket.socket) -> None:
    """Kill everything below this process, the forge too, and wait until it is gone."""
    deadline = time.monotonic() + _EVERYTHING_WITHIN_S
    while time.monotonic() < deadline:
        _reap()
        left = process_tree.descendants(os.getpid())
        if not left:
            return
        for pid, parent in left.items():
            process_tree.kill(pid, parent)
        if select.select([wakes], [], [], _LOOK_AGAIN_S)[0]:
            wakes.recv(4096)


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            continue
    except ChildProcessError:
        return
