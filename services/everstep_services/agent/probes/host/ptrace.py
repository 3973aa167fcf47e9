"""Check `ptrace`: whether stacks of ranks will be readable when they hang."""

import ctypes
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from everstep.messages.facts.health import CheckResult
from everstep_services.agent.probes.base import CheckState, Look

NAME = "ptrace"
_CAP_SYS_PTRACE = 19
_SCOPES = {
    1: "kernel.yama.ptrace_scope is 1: only parents may look into a process",
    2: "kernel.yama.ptrace_scope is 2: only administrators may look into a process",
    3: "kernel.yama.ptrace_scope is 3: nobody may, until the next boot",
}
_FIX = "sudo sysctl kernel.yama.ptrace_scope=0, or give the agent CAP_SYS_PTRACE"
_CONTAINER_FIX = "start the container with --cap-add SYS_PTRACE"


def open_memory(path: Path) -> None:
    """Open a process's memory, as a reader of stacks does; needs a debugger's permission."""
    os.close(os.open(path, os.O_RDONLY))


def read_own_memory() -> None:
    """Make the call that reads stacks on this process: only a container's filter forbids it."""

    class Part(ctypes.Structure):
        _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))

    source, target = ctypes.create_string_buffer(b"x"), ctypes.create_string_buffer(1)
    libc = ctypes.CDLL(None, use_errno=True)
    here, there = Part(ctypes.addressof(target), 1), Part(ctypes.addressof(source), 1)
    if libc.process_vm_readv(os.getpid(), ctypes.byref(here), 1, ctypes.byref(there), 1, 0) != 1:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


@dataclass(slots=True)
class PtraceProbe:
    """Tries it on a rank, or on the process that asks: neither is our child. Never fails."""

    open_memory: Callable[[Path], None] = open_memory
    read_own_memory: Callable[[], None] = read_own_memory
    name: str = NAME
    about: str = "stacks of ranks can be read when they hang"
    beside_training: bool = True

    def examine(self, look: Look) -> list[CheckResult]:
        """One result for this node."""
        try:
            self.read_own_memory()
        except OSError as error:
            reason = f"process_vm_readv: {error.strerror}; {_CONTAINER_FIX}"
            return [_result("warning", reason)]
        refused = 0
        for pid in look.own_pids or {os.getppid()}:
            try:
                self.open_memory(look.path("proc", str(pid), "mem"))
            except PermissionError:
                refused += 1
            except OSError:  # it has ended meanwhile
                continue
        return [_result("warning", _why(look)) if refused else _result("ok")]


def _why(look: Look) -> str:
    scope = _number(look.path("proc/sys/kernel/yama/ptrace_scope"), "", 10)
    capabilities = _number(look.path("proc/self/status"), "CapEff:", 16)
    if scope in _SCOPES:
        return f"{_SCOPES[scope]}; {_FIX}" if scope < 3 else f"{_SCOPES[scope]}; reboot"
    if capabilities is not None and not capabilities >> _CAP_SYS_PTRACE & 1:
        fix = "run the agent as the user whose ranks they are"
        return f"other users' processes may not be looked into; {fix}, or {_CONTAINER_FIX}"
    return f"the kernel refuses it; {_CONTAINER_FIX}, or ask who has hardened this host"


def _number(path: Path, name: str, base: int) -> int | None:
    """The number in the line with this beginning; None if there is none."""
    try:
        lines = path.read_text().splitlines()
        return next(int(line.removeprefix(name), base) for line in lines if line.startswith(name))
    except (OSError, ValueError, StopIteration):
        return None


def _result(state: CheckState, reason: str = "") -> CheckResult:
    return CheckResult(check=NAME, state=state, reason=reason)
