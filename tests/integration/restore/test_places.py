"""Where a training finds what it has saved, and what it knows of itself in its next launch."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint_helpers.saved_by import manifest_of
from tests.waiting import until
from trainer_sdk import layout, testing
from trainer_sdk.checkpoint import Checkpointer, FileSaver, Latest, RestoreError, SaveError
from trainer_sdk.checkpoint.manifest import step_name
from trainer_sdk.checkpoint.storage import StorageError

pytestmark = pytest.mark.usefixtures("alone")


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Nobody has launched this; the folder is the test's own."""
    monkeypatch.chdir(tmp_path)
    with testing.watched():
        yield


def state(value: float) -> dict[str, Any]:
    return {"weights": torch.full((7,), value)}


def launch(monkeypatch: pytest.MonkeyPatch, restarts: int) -> None:
    """As torchrun would, for the so-manieth time."""
    said = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1, "GROUP_RANK": 0}
    for name, value in (said | {"TORCHELASTIC_RESTART_COUNT": restarts}).items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "places")


def test_two_trainings_of_one_folder_have_states_of_their_own(tmp_path: Path) -> None:
    first = Checkpointer(tmp_path / "a", keep_memory=True)
    first.save(5, state(5), to_root=False)
    first.maybe_finalize(blocking=True)
    first._ending.leave(True)

    with Checkpointer(tmp_path / "b", keep_memory=True) as other:
        weights = state(-1)
        assert other.restore(weights) is None
        assert weights["weights"].tolist() == [-1] * 7
    with Checkpointer(tmp_path / "a", keep_memory=True) as again:
        found = again.restore(weights)
        assert found is not None
        assert (found.step, found.tier) == (5, "memory")


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (5.0, "memory has an image of step 5 already, which has the same content"),
        (6.0, "memory has an image of step 5 already, which stays: later changes are not in it"),
    ],
)
@pytest.mark.parametrize("is_new", [True, False])
def test_a_second_save_of_a_step_tells_that_the_first_stays(
    tmp_path: Path, value: float, reason: str, is_new: bool
) -> None:
    saves = Checkpointer(tmp_path / "a", keep_memory=True)
    assert saves.save(5, state(5.0), to_root=False, wait=True).reason == ""
    if is_new:
        saves._ending.leave(True)
        saves = Checkpointer(tmp_path / "a", keep_memory=True)
    again = saves.save(5, state(value), to_root=False, wait=True)
    assert (again.state, again.reason) == ("committed", reason)
    assert saves.save(6, state(7.0), to_root=False, wait=True).reason == ""
    saves._ending.leave(True)
    with Checkpointer(tmp_path / "a", keep_memory=True) as restoring:
        weights = state(-1.0)
        restored = restoring.restore(weights)
        assert restored is not None
        assert (restored.step, weights["weights"].tolist()) == (6, [7.0] * 7)


def test_the_same_place_has_the_same_states_from_every_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Checkpointer("a", keep_memory=True)
    first.save(5, state(5), to_root=False)
    first.maybe_finalize(blocking=True)
    first._ending.leave(True)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    with Checkpointer(tmp_path / "a/", keep_memory=True) as again:
        found = again.restore(state(-1))
        assert found is not None
        assert found.tier == "memory"


