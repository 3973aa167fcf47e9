"""Places that are links, are not files, or vanish while a training saves into them."""

import os
import re
import shutil
import stat
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.state_dict_saver import save

from everstep_services.cli.__main__ import main
from tests.checkpoint_helpers.saved_by import manifest_of, saving
from trainer_sdk import layout, testing
from trainer_sdk.checkpoint import Checkpointer, FileSaver, RestoreError
from trainer_sdk.checkpoint.storage import StorageError, storage_for
from trainer_sdk.checkpoint.storage.adoption import adopt
from trainer_sdk.checkpoint.storage.checkpoints import OWNER, look, verify
from trainer_sdk.checkpoint.writer.root_claim import (
    VanishedError,
    check_there,
    claim,
    place_of,
)

STATE = {"a": torch.arange(9)}


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    with testing.watched():
        yield


@pytest.fixture
def files() -> Iterator[FileSaver]:
    made = FileSaver("fatal")
    yield made
    made.close(abort=True)


def written(files: FileSaver, path: Path) -> None:
    files.schedule(STATE, path)
    files.maybe_finalize(blocking=True)
    assert torch.load(path)["a"].tolist() == list(range(9))


def test_a_file_is_written_through_links_as_torch_save_does(
    files: FileSaver, tmp_path: Path
) -> None:
    (tmp_path / "elsewhere").mkdir()
    target, link, outer = tmp_path / "elsewhere" / "x.pt", tmp_path / "latest.pt", tmp_path / "a.pt"
    link.symlink_to("elsewhere/x.pt")
    outer.symlink_to(link)
    written(files, outer)
    assert link.is_symlink()
    assert outer.is_symlink()
    assert target.is_file()
    written(files, link)
    assert [one.name for one in (tmp_path / "elsewhere").iterdir()] == ["x.pt"]


