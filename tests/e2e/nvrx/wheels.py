"""Wheels that are unpacked for a test: of Megatron-Core, and of NVRx itself."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

WITHIN_S = 300
_OF_NVRX = (
    "--platform", "manylinux_2_39_x86_64", "--python-version", "3.12", "--only-binary=:all:",
)  # fmt: skip


def megatron_core(folder: Path) -> Path:
    """A folder with Megatron-Core 0.19; skips the test if the package index has none for us."""
    return _unpacked(folder, "megatron-core==0.19.2", "--ignore-requires-python")


def nvrx(folder: Path) -> Path:
    """A folder with NVRx 0.7, whose names can be read; it need not be importable here."""
    return _unpacked(folder, "nvidia-resiliency-ext==0.7.0", *_OF_NVRX)


def _unpacked(folder: Path, requirement: str, *options: str) -> Path:
    wheels, unpacked = folder / "wheels", folder / "unpacked"
    command = [sys.executable, "-m", "pip", "download", "-qq", "--no-deps", "--dest", str(wheels)]
    done = subprocess.run(
        [*command, *options, requirement], check=False, capture_output=True, text=True,
        timeout=WITHIN_S,
    )  # fmt: skip
    found = sorted(wheels.glob("*.whl"))
    if done.returncode or not found:
        reason = done.stderr.strip().splitlines()[-1:]
        pytest.skip(f"pip finds no {requirement} for this machine: {reason}")
    with zipfile.ZipFile(found[0]) as archive:
        archive.extractall(unpacked)
    return unpacked
