"""The process in which probes run, one after the other: it may hang, crash or be killed."""

import contextlib
import os
import queue
import resource
import signal
import sys
import threading
from collections.abc import Callable
from typing import BinaryIO

from everstep.messages.facts.health import CheckResult
from everstep_services.agent.probes import notes as kept
from everstep_services.agent.probes.notes import NotesLostError
from everstep_services.agent.probes.runner.child import CheckRunner, notes_of
from everstep_services.agent.probes.runner.protocol import (
    CheckEnded,
    CheckFound,
    ChecksDone,
    Line,
    Request,
    decode_request,
    encode,
)
from everstep_services.agent.ranks import process_tree

_NICE = 19
_BROADCAST = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class ProbeRuns:
    """Runs one request after the other, and leaves no process of a run behind."""

    def __init__(self, send: Callable[[Line], None]) -> None:
        self._send = send
        self._cpu_s = 0.0
        """The processor time that was reported."""

    def ready(self) -> None:
        """Report that this process can run probes."""
        self._done("")

    def run(self, request: Request) -> None:
        """Run the check of a request, and report its processor time at the end."""
        (name,) = request.names
        if left := process_tree.descendants(os.getpid()):
            # A process in the kernel's hands cannot be killed: one of them is enough.
            reason = f"the last run of a probe has not ended: process {min(left)} cannot be killed"
            unknown = CheckResult(check=name, state="unknown", reason=reason)
            self._send(CheckFound(check=name, result=unknown))
            self._send(CheckEnded(check=name))
            self._done("")
            return
        notes, trouble = notes_of(request)
        checks = CheckRunner(request, notes)
        for line in checks.lines():
            self._send(line)
        if request.notes is not None and checks.changed:
            try:
                kept.keep(request.notes, checks.changed)
            except NotesLostError as error:
                trouble = str(error)
        process_tree.clean_up()
        self._done(trouble)

    def _done(self, trouble: str) -> None:
        spent_s = _spent_s()
        self._send(ChecksDone(trouble=trouble, cpu_s=round(spent_s - self._cpu_s, 4)))
        self._cpu_s = spent_s


def _spent_s() -> float:
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def _yield_to_ranks() -> None:
    """Get processor time after ranks only, and be the first that a lack of memory ends."""
    with contextlib.suppress(OSError):
        os.nice(_NICE)
    with (
        contextlib.suppress(OSError),
        open("/proc/self/oom_score_adj", "w", encoding="utf-8") as file,
    ):
        file.write("1000")


def _pass_over(_number: int, _frame: object) -> None:
    """A signal to every process of a step is for the agent; its end closes our stdin."""


def _outlive_broadcasts() -> None:
    """Stay when a scheduler signals every process. Programs of the site still end by signals.

    A handler, unlike an ignored signal, is not inherited by the programs that a probe starts.
    """
    for number in _BROADCAST:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, _pass_over)


def _read(requests: BinaryIO, asked: "queue.SimpleQueue[Request]") -> None:
    """Pass requests on; end this process and all that it has started with its agent."""
    for line in requests:
        asked.put(decode_request(line))
    process_tree.clean_up()
    if os.getpgid(0) == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(0)


def main() -> None:
    """Run requests from stdin until it is closed."""
    _outlive_broadcasts()
    _yield_to_ranks()
    process_tree.become_subreaper()
    with os.fdopen(os.dup(1), "wb", buffering=0) as out:
        os.dup2(2, 1)  # the output of a library must not mix with our lines
        asked: queue.SimpleQueue[Request] = queue.SimpleQueue()
        reader = threading.Thread(target=_read, args=(sys.stdin.buffer, asked), daemon=True)
        reader.start()

        def tell(line: Line) -> None:
            try:
                out.write(encode(line))
            except BrokenPipeError:
                reader.join()  # it first kills what runs, then this process

        runs = ProbeRuns(tell)
        runs.ready()
        while True:
            runs.run(asked.get())


if __name__ == "__main__":
    main()