def test_a_file_keeps_the_mode_of_the_one_that_it_replaces(
    files: FileSaver, tmp_path: Path
) -> None:
    path = tmp_path / "private.pt"
    path.touch(0o600)
    written(files, path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_what_is_no_file_is_not_replaced(files: FileSaver, tmp_path: Path) -> None:
    fifo, loop = tmp_path / "fifo", tmp_path / "loop"
    os.mkfifo(fifo)
    loop.symlink_to(loop)
    for path, said in (
        (fifo, "is not a regular file"),
        (tmp_path, "is not a regular"),
        (loop, "leads to"),
    ):
        with pytest.raises(ValueError, match=said):
            files.schedule(STATE, path)
    assert stat.S_ISFIFO(fifo.stat().st_mode)
    assert loop.is_symlink()


def test_a_root_that_vanishes_is_not_made_anew_by_the_next_save(tmp_path: Path) -> None:
    root = tmp_path / "root"
    with saving(tmp_path) as rank:
        assert rank.save(1, STATE) is not None
        assert rank.finish() == [1]
        shutil.rmtree(root)
        assert rank.save(2, STATE) is not None
        assert rank.finish() == []
        assert "was there at the last save, and is gone: mount it again" in rank.told.warned[-1]
        assert not root.exists()
        root.mkdir(mode=0o750)
        assert rank.save(3, STATE) is not None
        assert rank.finish() == [3]
    assert manifest_of(tmp_path, 3).identity.step == 3
    assert (root / OWNER).is_file()
    assert stat.S_IMODE(root.stat().st_mode) == 0o750


def test_a_root_that_is_empty_after_a_commit_is_no_fresh_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank dies after its root was unmounted: the next round says so, and trains nothing."""
    monkeypatch.setenv(layout.IMAGES_VARIABLE, str(tmp_path / "images"))  # as an agent does
    root, live = tmp_path / "root", {"a": torch.zeros(9, dtype=torch.int64)}
    with Checkpointer(root) as saves:
        assert saves.restore(live) is None
        saves.save(3, STATE).wait()
    root.rename(tmp_path / "elsewhere")
    for makes_root in (False, True):
        if makes_root:
            root.mkdir()
        with (
            Checkpointer(root) as saves,
            pytest.raises(RestoreError, match="was it unmounted or emptied"),
        ):
            saves.restore(live)
        with Checkpointer(tmp_path / "other") as saves:
            assert saves.restore(live) is None
    with Checkpointer(root) as saves:
        assert saves.restore(live, allow_fresh_start=True) is None
    root.rmdir()
    (tmp_path / "elsewhere").rename(root)
    with Checkpointer(root) as saves:
        found = saves.restore(live)
    assert found is not None
    assert found.step == 3


def test_a_root_on_another_device_is_the_same_root_only_with_its_checkpoints(
    tmp_path: Path,
) -> None:
    """Mounted again it may have another number; the empty folder below it has nothing."""
    storage = storage_for(str(tmp_path))
    claim(storage, "own")
    (tmp_path / "step-000000003").mkdir()
    there = place_of(storage)
    assert there is not None
    check_there(storage, there, "own")
    check_there(storage, None, "own")
    elsewhere = replace(there, device=there.device + 1)
    check_there(storage, elsewhere, "own")
    with pytest.raises(VanishedError, match="is on another device"):
        check_there(storage, elsewhere, "another")
    (tmp_path / "step-000000003").rmdir()
    with pytest.raises(VanishedError, match="lacks the checkpoints that were there"):
        check_there(storage, elsewhere, "own")


def plain(path: Path, state: dict[str, Any]) -> None:
    """As torch writes it without Everstep."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is alone, torch says each time
        save(state, checkpoint_id=path, no_dist=True)


@pytest.mark.parametrize("name", ["", "ckpt-500"])
def test_plain_checkpoints_of_torch_are_named_and_can_be_taken_over(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "root"
    plain(root / name, STATE | {"lr": np.float64(0.5)})
    live: dict[str, Any] = {"a": torch.zeros(9, dtype=torch.int64), "lr": None}
    with Checkpointer(root) as saves:
        assert saves.restore(live) is None
    said = capsys.readouterr().err
    step = "500" if name else "N"
    assert f"everstep ckpt adopt {root / name} {root} --step {step} takes it" in said
    assert said.count("torch.distributed.checkpoint without a manifest") == 1

    assert main(["ckpt", "adopt", str(root / name), str(root), "--step", "500"]) == 0
    assert "step-000000500" in capsys.readouterr().out
    with Checkpointer(root) as saves:
        found = saves.restore(live)
    assert found is not None
    assert found.step == 500
    assert live["a"].tolist() == list(range(9))
    assert live["lr"] == 0.5
    storage = storage_for(str(root))
    there = look(storage, 500)
    assert there is not None
    assert verify(storage, there).is_good


def test_what_is_no_checkpoint_of_torchs_is_not_taken_over(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(StorageError, match=r"is not a checkpoint of torch.distributed.checkpoint"):
        adopt(str(tmp_path / "empty"), str(tmp_path / "root"), 1, "local")
    plain(tmp_path / "bad", {"a": torch.ones(1), "level": stat.filemode})
    with pytest.raises(StorageError, match=r"level of .* cannot be restored"):
        adopt(str(tmp_path / "bad"), str(tmp_path / "root"), 1, "local")
    plain(tmp_path / "good", {"a": torch.ones(1)})
    adopt(str(tmp_path / "good"), str(tmp_path / "root"), 1, "local")
    with pytest.raises(StorageError, match=r"is there already: give another --step"):
        adopt(str(tmp_path / "good"), str(tmp_path / "root"), 1, "local")
    with pytest.raises(StorageError, match=r"has checkpoints of local"):
        adopt(str(tmp_path / "good"), str(tmp_path / "root"), 2, "other")


def cut(data: Path) -> None:
    os.truncate(data, data.stat().st_size - 50)


def zeroed(data: Path) -> None:
    """As a file is whose last blocks were not written before the power failed."""
    size = data.stat().st_size
    os.truncate(data, size - 50)
    os.truncate(data, size)


def linked(data: Path) -> None:
    data.rename(data.with_suffix(".elsewhere"))
    data.symlink_to(data.with_suffix(".elsewhere"))


def fifo(data: Path) -> None:
    data.unlink()
    os.mkfifo(data)


@pytest.mark.parametrize(
    ("damage", "name", "reason"),
    [
        (cut, "__0_0.distcp", r" has \d+ bytes, and . in it ends at \d+ by .metadata"),
        (zeroed, "__0_0.distcp", r" was written incompletely: the begin or end of "),
        (linked, "__0_0.distcp", r" .*it is a link to .*elsewhere"),
        (linked, ".metadata", r" .*it is a link to .*elsewhere"),
        (fifo, "__0_0.distcp", r" .*it is a FIFO, not a regular file"),
        (Path.unlink, "__1_0.distcp", r" is missing"),
    ],
)
def test_a_plain_checkpoint_that_is_not_whole_is_not_taken_over(
    tmp_path: Path, damage: Callable[[Path], None], name: str, reason: str
) -> None:
    source, root = tmp_path / "plain", tmp_path / "root"
    plain(source, {"a": torch.ones(9), "b": torch.ones(1)})
    metadata = (source / ".metadata").read_bytes()
    if name == "__1_0.distcp":
        (source / ".metadata").write_bytes(metadata.replace(b"__0_0.distcp", name.encode()))
        shutil.copy(source / "__0_0.distcp", source / name)
    damage(source / name)
    with pytest.raises(StorageError, match=re.escape(str(source / name)) + reason):
        adopt(str(source), str(root), 1, "local")
    assert not root.exists()


@pytest.mark.parametrize("damage", [cut, zeroed])
def test_what_was_taken_over_before_that_was_checked_is_found_by_verify(
    tmp_path: Path, damage: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its hashes are those of the damaged files."""
    source, root = tmp_path / "plain", tmp_path / "root"
    plain(source, {"a": torch.ones(9), "b": torch.ones(1)})
    damage(source / "__0_0.distcp")
    monkeypatch.setattr("trainer_sdk.checkpoint.storage.adoption.content_flaw", lambda *_, **__: "")
    adopt(str(source), str(root), 1, "local")
    storage = storage_for(str(root))
    there = look(storage, 1)
    assert there is not None
    flaw = verify(storage, there).flaw
    assert flaw.startswith(f"{root}/step-000000001/__0_0.distcp "), flaw
    assert "not whole" in flaw or "written incompletely" in flaw
