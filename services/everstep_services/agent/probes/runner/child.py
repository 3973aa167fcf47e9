"""The process in which checks run: it may hang, crash or be killed without harm to others."""

import contextlib
import os
import queue
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, BinaryIO

import msgspec

from everstep.errors import EverstepError
from everstep.messages.facts.health import CheckResult
from everstep_services.agent.probes import notes as kept
from everstep_services.agent.probes import registry
from everstep_services.agent.probes.base import Look, Probe
from everstep_services.agent.probes.notes import Notes, NotesLostError
from everstep_services.agent.probes.runner.protocol import (
    CheckBegan,
    CheckEnded,
    CheckFound,
    ChecksDone,
    Line,
    ProcessReady,
    Request,
    decode_request,
    encode,
)
from everstep_services.agent.ranks import process_tree

_REASON_MOST = 1024
_NOTES_WITHIN_S = 1.0
_CONTROL = dict.fromkeys((*range(32), *range(127, 160)), " ")
BESIDE_RANKS = "--beside-ranks"
_NICE = 19
_BROADCAST = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class CheckRunner:
    """Runs each check in a thread of its own, and yields results until their time is over."""

    def __init__(self, request: Request, notes: Notes) -> None:
        self._request = request
        self._notes = notes
        self._heard: queue.SimpleQueue[Line] = queue.SimpleQueue()
        self._open: dict[str, float] = {}
        self.changed: Notes = {}
        """The notes of the checks that have finished."""

    def lines(self) -> Iterator[Line]:
        """All results, as they come."""
        for name in self._request.names:
            self._open[name] = self._until(name)
            _in_thread(self._guarded, name, partial(self._find_and_run, name))
        while self._open:
            try:
                left_s = min(self._open.values()) - time.monotonic()
                line = self._heard.get(timeout=max(left_s, 0))
            except queue.Empty:
                now = time.monotonic()
                self._open = {name: until for name, until in self._open.items() if until > now}
                continue
            if isinstance(line, CheckBegan):
                self._open[line.check] = self._until(line.check)
            elif isinstance(line, CheckEnded):
                self._open.pop(line.check, None)
            yield line

    def _until(self, name: str) -> float:
        limit_s = registry.deadline_s(name, self._request.settings)
        return min(time.monotonic() + limit_s, self._request.until)

    def _guarded(self, name: str, run: Callable[[], None]) -> None:
        try:
            run()
        except BaseException as error:  # noqa: BLE001  whatever a check does, it is only unknown
            self._heard.put(CheckFound(check=name, result=_crashed(name, error)))
        self._heard.put(CheckEnded(check=name))

    def _find_and_run(self, name: str) -> None:
        settings = self._request.settings
        if name != registry.SITE:
            self.run(name, registry.find(name, settings))
            return
        for probe in registry.site_probes(settings):
            self._heard.put(CheckBegan(check=probe.name))
            _in_thread(self._guarded, probe.name, partial(self.run, probe.name, probe))

    def run(self, name: str, probe: Probe) -> None:
        """Run one check to its end, and keep its notes."""
        memory: dict[str, Any] = dict(self._notes.get(name, {}))
        look = Look(
            settings=self._request.settings,
            root=self._request.root,
            memory=memory,
            at=time.clock_gettime(time.CLOCK_REALTIME),
            within_s=max(self._until(name) - time.monotonic(), 0.0),
            own_pids=frozenset(self._request.own_pids),
        )
        has_said, began = False, time.monotonic()
        for result in probe.examine(look):
            has_said = True
            took_s = result.took_s or round(time.monotonic() - began, 4)
            self._heard.put(CheckFound(check=name, result=_clean(result, took_s)))
        if not has_said:
            self._heard.put(CheckFound(check=name, result=_unknown(name, "it returned no result")))
        msgspec.json.encode(memory)  # refuses what a file could not hold
        if memory or name in self._notes:
            self.changed[name] = memory


def _in_thread(run: Callable[..., None], *arguments: object) -> None:
    threading.Thread(target=run, args=arguments, daemon=True).start()


def _unknown(name: str, reason: str) -> CheckResult:
    return CheckResult(check=name, state="unknown", reason=reason)


def _crashed(name: str, error: BaseException) -> CheckResult:
    kind = "" if isinstance(error, EverstepError) else f"{type(error).__name__}: "
    return _clean(_unknown(name, f"the check itself failed: {kind}{error}"), 0.0)


def _clean(result: CheckResult, took_s: float) -> CheckResult:
    """A text that may be sent and shown: valid, on one line, of bounded length."""

    def text(given: str) -> str:
        valid = given.encode(errors="replace").decode()
        return " ".join(valid.translate(_CONTROL).split())[:_REASON_MOST]

    return msgspec.structs.replace(
        result,
        reason=text(result.reason),
        subject=text(result.subject),
        code=text(result.code),
        took_s=took_s,
    )


def notes_of(request: Request) -> tuple[Notes, str]:
    """The notes of the last look, or why they are lost; a stuck disk is not waited for."""
    answers: list[Notes | NotesLostError] = []
    path = request.notes
    if path is None:
        return {}, ""

    def read() -> None:
        try:
            answers.append(kept.read(path))
        except NotesLostError as error:
            answers.append(error)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    thread.join(_NOTES_WITHIN_S)
    match answers:
        case [NotesLostError() as error]:
            return {}, str(error)
        case [dict() as notes]:
            return notes, ""
        case _:
            return {}, f"{path} could not be read within {_NOTES_WITHIN_S:g} s"


class Requests:
    """Runs one request after the other, and leaves no process of a run behind."""

    def __init__(self, send: Callable[[Line], None]) -> None:
        self._send = send
        self._cpu_s = 0.0
        """The processor time that was reported."""

    def ready(self) -> None:
        """Report that this process can run checks."""
        self._cpu_s = _spent_s()
        self._send(ProcessReady(cpu_s=round(self._cpu_s, 4)))

    def run(self, request: Request) -> None:
        """Run the checks of a request, and report their processor time at the end."""
        if left := process_tree.descendants(os.getpid()):
            # A process in the kernel's hands cannot be killed: one of them is enough.
            reason = f"the last run of a probe has not ended: process {min(left)} cannot be killed"
            for name in request.names:
                self._send(CheckFound(check=name, result=_unknown(name, reason)))
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
    """Run requests from stdin until it is closed; with `BESIDE_RANKS`, without harm to ranks.

    Daemons that programs of the site leave behind, in sessions of their own, end with the checks.
    """
    if sys.argv[1:] == [BESIDE_RANKS]:
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

        requests = Requests(tell)
        requests.ready()
        while True:
            requests.run(asked.get())


if __name__ == "__main__":
    main()