def test_who_goes_elsewhere_saves_in_the_same_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Hydra does: a writer that comes later begins in another folder."""
    with Checkpointer("a", every=1000) as saves:
        queue = saves._queue
        writer = until(lambda: queue.writer_pid, "a writer")
        monkeypatch.chdir(tmp_path.parent)
        os.kill(writer, signal.SIGKILL)
        until(lambda: queue.writer_pid is None, "its end")
        saves.save(1, state(1))
    assert [one.name for one in (tmp_path / "a").glob("step-*")] == [step_name(1)]


def test_a_place_that_is_no_text_is_refused(tmp_path: Path) -> None:
    """Neither the writer nor an agent could hear of it."""
    with pytest.raises(StorageError, match=r"\\udcff' is not valid UTF-8"):
        Checkpointer(tmp_path / "\udcff")


def test_the_memory_of_one_process_is_no_place_for_checkpoints(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="Give a folder or the URL of a store") as refused:
        Checkpointer("memory://here")
    assert "\n" not in str(refused.value)
    files = FileSaver(on_error="fatal")
    files.schedule({"a": 1}, "memory://here/model.pt")
    with pytest.raises(SaveError, match="in the memory of one process"):
        files.close()


def test_a_job_remembers_how_often_it_has_failed_in_all_its_launches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second launch counts its restarts from 0 again."""
    counts = []
    for step, restarts in ((1, 0), (2, 2), (3, 3), (4, 0), (5, 1)):
        launch(monkeypatch, restarts)
        with Checkpointer(tmp_path / "root") as saves:
            saves.restore(state(-1))
            saves.step(step, state(step))
            assert saves._schedule is not None
            counts.append(saves._schedule._estimate._failures)
            saves.save(step, state(step))
        assert manifest_of(tmp_path, step).user["failures"] == str(counts[-1])
    assert counts == [0, 2, 3, 3, 4]


def test_what_a_training_ends_with_is_saved_once(tmp_path: Path) -> None:
    """A training that resumes with nothing left to do has no failure (A3.5)."""
    with Checkpointer(tmp_path / "root", every=4, job="ends") as saves:
        for step in range(1, 7):
            saves.step(step, state(step))
            saves.maybe_finalize(blocking=True)
        last = saves.save_last(6, state(6))
        assert saves.save_last(6, state(6)) is last
    assert manifest_of(tmp_path, 6).occasion == "end"
    with Checkpointer(tmp_path / "root", every=4, job="ends") as saves:
        weights = state(-1)
        found = saves.restore(weights)
        assert found is not None
        assert (found.step, weights["weights"].tolist()) == (6, [6] * 7)
        assert saves.save_last(6, weights).state == "skipped", "there was nothing left to do"
        due = saves.step(8, state(8))
        assert saves.save_last(8, state(8)) is due, "it was due, and saved so"
    assert manifest_of(tmp_path, 8).occasion == "interval"


def test_an_operator_may_allow_a_fresh_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without that, a broken checkpoint stops the training (A8.7)."""
    with Checkpointer(tmp_path / "root", job="fresh") as saves:
        saves.save(3, state(3))
    (tmp_path / "root" / step_name(3) / "__0_0.distcp").unlink()
    with Checkpointer(tmp_path / "root", job="fresh") as saves:
        with pytest.raises(RestoreError, match="everstep run --allow-fresh-start"):
            saves.restore(state(-1))
        monkeypatch.setenv(layout.FRESH_VARIABLE, "1")
        assert saves.restore(state(-1)) is None


def test_what_would_be_restored_is_known_without_loading_it(tmp_path: Path) -> None:
    """Step and tier; also where the state itself cannot be read any more (E5)."""
    job = f"latest-{os.getpid()}"
    first = Checkpointer(tmp_path / "root", keep_memory=True, job=job)
    assert first.latest() is None
    for step in (3, 4):
        assert first.save(step, state(step), to_root=step == 3, wait=True).durable
    assert first.latest() == Latest(4, "memory")
    first._ending.leave(True)
    with Checkpointer(tmp_path / "root", keep_memory=True, job=job) as again:
        assert again.latest() == Latest(4, "memory")
        assert again.latest() == Latest(4, "memory"), "asking changes nothing"
        weights = state(-1)
        found = again.restore(weights)
        assert found is not None
        assert (found.step, found.tier) == (4, "memory")
    with Checkpointer(tmp_path / "root", job=job) as alone:
        (tmp_path / "root" / step_name(3) / "__0_0.distcp").unlink()
        assert alone.latest() == Latest(3, "global"), "only a restore reads it"
        with pytest.raises(RestoreError):
            alone.restore(state(-1))
