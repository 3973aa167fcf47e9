"""The loop of a training with one rank: what counts, what comes again, what is reported."""

import inspect
import random
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from trainer_sdk import layout
from trainer_sdk.checkpoint import Checkpointer
from trainer_sdk.numerics.numerics import Numerics
from trainer_sdk.numerics.policy import NumericsPolicy
from trainer_sdk.numerics.present_step import SuspectSteps
from trainer_sdk.rank_session import Session, session
from trainer_sdk.testing import Watch, watched
from trainer_sdk.wire import NumericsReported

NAN = float("nan")


@pytest.fixture
def watch() -> Iterator[Watch]:
    with watched() as watching:
        yield watching


def made(batches: Any = (), **choices: Any) -> Numerics:
    return Numerics(session(), {"model": nn.Linear(2, 1)}, batches, **choices)


def events(watch: Watch) -> list[tuple[str, str]]:
    reported = [message for message in watch.messages if isinstance(message, NumericsReported)]
    return [(event.event, event.body.get("kind", "")) for event in reported]


@pytest.mark.parametrize("counts", [True, False])
def test_a_refused_step_comes_again_and_does_not_count(watch: Watch, *, counts: bool) -> None:
    run, given, faults = session(), [], [NAN]
    training = made([10, 11, 12], mode="validate_results")
    for batch in training:
        given.append(batch)
        values = [faults.pop() if batch == 11 and faults else 1.0]
        loss = training.compute(lambda values=values: values.pop() if values else 1.0)
        is_accepted = training.accepts(loss=loss)
        assert is_accepted is (loss == 1.0)
        if counts or is_accepted:
            run.step()
        assert run.steps_made <= len(given)
    assert given == [10, 11, 11, 12]
    assert run.steps_made == watch.step == 3
    assert events(watch)[:2] == [("suspected", ""), ("judged", "transient")]


def test_micro_batches_come_again_together(watch: Watch) -> None:
    given: list[int] = []
    training = made(range(4), mode="validate_results")
    for batch in training:
        given.append(batch)
        is_first = given.count(3) == 1 and batch == 3
        state = [NAN if is_first else 1.0]
        training.compute(lambda state=state: state.pop() if state else 1.0)
        if batch % 2:
            training.accepts(loss=NAN if is_first else 1.0)
            session().step()
    assert given == [0, 1, 2, 3, 2, 3]
    assert session().steps_made == 2


def test_what_the_loop_draws_is_drawn_again(watch: Watch) -> None:
    drawn: dict[tuple[int, int], list[float]] = {}
    training = made(range(4), mode="validate_results")
    for batch in training:
        values = [float(torch.rand(1)), random.random(), float(numpy.random.normal())]
        tries = sum(number == batch for number, _ in drawn)
        drawn[batch, tries] = values
        state = [NAN if (batch, tries) == (1, 0) else 1.0]
        training.compute(lambda state=state: state.pop() if state else 1.0)
        if batch % 2:
            training.accepts(loss=NAN if (batch, tries) == (1, 0) else 1.0)
    assert drawn[0, 0] == drawn[0, 1]
    assert drawn[1, 0] == drawn[1, 1]
    assert drawn[2, 0] not in (drawn[0, 0], drawn[1, 0])


@pytest.mark.parametrize(("warns", "kinds"), [(False, ["transient"]), (True, [])])
def test_every_bit_counts_only_where_torch_refuses_other_algorithms(
    watch: Watch, *, warns: bool, kinds: list[str]
) -> None:
    training, first = made(range(1), mode="validate_results", validate_every=1), [1.000001]
    torch.use_deterministic_algorithms(mode=True, warn_only=warns)
    try:
        for _ in training:
            loss = training.compute(lambda: first.pop() if first else 1.0)
            training.accepts(loss=loss)
    finally:
        torch.use_deterministic_algorithms(mode=False)
    assert [kind for name, kind in events(watch) if name == "judged"] == kinds


def test_values_that_come_again_are_accepted(watch: Watch) -> None:
    training = made(range(2), mode="validate_results")
    for _ in training:
        training.compute(lambda: NAN)
        assert training.accepts(loss=NAN)
    assert events(watch)[:2] == [("suspected", ""), ("judged", "correct_but_unexpected")]


