"""A verified image is reopened without its hash only while nothing has changed."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.trainer_sdk.checkpoint.restored_states import state
from tests.unit.trainer_sdk.checkpoint.saved_states import Place
from tests.waiting import until
from trainer_sdk.checkpoint.manifest import IMAGE, INDEX, ImageIndex, decode
from trainer_sdk.checkpoint.restore.stored_image import StoredImage

HOUR_S = 3600.0
FILE_CLOCK = 5


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An image that was written some time ago."""
    return aged(Place(tmp_path).keep(10, 0, state(10)))


def aged(folder: Path) -> Path:
    """The same once the file's time of change is in the past."""
    changed_ns = (folder / IMAGE).stat().st_ctime_ns
    until(lambda: time.clock_gettime_ns(FILE_CLOCK) > changed_ns, "the next tick has come")
    return folder


def image_in(folder: Path) -> StoredImage:
    index = decode((folder / INDEX).read_bytes(), ImageIndex, "")
    return StoredImage(str(folder), index.identity)


def flip(path: Path) -> None:
    with path.open("r+b") as file:
        octet = file.read(1)[0]
        file.seek(0)
        file.write(bytes([octet ^ 1]))


def flip_and_hide(path: Path) -> None:
    """Change a byte, and set the time of the last write to what it was."""
    before = path.stat()
    flip(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def replace_file(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(path.read_bytes())
    other.rename(path)


def change_index(path: Path) -> None:
    index = path.with_name(INDEX)
    index.write_bytes(index.read_bytes() + b" ")


def remove_index(path: Path) -> None:
    path.with_name(INDEX).unlink()


def test_an_unchanged_image_is_reopened_with_its_bytes(folder: Path) -> None:
    first, second = image_in(folder), image_in(folder)
    first.verify()
    assert first.stamp is not None
    assert second.reopen(first.stamp)
    assert second.size_bytes == first.size_bytes
    second.check_unchanged()
    second.close()
    first.close()


@pytest.mark.parametrize("change", [flip, flip_and_hide, replace_file, change_index, remove_index])
def test_a_changed_image_is_not_reopened(folder: Path, change: Callable[[Path], None]) -> None:
    """A flipped bit is never loaded (A8.8)."""
    first = image_in(folder)
    second = image_in(folder)
    first.verify()
    first.close()
    assert first.stamp is not None
    change(folder / IMAGE)
    assert not second.reopen(first.stamp)


def test_an_image_that_has_just_changed_has_no_stamp(folder: Path) -> None:
    """The next change could have the same time."""
    soon = time.time() + HOUR_S
    os.utime(folder / IMAGE, (soon, soon))
    image = image_in(folder)
    image.verify()
    image.close()
    assert image.stamp is None
