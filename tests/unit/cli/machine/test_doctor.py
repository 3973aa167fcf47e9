"""The doctor: its exit code, and that one check never spoils another."""

from collections.abc import Callable
from pathlib import Path

import pytest

from everstep.errors import EverstepError
from everstep_services.cli.invocation import Invocation
from everstep_services.cli.machine import bus_diagnosis, doctor
from everstep_services.cli.machine.doctor import examine, worst
from everstep_services.cli.machine.rank_diagnosis import Diagnoses, Diagnosis, Level


@pytest.mark.parametrize(
    ("levels", "code"),
    [
        ([], 0),
        ([Level.OK], 0),
        ([Level.OK, Level.UNKNOWN], 3),
        ([Level.UNKNOWN, Level.WARNING], 1),
        ([Level.CRITICAL, Level.UNKNOWN, Level.WARNING], 2),
    ],
)
def test_the_gravest_finding_is_the_exit_code(levels: list[Level], code: int) -> None:
    assert worst([Diagnosis("x", level, "") for level in levels]) == code


def failing(error: Exception) -> Callable[[Invocation], Diagnoses]:
    def check(invocation: Invocation) -> Diagnoses:
        yield Diagnosis("check", Level.OK, "began")
        raise error

    return check


def test_a_check_that_fails_does_not_stop_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = ModuleNotFoundError("No module named 'nats'", name="nats")
    checks = (failing(EverstepError("no\nway")), failing(OSError("odd")), failing(missing))
    monkeypatch.setattr(doctor, "CHECKS", checks)
    found = [finding for finding in examine(Invocation()) if finding.text != "began"]
    assert [(finding.level, finding.text) for finding in found] == [
        (Level.CRITICAL, "no way"),
        (Level.UNKNOWN, "could not find out: odd"),
        (Level.UNKNOWN, "nats is not installed"),
    ]
    assert found[2].fix == "pip install 'everstep[bus,services]'"


def test_every_check_answers_on_this_machine(tmp_path: Path) -> None:
    environ = {"HOME": str(tmp_path), "EVERSTEP_API__PORT": "0"}
    found = {finding.check: finding for finding in examine(Invocation(environ=environ))}
    own = {check.__name__ for check in doctor.CHECKS} - {"host"}
    assert set(found) == own | {"kernel_clock", "limits", "disks"}
    assert found["python"].level is found["nats_server"].level is Level.OK
    assert found["state_directory"].text.startswith(f"{tmp_path}/.local/state/everstep, ")
    assert (found["api"].level, found["api"].fix) == (
        Level.WARNING,
        "everstep up, or set url in [client]",
    )
    assert all(finding.fix for finding in found.values() if finding.level is Level.WARNING)
    assert not (tmp_path / ".local").exists()


def test_an_api_that_is_named_but_away_is_critical(tmp_path: Path) -> None:
    """A closed port of the API is named, with the setting to correct (A1.5)."""
    environ = {"HOME": str(tmp_path), "EVERSTEP_CLIENT__URL": "http://127.0.0.1:1"}
    (found,) = doctor.api(Invocation(environ=environ))
    assert found.level is Level.CRITICAL
    assert "cannot be reached" in found.text
    assert found.fix == (
        "the API was named by environment EVERSTEP_CLIENT__URL: start it, or correct that"
    )


def test_a_bus_that_is_named_but_away_is_critical(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A closed port of the bus is named (A1.5)."""
    monkeypatch.setattr(bus_diagnosis, "_WITHIN_S", 0.5)
    environ = {"HOME": str(tmp_path), "EVERSTEP_BUS__URL": "nats://127.0.0.1:1"}
    (found,) = bus_diagnosis.bus(Invocation(environ=environ))
    assert found.level is Level.CRITICAL
    assert "127.0.0.1:1" in found.text
