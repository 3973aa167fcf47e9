"""A loss that is not finite soon after a load quarantines the loaded state (A9.3)."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from tests.unit.trainer_sdk.checkpoint.saved_states import Place
from trainer_sdk.checkpoint.image_folder import (
    MARKED_INDEX,
    image_folders,
    marked_image,
    release_image,
)
from trainer_sdk.checkpoint.manifest import INDEX, step_name
from trainer_sdk.checkpoint.restore.errors import RestoreError
from trainer_sdk.checkpoint.restore.quarantine import (
    WITHIN_STEPS,
    BadLossError,
    LoadedState,
    LossWatch,
)
from trainer_sdk.checkpoint.save.buffers import Buffer
from trainer_sdk.checkpoint.storage import StorageError
from trainer_sdk.checkpoint.storage.checkpoints import QUARANTINED, CheckpointMark
from trainer_sdk.checkpoint.storage.folder import Folder


def state(value: float) -> dict[str, Any]:
    return {"weights": torch.full((3,), value)}


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def resume(place: Place) -> tuple[int, str, LossWatch]:
    """Restore as the next round does: the step, the tier, and the watch."""
    place.round += 1
    (found,) = place.restore({0: state(-1)})
    assert found is not None
    home = place.home(0)
    loaded = LoadedState(
        identity=found.choice.identity,
        tier=found.tier,
        round=home.round,
        images=home.images,
        storage=home.storage,
        failed_before=found.failed_at,
    )
    return found.step, found.tier, LossWatch(loaded, place.told, 0, WITHIN_STEPS)


def no_saves() -> None:
    """Is on its way."""


def fail_after(
    watch: LossWatch, steps: int, loss: float = math.nan, saves: Callable[[], object] = no_saves
) -> str:
    for _ in range(steps - 1):
        watch.see(1.0, no_saves)
    with pytest.raises(BadLossError) as failed:
        watch.see(loss, saves)
    return str(failed.value)


def quarantined(place: Place) -> list[tuple[int, str]]:
    return [
        (body["step"], body["tier"]) for event, body in place.told.events if event == "quarantine"
    ]


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf, torch.tensor(math.nan)])
def test_a_checkpoint_of_files_is_marked_and_the_next_restore_takes_an_older_one(
    place: Place, loss: Any
) -> None:
    place.publish(10, state(10))
    path = place.publish(20, state(20))
    step, _, watch = resume(place)
    assert step == 20
    said = fail_after(watch, 3, loss)
    assert "at step 23, 3 steps after loading step 20 from the global tier" in said
    mark = msgspec.json.decode((path / QUARANTINED).read_bytes(), type=CheckpointMark)
    assert (mark.failed_at, mark.by, mark.cause) == (23, "rank 0", "nan_after_load")
    assert quarantined(place) == [(20, "global")]
    assert resume(place)[0] == 10


def test_after_memory_comes_the_same_step_from_files_and_then_an_older_one(place: Place) -> None:
    place.publish(10, state(10))
    place.publish(20, state(20))
    folder = place.keep(20, 0, state(20))
    step, tier, watch = resume(place)
    assert (step, tier) == (20, "memory")
    fail_after(watch, 1)
    assert not (folder / INDEX).exists()
    assert (folder / MARKED_INDEX).exists()

    step, tier, watch = resume(place)
    assert (step, tier) == (20, "global")
    fail_after(watch, 2)
    assert resume(place)[:2] == (10, "global")
    assert quarantined(place) == [(20, "memory"), (20, "global")]


def test_an_image_that_is_released_is_restored_again(place: Place) -> None:
    place.publish(10, state(10))
    folder = place.keep(20, 0, state(20))
    fail_after(resume(place)[2], 1)
    assert resume(place)[:2] == (10, "global")
    (found,) = image_folders(place.home(0).images)
    assert found == ("memory", folder)
    marked = marked_image(folder)
    assert marked is not None
    assert release_image(folder, marked)
    assert marked_image(folder) is None
    assert resume(place)[:2] == (20, "memory")


def test_an_overwritten_image_is_not_released(place: Place) -> None:
    place.publish(10, state(10))
    folder = place.keep(20, 0, state(20))
    fail_after(resume(place)[2], 1)
    marked = marked_image(folder)
    assert marked is not None
    Buffer(str(folder)).forget()
    assert not release_image(folder, marked)
    assert not (folder / INDEX).exists()
    assert resume(place)[:2] == (10, "global")


def test_if_all_states_are_quarantined_the_restore_fails_with_the_reasons(place: Place) -> None:
    """All states are in quarantine, and the training does not begin from scratch (A8.7)."""
    place.publish(10, state(10))
    fail_after(resume(place)[2], 1)
    with pytest.raises(
        RestoreError, match=r"is quarantined: the loss is nan at step 11, 1 step after"
    ):
        resume(place)


def test_states_saved_after_the_load_are_quarantined_with_it(place: Place) -> None:
    place.publish(10, state(10))
    place.publish(20, state(20))
    _, _, watch = resume(place)
    place.keep(25, 0, state(25), round=place.round)
    place.publish(26, state(26), round=place.round)
    fail_after(watch, 7)
    assert set(quarantined(place)) == {(25, "memory"), (26, "global"), (20, "global")}
    assert resume(place)[0] == 10


def test_states_of_an_earlier_round_are_not_quarantined(place: Place) -> None:
    place.publish(10, state(10))
    place.publish(20, state(20))
    (place.root / step_name(20) / "__0_0.distcp").unlink()
    step, _, watch = resume(place)
    assert step == 10
    fail_after(watch, 1)
    causes = [(one["step"], one["cause"]) for kind, one in place.told.events if kind != "restored"]
    assert causes == [(20, "corrupt"), (10, "nan_after_load")]


def test_a_loss_that_fails_again_at_the_same_step_quarantines_nothing(place: Place) -> None:
    place.publish(10, state(10))
    place.publish(20, state(20))
    fail_after(resume(place)[2], 3)
    step, _, watch = resume(place)
    assert step == 10
    said = fail_after(watch, 13)
    assert "the loss is nan at step 23, as it was after another checkpoint" in said
    assert quarantined(place) == [(20, "global")]
    assert resume(place)[0] == 10


def test_a_bad_loss_long_after_the_load_is_ignored(place: Place) -> None:
    place.publish(10, state(10))
    _, _, watch = resume(place)
    for _ in range(WITHIN_STEPS):
        watch.see(torch.tensor(1.0), no_saves)
    watch.see(math.nan, no_saves)
    assert quarantined(place) == []


def test_a_checkpoint_is_marked_once(place: Place) -> None:
    place.publish(10, state(10))
    _, _, watch = resume(place)
    fail_after(watch, 1)
    watch.see(math.nan, no_saves)
    assert quarantined(place) == [(10, "global")]


def test_saves_in_progress_are_quarantined_once_they_are_visible(place: Place) -> None:
    place.publish(10, state(10))
    place.publish(20, state(20))
    _, _, watch = resume(place)

    def settled() -> None:
        assert quarantined(place) == [(20, "global")], "what can be seen is marked at once"
        place.publish(23, state(23), round=place.round)

    fail_after(watch, 5, saves=settled)
    assert quarantined(place) == [(20, "global"), (23, "global")]
    place.publish(24, state(24), round=place.round)  # it was later than any end may be
    watch.mark()
    assert quarantined(place)[2:] == [(24, "global")]
    assert resume(place)[0] == 10


def test_a_training_that_ignores_the_bad_loss_goes_on(place: Place) -> None:
    place.publish(10, state(10))
    _, _, watch = resume(place)
    fail_after(watch, 1)
    watch.see(1.0, no_saves)
    place.publish(12, state(12), round=place.round)
    watch.mark()
    assert quarantined(place) == [(10, "global")]


def test_an_unavailable_storage_does_not_hide_a_lost_image(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.publish(10, state(10))
    _, _, watch = resume(place)

    def folders(_: Folder) -> list[str]:
        raise StorageError("it is away")

    monkeypatch.setattr(Folder, "folders", folders)
    fail_after(watch, 1)
    assert "it is away" in place.told.warned[0]
