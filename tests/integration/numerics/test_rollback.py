"""Acts on a judged step, with real checkpoints: go back, leave nodes, move, stop."""

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch.utils.data import DataLoader

from tests.checkpoint_helpers.saved_by import UNHURRIED
from trainer_sdk import layout, session
from trainer_sdk.checkpoint import Checkpointer, PositionedSampler, RestoreError
from trainer_sdk.checkpoint.image_folder import NUMERICS
from trainer_sdk.checkpoint.rank_group import RankGroup
from trainer_sdk.checkpoint.storage import storage_for
from trainer_sdk.checkpoint.storage.checkpoints import stored_checkpoints
from trainer_sdk.numerics.data import Batches
from trainer_sdk.numerics.rollback import RestartNeededError, Rollback, record
from trainer_sdk.numerics.skips import ActRecord, Skips
from trainer_sdk.testing import Watch, watched
from trainer_sdk.wire import Requested

STEPS = (2, 4, 6)


class Unwatched:
    """The session, without an agent."""

    is_watched = False

    def __getattr__(self, name: str) -> Any:
        return getattr(session(), name)


UNWATCHED: Any = Unwatched()


@pytest.fixture(autouse=True)
def watch() -> Iterator[Watch]:
    with watched() as seen:
        yield seen


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """It has checkpoints of three steps, saved in the first round."""
    monkeypatch.setenv(layout.ROUND_VARIABLE, "1")
    with opened(tmp_path / "root") as saves:
        for step in STEPS:
            saves.save(step, state_of(step), wait=True)
    return tmp_path / "root"


def opened(root: Path) -> Checkpointer:
    return Checkpointer(root, job="j", timeouts=UNHURRIED)


def state_of(step: int = 0) -> dict[str, Any]:
    return {"a": torch.full((3,), float(step))}


def restored(root: Path) -> int:
    state = state_of()
    with opened(root) as saves:
        there = saves.restore(state)
    assert there is not None
    assert state["a"].tolist() == [float(there.step)] * 3
    return there.step


def quarantined(root: Path) -> dict[int, str]:
    """The cause of each quarantine, by step."""
    stored = stored_checkpoints(storage_for(str(root)))
    return {at.step: at.quarantined.cause for at in stored if at.quarantined is not None}


def act(action: str, before_step: int | None = 5) -> ActRecord:
    return record("c", action, 7, "it is nan", before_step=before_step)


def requests(watch: Watch) -> list[tuple[str, str]]:
    return [(line.kind, line.reason) for line in watch.messages if isinstance(line, Requested)]


def test_a_step_before_all_checkpoints_is_refused_and_nothing_changes(root: Path) -> None:
    with opened(root) as saves:
        state = state_of(7)
        rollback = Rollback(state, session(), checkpointer=saves)
        batches: Batches[int] = Batches([1], {})
        went = rollback.back_to(2, batches, case="c", step=7, reason="it is nan")
        assert (went.to_step, went.refusal) == (None, "there is no checkpoint of a step before 2")
        assert (state["a"].tolist(), rollback.skips.acts) == ([7.0] * 3, ())
    assert quarantined(root) == {}
    assert not (root / NUMERICS).exists()


def test_a_step_saved_again_after_going_back_is_a_new_checkpoint(root: Path) -> None:
    """Both have the same round and step."""
    with opened(root) as saves:
        state = state_of()
        saves.restore(state)
        rollback = Rollback(state, session(), checkpointer=saves)
        batches: Batches[int] = Batches([1], {})
        went = rollback.back_to(3, batches, case="c", step=7, reason="it is nan")
        assert (went.to_step, session().steps_made) == (2, 2)
        assert state["a"].tolist() == [2.0] * 3
        assert quarantined(root) == {4: "numerics", 6: "numerics"}
        assert saves.save(4, state_of(4), wait=True).durable
    assert quarantined(root) == {6: "numerics"}
    assert restored(root) == 4
    [before] = (root / ".replaced").glob("step-000000004-*")
    assert (before / "quarantined.json").exists()


def test_without_a_root_the_record_lasts_as_long_as_the_images() -> None:
    def opened_in_memory() -> Checkpointer:
        return Checkpointer(memory_every=1, job=job, timeouts=UNHURRIED)

    job, state = f"rolled-{uuid.uuid4().hex}", state_of(2)
    batches: Batches[int] = Batches([1], {})
    saves = opened_in_memory()
    saves.save(2, state, wait=True)
    rollback = Rollback(state, session(), checkpointer=saves)
    went = rollback.back_to(3, batches, case="c", step=3, reason="it is nan", samples=(20, 30))
    assert went.to_step == 2
    saves._close(abort=False, is_failing=True)
    with opened_in_memory() as saves:
        assert saves.acts().spans == ((20, 30),)
    with opened_in_memory() as saves:
        assert saves.acts().spans == ()