def test_a_training_without_numbers_from_the_start_is_not_run_again_for_ever(
    watch: Watch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[int] = []

    def compute(number: int) -> float:
        calls.append(number)
        return NAN

    training = made(range(10), mode="validate_results")
    for number in training:
        training.compute(compute, number)
        training.accepts(loss=NAN)
    assert len(calls) == 10 + 3 * 2
    assert [name for name, _ in events(watch)].count("suspected") == 3
    assert capsys.readouterr().err.count("step 4 is unexpected like the 3 before it") == 1


def test_a_call_that_has_failed_is_not_made_again(watch: Watch) -> None:
    calls: list[int] = []

    def compute(number: int) -> float:
        calls.append(number)
        if number == 1:
            raise MemoryError
        return 1.0

    training = made(range(4), mode="validate_results", validate_every=1)
    for number in training:
        with suppress(MemoryError):
            training.accepts(loss=training.compute(compute, number))
    assert calls == [0, 0, 0, 1, 2, 2, 2, 3, 3, 3]
    assert events(watch) == [("counted", "")]


def test_what_was_counted_is_reported_when_the_script_leaves_its_loop(watch: Watch) -> None:
    training = made(range(9), mode="report_determinism_stats")
    for number in training:
        training.accepts(loss=training.compute(float, number))
        if number == 3:
            break
    [message] = [each for each in watch.messages if isinstance(each, NumericsReported)]
    assert (message.event, message.body["steps"], message.body["again"]) == ("counted", 4, 4)


@pytest.mark.parametrize(
    ("times", "text"),
    [(0, "2 steps were made without accepts"), (1, ""), (2, "accepts was called twice in a step")],
)
def test_a_loop_with_another_number_of_decisions_is_told_once(
    watch: Watch, times: int, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    training = made(range(6))
    for _ in training:
        training.compute(lambda: 1.0)
        for _ in range(times):
            training.accepts(loss=1.0)
        session().step()
    lines = [line for line in capsys.readouterr().err.splitlines() if "accepts" in line]
    assert [text in line for line in lines] == [True] * bool(text)


def test_steps_are_suspect_until_enough_in_a_row_were_as_expected() -> None:
    suspects = SuspectSteps()
    for doubted in (7, 5, 9):
        suspects.doubt(doubted)
        suspects.accepted()
    again = SuspectSteps()
    again.load(suspects.state())
    since = []
    for _ in range(16):
        again.accepted()
        since.append(again.since)
    assert since == [5] * 15 + [None]
    for made, left in ((5, 5), (4, None)):
        suspects.refused(made)
        assert suspects.since == left


def test_disabled_does_nothing(watch: Watch) -> None:
    assert made(mode="disabled").state_dict() == {}
    training = made([torch.ones(1)], mode="disabled")
    for batch in training:
        assert training.compute(lambda values: values * 2, batch) == 2
        assert training.accepts(loss=NAN)
    assert not events(watch)


def test_what_is_not_a_number_does_not_end_the_training(watch: Watch) -> None:
    training = made()
    for value in ("loss", torch.ones(3), None, [1.0], Tensor()):
        assert training.accepts(loss=value, grad_norm=value)


def test_values_and_their_band_are_shown(watch: Watch) -> None:
    training = made()
    for number in range(80):
        training.accepts(loss=2.0 + number % 3 * 0.1, grad_norm=torch.tensor(1.0))
    assert watch.values["loss"] == 2.1
    assert watch.values["loss_low"] < 2.0 < watch.values["loss_high"]
    assert watch.values["grad_norm"] == 1.0


@pytest.mark.parametrize(("has_loss", "signals"), [(False, ["output_spike"]), (True, [])])
def test_without_a_loss_the_output_of_the_model_is_looked_at(
    watch: Watch, *, has_loss: bool, signals: list[str]
) -> None:
    """As of a stage of a pipeline, which hands it on; in micro-batches, and not when run again."""
    model = nn.Linear(4, 4)
    training = Numerics(session(), {"model": model}, range(120), mode="validate_results")

    def compute(number: int) -> float | None:
        output = model(torch.randn(8, 4))
        output.mean().backward()
        with torch.no_grad():
            model(torch.full((8, 4), 1e6))  # as for a metric
        return 1.0 if has_loss else None

    for number in training:
        if number == 119:
            nn.init.constant_(model.weight, 100.0)
        loss = training.compute(compute, number)
        if number % 2:
            assert training.accepts(loss=loss)
    suspected = [
        (message.body["step"], message.body["signal"])
        for message in watch.messages
        if isinstance(message, NumericsReported) and message.event == "suspected"
    ]
    assert suspected == [(60, signal) for signal in signals]


@pytest.mark.parametrize("is_enabled", [True, False])
def test_only_where_a_scaler_is_at_work_a_norm_may_be_infinite(
    watch: Watch, *, is_enabled: bool
) -> None:
    scaler = torch.amp.GradScaler("cpu", enabled=is_enabled)
    training = Numerics(session(), {"model": nn.Linear(2, 1), "scaler": scaler})
    training.accepts(loss=1.0, grad_norm=float("inf"))
    assert events(watch) == ([] if is_enabled else [("suspected", "")])


def test_statistics_go_on_after_a_restart(watch: Watch) -> None:
    first = made()
    for number in range(80):
        first.accepts(loss=2.0 + number % 3 * 0.1)
    second = made()
    second.load_state_dict(first.state_dict())
    second.accepts(loss=2000.0)
    assert events(watch) == [("suspected", "")]


@pytest.mark.parametrize(
    ("lost", "more", "text", "is_kept"),
    [
        ("suspect", {}, "of another release: see suspect", True),
        ("", {"median": 3}, "of another release: see median", True),
        ("", {"loss": {"steps": []}}, "cannot be read, and begin anew: KeyError", False),
        ("", {"suspect": None}, "cannot be read, and begin anew: TypeError", False),
    ],
)
def test_statistics_of_another_release_are_a_line_and_no_error(
    watch: Watch,
    lost: str,
    more: dict[str, Any],
    text: str,
    capsys: pytest.CaptureFixture[str],
    *,
    is_kept: bool,
) -> None:
    first = made()
    for number in range(80):
        first.accepts(loss=2.0 + number % 3 * 0.1)
    ((key, (saved,)),) = first.state_dict().items()
    saved = {name: value for name, value in saved.items() if name != lost} | more
    second = made()
    second.load_state_dict({key: (saved,)})
    [line] = capsys.readouterr().err.splitlines()
    assert text in line
    second.accepts(loss=2000.0)
    assert events(watch) == [("suspected", "")] * is_kept


@pytest.mark.parametrize(("error", "times"), [(None, 1), (ValueError(), 0)])
def test_a_session_that_ends_well_decides_on_the_last_steps(
    watch: Watch, monkeypatch: pytest.MonkeyPatch, error: ValueError | None, times: int
) -> None:
    ends: list[float] = []
    page = session()._seconds
    monkeypatch.setattr(Numerics, "finish", lambda _: ends.append(page[layout.CLOSED_S]))
    training = made(range(3))
    with suppress(ValueError), session():
        assert training.accepts(loss=1.0)
        if error is not None:
            raise error
    session().close()
    assert len(ends) == times
    assert all(ends), "a rank that waits for others there has not stalled"


def test_a_loop_that_has_ended_does_not_go_back_in_place(watch: Watch, tmp_path: Path) -> None:
    state: dict[str, Any] = {"model": nn.Linear(2, 1)}
    with Checkpointer(tmp_path) as saves:
        saves.save(0, state, wait=True)
        training = Numerics(session(), state, range(4), unexpected="rollback", checkpointer=saves)
        next(iter(training))
        assert training.accepts(loss=1.0)
        training.finish()
        assert training.accepts(loss=NAN)
    last = watch.messages[-1]
    assert isinstance(last, NumericsReported)
    assert (last.body["outcome"], last.body["reason"]) == (
        "refused", "the loop of the training has ended",
    )  # fmt: skip


def test_an_unexpected_step_stops_the_job_if_that_is_wanted(watch: Watch) -> None:
    training = made(range(2), mode="validate_results", unexpected="stop")
    with pytest.raises(SystemExit) as ended:
        for _ in training:
            training.compute(lambda: NAN)
            training.accepts(loss=NAN)
    assert ended.value.code == 17
    assert [name for name, _ in events(watch)] == ["suspected", "judged", "acted", "counted"]


def test_the_reason_of_an_act_has_a_value_only_if_it_is_a_number(watch: Watch) -> None:
    with pytest.raises(SystemExit):
        made(unexpected="stop").accepts(loss=NAN)
    last = watch.messages[-1]
    assert isinstance(last, NumericsReported)
    assert last.body["reason"] == "nan, and the step was not run again"


def test_a_roll_back_by_a_restart_that_is_refused_was_never_done(
    watch: Watch, tmp_path: Path
) -> None:
    training = made(range(1), mode="validate_results", unexpected="rollback", root=str(tmp_path))
    for _ in training:
        training.compute(lambda: NAN)
        assert training.accepts(loss=NAN)
    acts = [
        (message.body["outcome"], message.body["reason"])
        for message in watch.messages
        if isinstance(message, NumericsReported) and message.event == "acted"
    ]
    assert acts == [("refused", "there is no checkpoint of a step before 1")]


@pytest.mark.parametrize(
    ("budget", "why"), [(3, "there is no checkpoint of a step before 1"), (0, "the budget of 0")]
)
def test_what_cannot_be_done_stops_the_job_if_that_is_wanted(
    watch: Watch, tmp_path: Path, budget: int, why: str
) -> None:
    choices: dict[str, Any] = {"root": str(tmp_path), "budget": budget, "refused": "stop"}
    training = made(range(1), mode="validate_results", unexpected="rollback", **choices)
    with pytest.raises(SystemExit) as ended:
        for _ in training:
            training.compute(lambda: NAN)
            training.accepts(loss=NAN)
    assert ended.value.code == 17
    acts = [
        message.body
        for message in watch.messages
        if isinstance(message, NumericsReported) and message.event == "acted"
    ]
    assert [(act["action"], act["outcome"]) for act in acts] == [
        ("rollback", "refused"), ("stop", "done")
    ]  # fmt: skip
    assert why in acts[-1]["reason"]


@pytest.mark.parametrize(
    ("choices", "text"),
    [
        ({"mode": "validate"}, "mode must be one of"),
        ({"read": True}, "read must be one of"),
        ({"validate_every": 0.5}, "validate_every must be a whole number"),
        ({"hash_every": -1}, "hash_every must be at least 0"),
        ({"budget": -1}, "budget must be at least 0"),
        ({"persistent": "again"}, "persistent is one of"),
        ({"refused": "go on"}, "refused is observe or stop"),
        ({"elsewhere": "yes"}, "elsewhere is report or move"),
        ({"unexpected": "skip"}, "unexpected='skip' needs checkpoints to go back to"),
        ({"replica": "rollback", "root": "r", "batches": None}, "needs the batches"),
        ({"elsewhere": "move"}, "saves the state first"),
        ({"batches": 5}, "batches must be a loader"),
        ({"replicas": 3}, "replicas must be the process group"),
        ({"checkpointer": "/c"}, "checkpointer must be Checkpointer"),
    ],
)
def test_a_wrong_choice_is_one_clear_line(choices: dict[str, Any], text: str) -> None:
    with pytest.raises((TypeError, ValueError), match=text) as raised:
        made(**choices)
    assert "\n" not in str(raised.value)


def test_a_step_is_not_run_again_without_the_model() -> None:
    with pytest.raises(ValueError, match="needs the model in the state"):
        session().numerics({}, mode="validate_results")


def test_an_action_that_the_mode_never_takes_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    made(persistent="stop")
    made(persistent="stop", mode="validate_results")
    made(unexpected="stop")
    [line] = capsys.readouterr().err.splitlines()
    assert "persistent='stop' is without effect" in line


def test_the_state_must_be_a_mapping() -> None:
    with pytest.raises(TypeError, match="state must be a dict of named parts"):
        Numerics(session(), nn.Linear(1, 1))  # type: ignore[arg-type]


def test_a_session_makes_it() -> None:
    assert isinstance(session().numerics({}, []), Numerics)
    shown = inspect.signature(Session.numerics).parameters
    taken = inspect.signature(Numerics).parameters
    actions = asdict(NumericsPolicy())
    assert {name: taken[name].default for name in {*taken} & {*shown}} == {
        name: choice.default for name, choice in shown.items() if name not in {"self", *actions}
    }
    assert {*taken, *actions} - {*shown} == {"session", "rollback", "actions"}
    assert {name: shown[name].default or "observe" for name in actions} == actions
