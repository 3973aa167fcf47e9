"""What faults of the corpus need of the machine: little memory, a small disk."""

import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.corpus.faults import Need
from tests.memory_groups import limited_group


@contextmanager
def surroundings(needs: Need | None) -> Iterator[Mapping[str, str]]:
    """What a fault needs besides a folder; skips the test where this machine has none for us."""
    match needs:
        case None:
            yield {}
        case "cgroup":
            with limited_group(600) as group:
                yield {"EVERSTEP_CORPUS_GROUP": str(group)}
        case "small_disk":
            with _small_disk() as disk:
                yield {"EVERSTEP_CORPUS_DISK": str(disk)}


@contextmanager
def _small_disk() -> Iterator[Path]:
    if os.getuid():
        pytest.skip("only root can mount a file system")
    with tempfile.TemporaryDirectory() as folder:
        words = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", folder]
        mounted = subprocess.run(words, capture_output=True, text=True, check=False)
        if mounted.returncode:
            pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
        try:
            yield Path(folder)
        finally:
            subprocess.run(["umount", folder], check=True)
