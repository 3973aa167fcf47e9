"""The warden's side of the forge: keeps one ready, and hands it one batch of ranks at a time."""

import os
import signal
import socket
import time
from collections.abc import Callable
from enum import Enum

import msgspec

from everstep_services.agent.ranks import spawn
from trainer_sdk.wire import (
    Channel,
    ForgeDown,
    ForgePlan,
    ForgeUp,
    Fork,
    Forked,
    FromForge,
    FromWarden,
    Unfit,
    WardenPlan,
    WardenStart,
)

_MOST_STARTS = 4  # failures in a row
_BACKOFF_S = 0.5
_SEND_WITHIN_S = 5.0
_FORK_WITHIN_S = 30.0


class ForgeState(Enum):
    """What the forge can be asked for."""

    OFF = "off"
    STARTING = "starting"
    READY = "ready"
    FORKING = "forking"


class Forge:
    """One forge after another. Its death harms no rank; the next ranks start cold."""

    def __init__(self, plan: WardenPlan, tell: Callable[[FromWarden], None]) -> None:
        self.state = ForgeState.OFF
        self.pid = 0
        self.channel: Channel[ForgeUp | Forked | Unfit] | None = None
        self.again_at: float | None = None
        self.late_at = 0.0
        self._plan = plan
        self._tell = tell
        self._without: tuple[str, ...] = ()
        self._besides: tuple[str, ...] = ()
        self._left_out: tuple[str, ...] = ()
        self._failures = 0

    def start(self) -> None:
        """Start a forge; it reports when it is ready."""
        ours, theirs = socket.socketpair()
        ours.settimeout(_SEND_WITHIN_S)  # a stopped forge must not stop the warden
        with theirs:
            self.pid = spawn.start_forge(self._plan, theirs)
        self.channel = Channel(ours, FromForge)
        self.state = ForgeState.STARTING
        self.again_at = None
        plan = ForgePlan(
            warden=os.getpid(),
            command=self._plan.command,
            cwd=self._plan.cwd,
            preload=self._plan.preload,
            without=self._without,
            besides=self._besides,
            own=self._plan.own,
        )
        try:
            self.channel.send(plan)
        except OSError:
            self.gone()

    def fork(self, request: WardenStart) -> bool:
        """Ask the forge for the ranks; if it does not listen, return False and give it up."""
        assert self.channel is not None, "asked only when ready"
        try:
            self.channel.send(Fork(round=request.round, ranks=request.ranks))
        except OSError:
            self.gone()
            return False
        self.state = ForgeState.FORKING
        self.late_at = time.monotonic() + min(_FORK_WITHIN_S, request.forge_within_s)
        return True

    def ready(self, up: ForgeUp) -> None:
        """The forge has imported everything."""
        self.state = ForgeState.READY
        self._failures = 0
        self._tell(msgspec.structs.replace(up, left_out=self._left_out))

    def forked(self) -> None:
        """The forge has forked the ranks, and can be asked again."""
        self.state = ForgeState.READY

    def unfit(self, line: Unfit) -> None:
        """The forge must not fork. A module that can be left out is; otherwise ranks start cold."""
        without = line.without or (line.module,)
        optional = not {"", "torch"} & set(without)
        hopeless = self.state is ForgeState.STARTING and not optional
        self.kill()
        if optional:
            self._without += without
            self._besides = tuple(dict.fromkeys((*self._besides, *line.besides)))
            self._left_out += (line.reason,)
        self._fail(line.reason, final=hopeless, after_s=0.0 if optional else _BACKOFF_S)

    def gone(self) -> None:
        """The forge's end of the channel is closed, or it does not answer."""
        if self.channel is None:
            return
        self.kill()
        self._fail("the forge has ended", final=False, after_s=_BACKOFF_S)

    def is_late(self, now: float) -> bool:
        """Whether the forge should have forked by now."""
        return self.state is ForgeState.FORKING and now >= self.late_at

    def kill(self) -> None:
        """End the forge, without a word to those that wait for it."""
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)  # not yet reaped, so the number is still its own
        self._drop()

    def reaped(self, pid: int) -> bool:
        """Whether this was the forge; its number may be another's from now on."""
        if pid != self.pid:
            return False
        self.pid = 0
        return True

    def _drop(self) -> None:
        if self.channel is not None:
            self.channel.close()
        self.channel = None
        self.state = ForgeState.OFF

    def _fail(self, reason: str, *, final: bool, after_s: float) -> None:
        self._failures += 1
        final = final or self._failures >= _MOST_STARTS
        if not final:
            backoff = after_s * 2 ** (self._failures - 1)
            self.again_at = time.monotonic() + backoff
        self._tell(ForgeDown(reason=reason, final=final))
