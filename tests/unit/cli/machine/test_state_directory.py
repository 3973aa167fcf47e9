"""The state directory: one holder at a time, and only that one is ever stopped."""

import fcntl
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from everstep_services.cli.errors import CliError, Exit
from everstep_services.cli.machine.state import (
    RunningServices,
    StateDir,
    StateHolder,
    find_state_dir,
    terminate,
)

HOLD = """
import signal, sys
from pathlib import Path
from everstep_services.cli.machine.state import StateDir
if {stubborn}:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
with StateDir(Path({path!r})).held():
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def state(tmp_path: Path) -> StateDir:
    made = StateDir(tmp_path / "a" / "state")
    made.create()
    return made


@contextmanager
def held_by_another(
    state: StateDir, *, stubborn: bool = False
) -> Generator["subprocess.Popen[str]", None, None]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD.format(path=str(state.path), stubborn=stubborn)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def running(pid: int) -> RunningServices:
    return RunningServices(
        pid=pid,
        version="1",
        api="http://h",
        observe="http://h",
        token_file="t",
        bus="nats://h",
        bus_version="2",
        bus_pid=1,
        services=[],
    )


def test_where_it_is(tmp_path: Path) -> None:
    home = {"HOME": "/home/u"}
    assert find_state_dir(home, None).path == Path("/home/u/.local/state/everstep")
    xdg = {**home, "XDG_STATE_HOME": "/x"}
    assert find_state_dir(xdg, None).path == Path("/x/everstep")
    named = {**xdg, "EVERSTEP_STATE_DIR": "/y"}
    assert find_state_dir(named, None).path == Path("/y")
    assert find_state_dir(named, Path("z")).path == Path.cwd() / "z"


def test_it_is_for_this_user_only(state: StateDir) -> None:
    """The state directory has mode 0700 (A13.4)."""
    assert stat.S_IMODE(state.path.stat().st_mode) == 0o700
    state.path.chmod(0o755)
    state.create()
    assert stat.S_IMODE(state.path.stat().st_mode) == 0o700


def test_a_place_that_cannot_be_one_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CliError) as caught:
        StateDir(tmp_path / "file" / "x").create()
    assert str(caught.value) == (
        f"the state directory {tmp_path}/file/x cannot be made: Not a directory; "
        f"choose another with --state-dir"
    )


def test_one_holder_at_a_time(state: StateDir) -> None:
    assert state.holder() is None
    with held_by_another(state) as process:
        holder = state.holder()
        assert holder is not None
        assert holder.pid == process.pid
        with pytest.raises(CliError) as caught, state.held():
            pass
        assert str(caught.value) == (
            f"everstep up already runs on {state.path} (pid {process.pid}): stop it with "
            f"`everstep down`, or use another --state-dir"
        )
    assert state.holder() is None
    with state.held():
        assert state.holder() is not None


def test_what_a_dead_one_announced_does_not_count(state: StateDir) -> None:
    state.announce(running(os.getpid()))
    assert state.running() is None
    with held_by_another(state):
        state.announce(running(os.getpid()))
        assert state.running() is None
    with state.held():
        assert state.running() is None
        state.announce(running(os.getpid()))
        assert state.running() == running(os.getpid())


def test_what_is_being_started_is_waited_for(
    state: StateDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert state.running_at_last() is None, "nobody starts: there is nothing to wait for"
    with held_by_another(state) as process:
        announced = running(process.pid)
        monkeypatch.setattr(time, "sleep", lambda _: state.announce(announced))
        assert state.running_at_last() == announced


def test_who_dies_while_it_starts_is_waited_for_no_longer(
    state: StateDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    with held_by_another(state) as process:

        def die(_: float) -> None:
            process.kill()
            process.wait()

        monkeypatch.setattr(time, "sleep", die)
        assert state.running_at_last(600.0) is None


@contextmanager
def taken(state: StateDir, text: str) -> Generator[int, None, None]:
    """The lock, whose holder has not written its name yet; `text` is still there."""
    path = state.path / "up.lock"
    path.write_text(text)
    descriptor = os.open(path, os.O_RDWR)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("before", ["", '{"pid":1,"started":"another boot/1"}'])
def test_who_has_only_just_taken_it_is_asked_for_its_name(
    state: StateDir, monkeypatch: pytest.MonkeyPatch, before: str
) -> None:
    with state.held():
        me = state.holder()
    assert me is not None
    with taken(state, before) as descriptor:
        raw = msgspec.json.encode(me)
        monkeypatch.setattr(time, "sleep", lambda _: os.pwrite(descriptor, raw, 0))
        assert state.holder() == me


def test_who_dies_before_it_has_written_its_name_held_nothing(
    state: StateDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    with taken(state, "") as descriptor:
        monkeypatch.setattr(time, "sleep", lambda _: fcntl.flock(descriptor, fcntl.LOCK_UN))
        assert state.holder() is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": 1}', "\x00"])
def test_damaged_files_are_like_none(state: StateDir, text: str) -> None:
    (state.path / "up.json").write_text(text)
    assert state.running() is None
    (state.path / "up.lock").write_text(text)
    assert state.holder() is None


def test_terminate_waits_for_the_end(state: StateDir) -> None:
    with held_by_another(state) as process:
        holder = state.holder()
        assert holder is not None
        terminate(holder, 30)
        assert process.wait(30) == -signal.SIGTERM
        terminate(holder, 30)  # gone already


def test_terminate_gives_up_at_its_bound_and_says_how_to_go_on(state: StateDir) -> None:
    with held_by_another(state, stubborn=True) as process:
        holder = state.holder()
        assert holder is not None
        with pytest.raises(CliError) as caught:
            terminate(holder, 0.01)
        assert caught.value.code is Exit.TIMED_OUT
        assert f"kill -9 {process.pid}" in str(caught.value)
        assert process.poll() is None


def test_a_foreign_process_with_the_same_pid_is_not_touched(state: StateDir) -> None:
    with held_by_another(state) as process:
        holder = state.holder()
        assert holder is not None
        for started in ("", "0", holder.started + "1"):
            with pytest.raises(CliError, match="is not the `everstep up` that holds"):
                terminate(StateHolder(process.pid, started), 1)
        assert process.poll() is None


def test_the_holder_is_written_as_json(state: StateDir) -> None:
    with state.held():
        raw = msgspec.json.decode((state.path / "up.lock").read_bytes())
    assert raw["pid"] == os.getpid()


def test_the_word_of_a_stranger_is_not_taken(
    state: StateDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """His file would name a process to end, and any file as the token to send him."""
    with held_by_another(state):
        assert state.holder() is not None
        if (uid := os.geteuid()) == 0:
            os.chown(state.path, 54321, -1)
        else:
            monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
        for ask in (state.holder, state.running):
            with pytest.raises(CliError, match=r"not trusted: .* belongs to user \d+") as caught:
                ask()
            assert caught.value.code is Exit.FORBIDDEN
