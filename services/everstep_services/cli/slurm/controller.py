"""Questions and requests to Slurm's controller, by its own commands; it may be away for a while."""

import re
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from everstep.backoff import Backoff
from everstep_services.cli.errors import CliError, Exit

_AWAY = re.compile(
    r"unable to contact slurm controller|slurm_load_\w+ error: (?:unable|socket|zero)"
    r"|connect failure|socket timed out|connection (?:refused|timed out|reset)"
    r"|zero bytes were transmitted|invalid authentication credential|slurmctld.*not responding",
    re.IGNORECASE,
)
_AGAIN_FIRST_S, _AGAIN_LAST_S = 1.0, 30.0
_ANSWERS_WITHIN_S = 120.0
_LEAVING = ("DRAIN", "FAIL")
_LONGEST_REASON = 200


@dataclass(frozen=True, slots=True)
class CommandResult:
    """What a command of Slurm has returned."""

    code: int
    stdout: str
    stderr: str


Run = Callable[[Sequence[str]], CommandResult]


def run_command(command: Sequence[str]) -> CommandResult:
    """Run a command of Slurm to its end."""
    try:
        done = subprocess.run(  # noqa: S603  Slurm's own commands, found as the script finds them
            command, capture_output=True, text=True, check=False, timeout=_ANSWERS_WITHIN_S
        )
    except FileNotFoundError as error:
        raise CliError(
            f"there is no program {command[0]} here: this command belongs into a batch script of "
            f"Slurm, and needs Slurm's commands on PATH",
            Exit.USAGE,
        ) from error
    except subprocess.TimeoutExpired:
        return CommandResult(1, "", f"{command[0]}: Socket timed out")
    return CommandResult(done.returncode, done.stdout, done.stderr)


class SlurmController:
    """Slurm's controller. Each call waits while it is away, up to a limit."""

    def __init__(
        self,
        run: Run = run_command,
        *,
        away_s: float = 600.0,
        sleep: Callable[[float], None] = time.sleep,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._run = run
        self._away_s = away_s
        self._sleep = sleep
        self._say = say

    def job_state(self, job: str) -> str:
        """The state of a job, for example RUNNING; empty if Slurm has forgotten the job."""
        shown = self._ask("scontrol", "show", "job", "--oneliner", job, forgotten="Invalid job id")
        match = re.search(r"\bJobState=(\S+)", shown)
        return match[1] if match else ""

    def requeue(self, job: str) -> None:
        """Put a running job back into the queue; Slurm ends its processes."""
        self._ask("scontrol", "requeue", job)

    def cancel_pending(self, array: str) -> None:
        """Cancel the tasks of an array that have not started."""
        self._ask("scancel", "--state=PENDING", array)

    def leaving_nodes(self, nodes: str) -> dict[str, str]:
        """The nodes among these that are drained or about to fail, with the reason."""
        return leaving(self._ask("scontrol", "show", "node", "--oneliner", nodes))

    def hostnames(self, nodes: str) -> list[str]:
        """The names in a node list of Slurm, for example of `n[1-4]`."""
        return self._ask("scontrol", "show", "hostnames", nodes).split()

    def drain(self, node: str, reason: str) -> None:
        """Give a node no further job; raises `CliError` without the right to do so."""
        self._ask(
            "scontrol", "update", f"NodeName={node}", "State=DRAIN", f"Reason={one_word(reason)}"
        )

    def _ask(self, *command: str, forgotten: str = "") -> str:
        backoff, waited_s = Backoff(_AGAIN_FIRST_S, _AGAIN_LAST_S), 0.0
        while True:
            result = self._run(command)
            if result.code == 0:
                return result.stdout
            text = " ".join(result.stderr.split()) or f"it exited with {result.code}"
            if forgotten and forgotten.lower() in text.lower():
                return ""
            if not _AWAY.search(text):
                raise CliError(f"`{' '.join(command)}` has failed: {text}")
            if waited_s >= self._away_s:
                raise CliError(
                    f"Slurm's controller has not answered `{' '.join(command)}` for "
                    f"{waited_s:.0f} s: {text}",
                    Exit.UNREACHABLE,
                )
            if not waited_s:
                self._say(f"Slurm's controller is away ({text}): asking again")
            pause_s = backoff.failed()
            self._sleep(pause_s)
            waited_s += pause_s


def one_word(reason: str) -> str:
    """The reason without what would end the value of an option of `scontrol`."""
    return re.sub(r"[^\x20-\x7e]+|[\"'\\=]", " ", reason)[:_LONGEST_REASON].strip()


def leaving(shown: str) -> dict[str, str]:
    """The nodes of `scontrol show node --oneliner` that are drained or about to fail."""
    nodes: dict[str, str] = {}
    for line in shown.splitlines():
        name, state = re.search(r"\bNodeName=(\S+)", line), re.search(r"\bState=(\S+)", line)
        if name is None or state is None:
            continue
        flags = re.split(r"[+*~#!%$@^-]+", state[1].upper())
        if any(flag.startswith(_LEAVING) for flag in flags):
            reason = re.search(r"\bReason=(.*?)(?:\s*\[\S+@\S+\])?\s*$", line)
            nodes[name[1]] = reason[1].strip() if reason else ""
    return nodes
