"""The clock: whether it is kept right, and whether it has jumped."""

import ctypes
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from everstep.messages.facts.health import CheckResult
from everstep_services.agent.probes.base import Look
from everstep_services.agent.probes.host.common import boot_id, result

_ERROR = 5
_UNSYNCHRONISED = 0x40
_NOTES = "clock"


@dataclass(frozen=True, slots=True)
class KernelClock:
    """The state of the kernel's clock."""

    is_kept: bool
    """Something (chrony, ntpd, the hypervisor) keeps it right."""
    most_off_s: float
    """The most by which it can be wrong."""


class _Timex(ctypes.Structure):
    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_byte * 256),
    )


def kernel_clock() -> KernelClock:
    """Ask the kernel, without a change. Raises OSError where a container forbids it."""
    libc = ctypes.CDLL(None, use_errno=True)
    about = _Timex()
    state = libc.adjtimex(ctypes.byref(about))
    if state < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    is_kept = state != _ERROR and not about.status & _UNSYNCHRONISED
    return KernelClock(is_kept, about.maxerror / 1e6)


def kept(look: Look, ask: Callable[[], KernelClock] = kernel_clock) -> Iterator[CheckResult]:
    """Whether the clock is right."""
    clock, limit_s = ask(), look.settings.clock_off_s
    if not clock.is_kept:
        reason = "no program synchronizes the clock; start chronyd, ntpd or systemd-timesyncd"
        yield result("clock", "warning", reason, "report")
    elif clock.most_off_s > limit_s:
        reason = f"the clock may be {clock.most_off_s:.3g} s off (limit {limit_s:g} s)"
        yield result("clock", "warning", f"{reason}; see chronyc tracking", "report")
    else:
        yield result("clock")


def jumps(look: Look) -> Iterator[CheckResult]:
    """Whether the wall clock has moved against the time since boot, from look to look."""
    wall = time.clock_gettime(time.CLOCK_REALTIME)
    yield judge_jump(look, wall - time.clock_gettime(time.CLOCK_BOOTTIME))


def judge_jump(look: Look, booted_at: float) -> CheckResult:
    """The jump since the last look, from the wall clock at boot, which changes only in a jump."""
    boot, noted = boot_id(look), look.memory.get(_NOTES)
    look.memory[_NOTES] = {"boot": boot, "booted_at": booted_at}
    limit_s = look.settings.clock_off_s
    if isinstance(noted, dict) and noted.get("boot") == boot:
        by_s = booted_at - float(noted["booted_at"])
        if abs(by_s) > limit_s:
            reason = f"the clock was set by {by_s:+.1f} s since the last look (limit {limit_s:g} s)"
            fix = "times of this node in the record are wrong"
            return result("clock jumps", "warning", f"{reason}; {fix}", "report")
    return result("clock jumps")
