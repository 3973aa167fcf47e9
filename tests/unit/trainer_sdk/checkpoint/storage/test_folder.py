"""A folder refuses at once what is not a regular file: a FIFO would be waited for, for ever."""

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from trainer_sdk.checkpoint.manifest import step_of
from trainer_sdk.checkpoint.storage.checkpoints import owner_of, stored_checkpoints
from trainer_sdk.checkpoint.storage.folder import Folder
from trainer_sdk.checkpoint.storage.port import StorageError


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as one:
        os.chdir(path.parent)  # the path of a socket is short
        one.bind(path.name)


STRANGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "FIFO": (os.mkfifo, "it is a FIFO, not a regular file"),
    "folder": (Path.mkdir, "it is a folder, not a regular file"),
    "device": (lambda at: at.symlink_to("/dev/zero"), "it is a device, not a regular file"),
    "socket": (_socket, "No such device or address"),
}


@pytest.mark.parametrize(("make", "said"), STRANGE.values(), ids=STRANGE.keys())
def test_what_is_not_a_regular_file_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], object], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "owner.json")
    with pytest.raises(StorageError, match=f"{tmp_path}/owner.json cannot be read: .*{said}.*; "):
        Folder(str(tmp_path)).read("owner.json")


def test_a_file_in_place_of_a_folder_is_named_and_not_the_file_wanted_in_it(tmp_path: Path) -> None:
    (tmp_path / "step-000000005").write_text("")
    with pytest.raises(
        StorageError, match=f"^{tmp_path}/step-000000005 cannot be read: Not a directory; "
    ):
        Folder(str(tmp_path)).read("step-000000005/pinned.json")


@pytest.mark.parametrize("number", ["²", "٣", "", "-1", "9" * 200, "9" * 16])
def test_a_folder_whose_name_is_no_step_is_left_alone(tmp_path: Path, number: str) -> None:
    """Anybody can make such a folder: it took the restores of all ranks, and the catalog."""
    (tmp_path / f"step-{number}").mkdir()
    assert step_of(f"step-{number}") is None
    assert stored_checkpoints(Folder(str(tmp_path))) == []


def test_a_file_that_would_fill_the_memory_is_not_read(tmp_path: Path) -> None:
    """It has a terabyte, and takes no space: one job would end the catalog of all jobs."""
    (tmp_path / "step-000000001").mkdir()
    for name in ("owner.json", "step-000000001/manifest.json"):
        (tmp_path / name).touch()
        os.truncate(tmp_path / name, 1 << 40)
    with pytest.raises(StorageError, match=r"owner.json has \d+ bytes, and at most"):
        owner_of(Folder(str(tmp_path)))
    [there] = stored_checkpoints(Folder(str(tmp_path)))
    assert "manifest.json has 1099511627776 bytes, and at most" in there.flaw
