"""Seals of checkpoints that frameworks write: what is chosen for a resume, and what is refused."""

import os
from pathlib import Path

import pytest

from trainer_sdk.integrations import seals
from trainer_sdk.integrations.sealer import Sealer


def checkpoint(folder: Path, step: int, *, is_sealed: bool = True) -> Path:
    place = folder / f"checkpoint-{step}"
    (place / "inner").mkdir(parents=True)
    (place / "model.bin").write_bytes(bytes(100))
    (place / "inner" / "optimizer.bin").write_bytes(b"state" * step)
    if is_sealed:
        seals.seal(place, step)
    return place


def test_the_newest_by_number_is_chosen_and_not_by_name(tmp_path: Path) -> None:
    for step in (5, 10, 9):
        checkpoint(tmp_path, step)
    assert seals.newest_verified(tmp_path) == str(tmp_path / "checkpoint-10")


def test_a_flipped_bit_and_a_missing_file_are_damage_and_an_older_one_is_chosen(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A damaged checkpoint is never resumed from (A8.8)."""
    checkpoint(tmp_path, 5)
    (checkpoint(tmp_path, 10) / "model.bin").write_bytes(bytes(99) + b"\x01")
    (checkpoint(tmp_path, 15) / "inner" / "optimizer.bin").unlink()
    assert seals.newest_verified(tmp_path) == str(tmp_path / "checkpoint-5")
    printed = capfd.readouterr().err
    assert "checkpoint-10/model.bin differs from what was saved" in printed
    assert "optimizer.bin cannot be read" in printed


def test_a_newer_one_without_a_seal_may_be_torn_and_is_not_chosen(tmp_path: Path) -> None:
    checkpoint(tmp_path, 5)
    checkpoint(tmp_path, 10, is_sealed=False)
    assert seals.newest_verified(tmp_path) == str(tmp_path / "checkpoint-5")


def test_without_any_seal_the_newest_is_chosen_and_a_line_says_so(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for step in (5, 10):
        checkpoint(tmp_path, step, is_sealed=False)
    assert seals.newest_verified(tmp_path) == str(tmp_path / "checkpoint-10")
    assert "is not verified" in capfd.readouterr().err


def test_where_all_are_damaged_it_raises_instead_of_a_fresh_start(tmp_path: Path) -> None:
    (checkpoint(tmp_path, 5) / "model.bin").write_bytes(b"")
    checkpoint(tmp_path, 10, is_sealed=False)
    with pytest.raises(FileNotFoundError, match="no checkpoint in .* can be used"):
        seals.newest_verified(tmp_path)


def test_an_empty_or_absent_folder_has_none(tmp_path: Path) -> None:
    assert seals.newest_verified(tmp_path) is None
    assert seals.newest_verified(tmp_path / "absent") is None


def test_single_files_are_ordered_by_the_steps_of_their_seals(tmp_path: Path) -> None:
    for name, step in (("last.ckpt", 12), ("epoch=0-step=10.ckpt", 10)):
        (tmp_path / name).write_bytes(name.encode())
        seals.seal(tmp_path / name, step)
    newest = seals.newest_verified(tmp_path, "", ".ckpt")
    assert newest == str(tmp_path / "last.ckpt")
    seals.unseal(newest)
    assert seals.newest_verified(tmp_path, "", ".ckpt") == str(tmp_path / "epoch=0-step=10.ckpt")


def test_a_seal_that_is_cut_short_counts_as_none(tmp_path: Path) -> None:
    place = checkpoint(tmp_path, 5)
    (place / seals.SEAL).write_bytes(b'{"step": 5, "fi')
    assert seals.check(place).state == "unsealed"


def test_a_sealer_seals_only_what_all_ranks_have_written(tmp_path: Path) -> None:
    sealer, place = Sealer(), checkpoint(tmp_path, 5, is_sealed=False)
    gone = tmp_path / "checkpoint-1"
    sealer.saved(os.fspath(gone), 1)
    sealer.saved(os.fspath(place), 5)
    sealer.close()
    assert seals.check(place).state == "unsealed"
    sealer.all_saved()
    sealer.close()
    assert seals.check(place).state == "good"


def test_a_quarantined_checkpoint_is_whole_and_not_chosen(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for step in (5, 10, 15):
        checkpoint(tmp_path, step)
    seals.quarantine(tmp_path, "checkpoint-", "", from_step=10, reason="loss nan at step 12")
    assert seals.newest_verified(tmp_path) == str(tmp_path / "checkpoint-5")
    assert "checkpoint-10 is not used: loss nan at step 12" in capfd.readouterr().err
    assert seals.check(tmp_path / "checkpoint-15").state == "quarantined"
    seals.seal(tmp_path / "checkpoint-10", 10)  # the training has come to this step again
    assert seals.newest_verified(tmp_path) == str(tmp_path / "checkpoint-10")


def test_only_checkpoints_below_a_step_are_chosen(tmp_path: Path) -> None:
    for step in (5, 10):
        checkpoint(tmp_path, step)
    checkpoint(tmp_path, 4, is_sealed=False)
    assert seals.newest_verified(tmp_path, below=10) == str(tmp_path / "checkpoint-5")
    assert seals.has_good(tmp_path, "checkpoint-", "", below=6)
    assert not seals.has_good(tmp_path, "checkpoint-", "", below=5)
