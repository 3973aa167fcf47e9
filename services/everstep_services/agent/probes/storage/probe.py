"""Check `storage`: whether shared file systems answer, and hold what is written to them."""

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from everstep.messages.facts.health import CheckResult
from everstep_services.agent.probes.base import Look, finding
from everstep_services.agent.probes.program import Program, ProgramResult
from everstep_services.agent.probes.storage.mounts import Mount, network_mounts

NAME = "storage"
_result = partial(finding, NAME)
_TOUCH = (sys.executable, "-I", "-S", str(Path(__file__).with_name("touch.py")))
_FIXES = {
    "ENOSPC": "delete something there",
    "EDQUOT": "delete something there, or ask for a larger quota",
    "ESTALE": "its handle is stale: mount it again",
    "EROFS": "it is read-only: mount it again",
    "ENOENT": "is it mounted?",
    "ENOTDIR": "name a folder in storage_paths",
    "EIO": "see the kernel's log, then the file system's servers",
}
_NOT_OURS = frozenset({"EACCES", "EPERM"})


@dataclass(slots=True)
class StorageProbe:
    """One result for each folder. A folder that does not answer in time has failed."""

    touch: Sequence[str] = _TOUCH
    """The program that touches a folder; it may hang."""
    name: str = NAME
    about: str = "shared file systems answer, and keep what is written"
    beside_training: bool = True

    def examine(self, look: Look) -> Iterator[CheckResult]:
        """The state of Lustre, and the result of touching each folder."""
        results = list(_lustre(look))
        yield from results
        mounts = {str(mount.path): mount for mount in network_mounts(look)}
        chosen = [str(path) for path in look.settings.storage_paths]
        if not chosen and not mounts and not results:
            why = "no network file system is mounted; name others in storage_paths"
            yield _result("", "unsupported", why)
            return
        until = time.monotonic() + look.settings.storage_within_s
        # only configured folders are written to: a mount's root is not ours
        wanted = dict.fromkeys(chosen, "write") or dict.fromkeys(mounts, "look")
        running = {path: Program.start([*self.touch, path, how]) for path, how in wanted.items()}
        for path, program in running.items():
            ran = program.wait(until)
            yield judge(path, ran, mounts.get(path), look.settings.storage_within_s)


def judge(path: str, ran: ProgramResult, mount: Mount | None, within_s: float) -> CheckResult:
    """The result for a folder, from how touching it went."""
    lines = ran.output.decode(errors="replace").split("\n")[:-1]
    if ran.code == 0 and mount is not None and mount.has_become_read_only:
        reason = "the kernel has made it read-only; see its log, then mount it again"
        return _result(path, "failed", reason, "drain")
    if ran.code == 0:
        return _result(path, "ok")
    if ran.code is None and lines:
        reason = f"{lines[-1]} did not end within {within_s:g} s; is its server reachable?"
        return _result(path, "failed", reason, "drain")
    if len(lines) < 2:
        how = f"did not start within {within_s:g} s" if ran.code is None else f"ended: {ran.code}"
        return _result(path, "unknown", f"the process that touches it {how}")
    return _refused(path, lines[-2], *lines[-1].split(" ", 1))


def _refused(path: str, step: str, code: str, why: str = "") -> CheckResult:
    """A step has ended with an error of the operating system."""
    if code in _NOT_OURS:
        reason = f"{step}: {why}; run the check as the user who trains"
        return _result(path, "warning", reason, code=code)
    fix = _FIXES.get(code, "see the kernel's log")
    return _result(path, "failed", f"{step}: {why}; {fix}", "drain", code)


def _lustre(look: Look) -> Iterator[CheckResult]:
    try:
        health = look.path("sys/fs/lustre/health_check").read_text().strip()
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        yield _result("lustre", "unknown", f"its health cannot be read: {error.strerror}")
        return
    if health.splitlines()[:1] == ["healthy"]:
        yield _result("lustre", "ok")
    else:
        why = f"Lustre says {health or 'nothing'!r}, not healthy; see lctl device_list"
        yield _result("lustre", "failed", why, "drain")
