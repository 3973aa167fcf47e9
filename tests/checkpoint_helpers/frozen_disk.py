"""A file system that takes nothing more for a while: writers wait in the kernel."""

import os
import shutil
import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

_SIZE = 512 << 20


@dataclass(frozen=True)
class Disk:
    """An ext4 in a file."""

    path: Path

    def freeze(self) -> None:
        subprocess.run(["fsfreeze", "--freeze", self.path], check=True)

    def thaw(self) -> None:
        subprocess.run(["fsfreeze", "--unfreeze", self.path], check=False, capture_output=True)


@contextmanager
def freezable(folder: Path) -> Generator[Disk]:
    """A disk that can be frozen; it is thawed and gone in the end."""
    image, disk = folder / "disk.ext4", Disk(folder / "disk")
    disk.path.mkdir()
    with image.open("wb") as file:
        file.truncate(_SIZE)
    if os.geteuid() or not (shutil.which("mkfs.ext4") and shutil.which("fsfreeze")):
        pytest.skip("freezing a disk needs root, mkfs.ext4 and fsfreeze")
    subprocess.run(["mkfs.ext4", "-q", image], check=True)
    mount = ["mount", "-o", "loop", str(image), str(disk.path)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting needs a loop device")
    try:
        yield disk
    finally:
        disk.thaw()
        subprocess.run(["umount", "-l", str(disk.path)], check=True)
        image.unlink()
