"""A FIFO or a folder where a command expects a file: one line names it, and nothing waits."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from everstep_services.cli.__main__ import main

COMMANDS = [
    "serve --bundle {}",
    "jobs --config {}",
    "jobs --api http://127.0.0.1:1 --token-file {}",
    "logs analyze {}",
    "stacks analyze {}/rank_0.json",
    "stragglers analyze {}",
    "inject --scenario {}",
    "check network --peer 127.0.0.1:1 --secret-file {}",
    "run --check {}",
    "run --check --config {} script.py",
    "run --check --as-nvrx --ft-cfg-path {} script.py",
    "run --check --bus-url nats://127.0.0.1:1 --bus-user me --bus-password-file {} script.py",
    "run --check --bus-url nats://127.0.0.1:1 --bus-credentials-file {} script.py",
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EVERSTEP_STATE_DIR", str(tmp_path / "state"))
    (tmp_path / "script.py").touch()
    return tmp_path


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir], ids=["FIFO", "folder"])
@pytest.mark.parametrize("words", COMMANDS)
def test_what_a_command_names_is_a_regular_file(
    folder: Path, capsys: pytest.CaptureFixture[str], make: Callable[[Path], object], words: str
) -> None:
    place = folder / "strange"
    if "/rank_0" in words:
        place.mkdir()
    make(place / "rank_0.json" if "/rank_0" in words else place)
    assert main(words.format(place).split()) in {2, 3}
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert str(place) in lines[0]


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir], ids=["FIFO", "folder"])
@pytest.mark.parametrize("words", ["status", "down", "up --port 0", "up --detach --port 0"])
@pytest.mark.usefixtures("logging_as_before")
def test_the_lock_of_a_state_directory_is_a_regular_file(
    folder: Path, capsys: pytest.CaptureFixture[str], make: Callable[[Path], object], words: str
) -> None:
    lock = folder / "state" / "up.lock"
    lock.parent.mkdir(0o700)
    make(lock)
    assert main(words.split()) == 1
    assert f"{lock} cannot be " in capsys.readouterr().err