@pytest.mark.parametrize("action", ["exclude", "stop"])
def test_until_the_ranks_have_left_they_save_what_the_next_restore_quarantines(
    root: Path, watch: Watch, action: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = state_of(6)
    with opened(root) as saves:
        rollback = Rollback(state, session(), checkpointer=saves)
        if action == "exclude":
            monkeypatch.setattr("trainer_sdk.numerics.rollback._ENDED_WITHIN_S", 0.0)
            with pytest.raises(RestartNeededError):
                rollback.exclude(act(action), [3, 4], lambda: None)
            assert requests(watch) == []  # this is rank 0
            again = record("d", action, 7, "it is nan", before_step=5)
            with pytest.raises(RestartNeededError):
                rollback.exclude(again, [0], lambda: None)
            assert requests(watch) == [("exclude", "it is nan")]
            saves.save(8, state_of(8), wait=True)
        else:
            with pytest.raises(SystemExit) as ended:
                rollback.stop(act(action))
            assert ended.value.code == 17
    assert quarantined(root) == {}
    monkeypatch.setenv(layout.ROUND_VARIABLE, "2")
    assert restored(root) == 4
    suspect = {6, 8} if action == "exclude" else {6}
    assert quarantined(root) == dict.fromkeys(suspect, "numerics")


def test_without_an_agent_nobody_can_leave_and_the_training_goes_on(root: Path) -> None:
    with opened(root) as saves:
        rollback = Rollback(state_of(), UNWATCHED, checkpointer=saves)
        assert rollback.exclude(act("exclude"), [0], lambda: None) == ""


def test_a_move_saves_the_step_before_and_nothing_is_quarantined(root: Path) -> None:
    with opened(root) as saves, pytest.raises(SystemExit) as ended:
        Rollback(state_of(7), session(), checkpointer=saves).move(act("move"), 7)
    assert ended.value.code == 16
    assert (restored(root), quarantined(root)) == (7, {})
    assert "cannot be saved" in Rollback(state_of(), session(), root=str(root)).move(act("move"), 7)


def test_without_a_checkpointer_and_an_agent_the_script_ends_with_the_reason(root: Path) -> None:
    rollback = Rollback(state_of(), UNWATCHED, root=str(root))
    batches: Batches[int] = Batches([1], {})
    with pytest.raises(RestartNeededError, match="from an older checkpoint: it is nan"):
        rollback.back_to(3, batches, case="c", step=7, reason="it is nan", samples=(20, 70))
    assert quarantined(root) == {4: "numerics", 6: "numerics"}
    assert (restored(root), session().steps_made) == (2, 2)
    assert Rollback(state_of(), UNWATCHED, root=str(root)).skips.spans == ((20, 70),)


def test_a_roll_back_that_was_killed_before_the_quarantine_is_finished(root: Path) -> None:
    """A script that has restored a suspect by its own means must restore again."""
    storage = storage_for(str(root))
    killed = msgspec.structs.replace(act("rollback", 3), course=(1, 0))
    assert Skips(storage, RankGroup(None)).add(killed) == ""
    session().start_at(6)
    with pytest.raises(RestartNeededError):
        Rollback(state_of(), UNWATCHED, root=str(root))
    assert quarantined(root) == {4: "numerics", 6: "numerics"}
    session().start_at(2)
    assert Rollback(state_of(), UNWATCHED, root=str(root)).skips.unfinished == ()


def test_a_damaged_record_stops_the_restore_with_one_line(root: Path) -> None:
    (root / NUMERICS).write_text('{"acts":[]')
    with (
        opened(root) as saves,
        pytest.raises(RestoreError, match=f"{root}/{NUMERICS} is not what was written"),
    ):
        saves.restore(state_of())


def test_a_way_back_ends_before_a_step_that_was_only_observed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first result of step 4 is not a number, and neither is any of step 5."""
    run, faults, decided = session(), [float("nan")], []
    sampler = PositionedSampler(64, batch_size=4)
    loader: Any = DataLoader(torch.arange(64), batch_sampler=sampler)  # type: ignore[arg-type]
    state: dict[str, Any] = {"model": torch.nn.Linear(1, 1), "data": sampler}

    def computed(_: torch.Tensor) -> float:
        step = run.steps_made + 1
        if step == 4 and faults:
            return faults.pop()
        return float("nan") if step == 5 else 1.0

    with opened(tmp_path) as saves:
        state["numerics"] = numerics = run.numerics(
            state,
            loader,
            mode="validate_results",
            checkpointer=saves,
            transient="observe",
            unexpected="rollback",
        )
        saves.restore(state)
        for batch in numerics:
            loss = numerics.compute(computed, batch)
            decided.append((run.steps_made + 1, numerics.accepts(loss=loss)))
            if decided[-1][1]:
                saves.save(run.step(), state, wait=True)
            if run.steps_made == 6:
                break
    steps = [step for step, _ in decided]
    assert steps == [1, 2, 3, 4, 5, 4, 5, 6]
    assert [step for step, is_accepted in decided if not is_accepted] == [5]
    lines = [line for line in capsys.readouterr().err.splitlines() if "numerics: " in line]
    beginnings = (
        "everstep: numerics: step 4 (nan), observed: ",
        "everstep: numerics: step 5 (nan), rollback done, back to step 3: ",
        "everstep: numerics: step 5 (nan), rollback refused: samples 12 to 20 were gone back over",
    )
    assert len(lines) == len(beginnings)
    assert all(map(str.startswith, lines, beginnings))
