"""Check `recorder`: whether collectives will have been recorded when ranks hang."""

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from everstep.messages.facts.health import CheckResult
from everstep_services.agent.probes.base import Look
from trainer_sdk.layout import INSTANCE_VARIABLE

NAME = "recorder"
_NAMES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
_FIX = "export TORCH_FR_BUFFER_SIZE=2000"


class RecorderProbe:
    """Reads the environment of each rank; without ranks, its own."""

    name = NAME
    about = "collectives are recorded, so that a hang can be explained"
    beside_training = True

    def examine(self, look: Look) -> Iterator[CheckResult]:
        """One result for all ranks in the same state."""
        if not look.own_pids:
            environ = read_environ(look.path("proc/self/environ"))
            yield judge(environ, is_ours=True)
            return
        results: Counter[CheckResult] = Counter()
        for pid in sorted(look.own_pids):
            try:
                environ = read_environ(look.path("proc", str(pid), "environ"))
            except (FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
                continue
            results[judge(environ, is_ours=INSTANCE_VARIABLE in environ)] += 1
        yield from results


def judge(environ: Mapping[str, str], *, is_ours: bool) -> CheckResult:
    """Whether a rank that starts with this environment records.

    A rank of an agent is armed unless its environment says otherwise; that happens inside the
    process, and cannot be seen from outside.
    """
    name = next((name for name in _NAMES if name in environ), None)
    if name is None and is_ours:
        return CheckResult(check=NAME, state="ok")
    if name is None:
        why = f"{_NAMES[0]} is not set, and the launcher is not ours; {_FIX}"
        return CheckResult(check=NAME, state="warning", reason=why)
    value = environ[name]
    if value.strip().isdecimal() and int(value) > 0:
        return CheckResult(check=NAME, state="ok")
    why = f"{name} is {value[:40]!r}: nothing is recorded; {_FIX}"
    return CheckResult(check=NAME, state="warning", reason=why)


def read_environ(path: Path) -> dict[str, str]:
    """The environment with which a process has started."""
    pairs = path.read_bytes().decode(errors="replace").split("\0")
    return {
        name: value for name, is_one, value in (pair.partition("=") for pair in pairs) if is_one
    }
