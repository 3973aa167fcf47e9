"""What the callbacks of frameworks share: no callback ends a training, and none counts twice."""

from importlib.metadata import version

import pytest

from trainer_sdk import sdk_log
from trainer_sdk.integrations import framework_session
from trainer_sdk.integrations.framework_session import (
    FrameworkSession,
    check_version,
    harmless,
)
from trainer_sdk.testing import watched


@pytest.fixture(autouse=True)
def new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sdk_log, "_printed", set())
    monkeypatch.setattr(framework_session, "_reporting", [])


class Callbacks:
    """A framework's callbacks; one of them is broken."""

    def __init__(self) -> None:
        self.calls = 0

    @harmless
    def on_step(self, step: int) -> None:
        self.calls += 1
        raise ValueError(f"step {step} is odd")


def test_a_callback_that_raises_is_one_warning_and_the_training_goes_on(
    capfd: pytest.CaptureFixture[str],
) -> None:
    callbacks = Callbacks()
    for _ in range(3):
        callbacks.on_step(7)
    assert callbacks.calls == 3
    (line,) = capfd.readouterr().err.splitlines()
    assert "Callbacks.on_step has failed, and the training goes on" in line
    assert "ValueError: step 7 is odd" in line


def test_of_two_integrations_the_first_one_counts_the_steps_and_it_is_said_once(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with watched() as watch:
        first, second = FrameworkSession("Lightning"), FrameworkSession("Accelerate")
        for step in (1, 2, 3):
            first.begin("step")
            second.begin("other")
            first.end("step")
            second.end("other")
            first.step(step)
            second.step(step + 100)
    assert watch.step == 3
    assert watch.reading.steps == 3
    assert set(watch.sections) == {"step"}
    (line,) = capfd.readouterr().err.splitlines()
    assert "Lightning and Accelerate both report to Everstep" in line


def test_sections_end_with_those_that_began_inside_and_an_end_without_a_begin_is_none() -> None:
    with watched() as watch:
        run = FrameworkSession("x")
        run.begin("setup")
        run.begin("setup")
        run.begin("evaluation")
        run.end("checkpointing")
        run.end("setup")
        run.end_all()
        assert not watch.open
    assert {name: spent.count for name, spent in watch.sections.items()} == {
        "setup": 1,
        "evaluation": 1,
    }
    assert watch.misuses == 0


def test_a_release_outside_the_tested_range_is_one_line_and_no_error(
    capfd: pytest.CaptureFixture[str],
) -> None:
    installed = version("msgspec")
    assert check_version("msgspec", "0.1", "99")
    assert capfd.readouterr().err == ""
    for _ in range(2):
        assert not check_version("msgspec", "98", "99")
    (line,) = capfd.readouterr().err.splitlines()
    assert f"msgspec {installed} is not among the releases" in line
    assert not check_version("msgspec", "0.1", "0.1.1")
    assert check_version("no-such-distribution", "1", "2")
