"""The process in which checks run: it may hang, crash or be killed without harm to others."""

import os
import queue
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
    Request,
    decode_request,
    encode,
)
from everstep_services.agent.ranks import process_tree

_REASON_MOST = 1024
_NOTES_WITHIN_S = 1.0
_CONTROL = dict.fromkeys((*range(32), *range(127, 160)), " ")


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


def _end_with(parent: BinaryIO) -> None:
    """Kill what the checks have started, and this group, when nobody reads its output any more."""
    parent.read()
    process_tree.clean_up()
    if os.getpgid(0) == os.getpid():
        os.killpg(0, signal.SIGKILL)


def main() -> None:
    """Obey the first line of stdin; then wait to be killed, or for the parent's end.

    Daemons that programs of the site leave behind, in sessions of their own, end with the checks.
    """
    process_tree.become_subreaper()
    with os.fdopen(os.dup(1), "wb", buffering=0) as out:
        os.dup2(2, 1)  # the output of a library must not mix with our lines
        request = decode_request(sys.stdin.buffer.readline())
        leash = threading.Thread(target=_end_with, args=(sys.stdin.buffer,), daemon=True)
        leash.start()

        def tell(line: Line) -> None:
            try:
                out.write(encode(line))
            except BrokenPipeError:
                leash.join()  # it first kills what runs: if we left now, that would run on

        notes, trouble = notes_of(request)
        checks = CheckRunner(request, notes)
        for line in checks.lines():
            tell(line)
        if request.notes is not None:
            try:
                kept.keep(request.notes, checks.changed)
            except NotesLostError as error:
                trouble = str(error)
        process_tree.clean_up()
        tell(ChecksDone(trouble=trouble))
        leash.join()


if __name__ == "__main__":
    main()
