"""What the child process makes of a check that misbehaves."""

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from everstep.messages import CheckResult
from everstep_services.agent.probes import registry
from everstep_services.agent.probes.base import Look, Probe
from everstep_services.agent.probes.runner import child
from everstep_services.agent.probes.runner.protocol import CheckFound, Request
from everstep_services.agent.probes.settings import ChecksSettings


class Misbehaving:
    """A check that does as the test says."""

    name = "odd"
    about = "odd"
    beside_training = True

    def __init__(self, examine: Any) -> None:
        self._examine = examine

    def examine(self, look: Look) -> Iterable[CheckResult]:
        found: Iterable[CheckResult] = self._examine(look)
        return found


def said(
    monkeypatch: pytest.MonkeyPatch, examine: Any
) -> tuple[list[CheckResult], child.CheckRunner]:
    """What is heard of it, and the notes that it leaves."""

    def find(name: str, settings: ChecksSettings) -> Probe:
        return Misbehaving(examine)

    monkeypatch.setattr(registry, "find", find)
    request = Request(
        names=("odd",),
        settings=ChecksSettings(),
        notes=None,
        until=time.monotonic() + 30,
        root=Path("/"),
        own_pids=(),
    )
    checks = child.CheckRunner(request, {"odd": {"n": 1}})
    return [line.result for line in checks.lines() if isinstance(line, CheckFound)], checks


def partly(look: Look) -> Iterable[CheckResult]:
    look.memory["n"] += 1
    yield CheckResult(check="odd", state="ok", subject="first")
    raise MemoryError("all\nof it")


def ends(look: Look) -> Iterable[CheckResult]:
    raise SystemExit(3)


def notes_a_path(look: Look) -> Iterable[CheckResult]:
    look.memory["path"] = look.root
    return [CheckResult(check="odd", state="ok")]


@pytest.mark.parametrize(
    ("examine", "heard"),
    [
        (partly, [("ok", ""), ("unknown", "the check itself failed: MemoryError: all of it")]),
        (ends, [("unknown", "the check itself failed: SystemExit: 3")]),
        (lambda look: [], [("unknown", "it returned no result")]),
    ],
)
def test_a_check_that_breaks_is_unknown_and_its_notes_stay(
    monkeypatch: pytest.MonkeyPatch, examine: Any, heard: list[tuple[str, str]]
) -> None:
    found, checks = said(monkeypatch, examine)
    assert [(one.state, one.reason) for one in found] == heard
    assert checks.changed in ({}, {"odd": {"n": 1}})


def test_notes_that_no_file_can_hold_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    found, checks = said(monkeypatch, notes_a_path)
    assert [one.state for one in found] == ["ok", "unknown"]
    assert checks.changed == {}


def test_what_it_says_is_one_valid_line_of_bounded_length(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = "a\n\tb\x1b[31m \udcff" + "x" * 5000
    odd = CheckResult(check="odd", state="ok", reason=reason, subject="/d\n\udc80")
    ((one,), _) = said(monkeypatch, lambda look: [odd])
    assert one.reason.startswith("a b [31m ?xxx")
    assert len(one.reason) == 1024
    assert one.subject == "/d ?"


def test_notes_of_a_look_come_to_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def counts(look: Look) -> list[CheckResult]:
        look.memory["n"] += 1
        return [CheckResult(check="odd", state="ok")]

    _, checks = said(monkeypatch, counts)
    assert checks.changed == {"odd": {"n": 2}}
