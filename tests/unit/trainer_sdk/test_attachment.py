"""Ranks of another launcher make their pages themselves: real processes, without an agent."""

import asyncio
import fcntl
import os
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from everstep.errors import EverstepError
from everstep_services.agent.attached.job_folder import sole_agent
from everstep_services.agent.attached.rank_watch import PageFinder
from everstep_services.agent.ranks.process_tree import alone_in
from everstep_services.agent.ranks.setup import sweep
from everstep_services.agent.stalls.torch_server import ask
from tests.waiting import until
from trainer_sdk import attachment

# Not the first of its node: it starts no agent.
PLACE = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "EVERSTEP_JOB": "job"}
BEGIN = "import os, sys, trainer_sdk\nrun = trainer_sdk.session()\n"


class Launcher:
    """Starts one rank."""

    def __init__(self, runtime: Path) -> None:
        self.runtime = runtime
        self.environ = PLACE | {"XDG_RUNTIME_DIR": str(runtime), "PATH": "/usr/bin:/bin"}
        self.folder = Path(attachment.folder_for(self.environ, "job"))

    def start(self, *arguments: str, **environ: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [sys.executable, *arguments],
            env=self.environ | environ,
            cwd=Path(__file__).parents[3],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, script: str, **environ: str) -> tuple[str, str]:
        with self.start("-c", script, **environ) as process:
            out, err = process.communicate(timeout=50)
        assert process.returncode == 0, err
        return out.strip(), err

    def left(self) -> list[Path]:
        return list((self.runtime / "everstep").iterdir())


@pytest.fixture
def launcher(tmp_path: Path) -> Launcher:
    return Launcher(tmp_path)


@pytest.fixture
def watched(launcher: Launcher) -> None:
    """An agent was here before: a rank that ends need not start one."""
    launcher.folder.mkdir(mode=0o700, parents=True)
    (launcher.folder / attachment.LOG).touch()


@pytest.mark.usefixtures("watched")
def test_a_rank_is_found_and_read(launcher: Launcher) -> None:
    with launcher.start("-c", BEGIN + "run.step()\nsys.stdin.read()") as rank:
        finder = PageFinder(launcher.folder)
        (found,) = until(lambda: finder.look(1), "its page is there")
        assert (found.round, found.rank, found.local_rank) == (1, 3, 1)
        assert found.pid == rank.pid
        until(found.page.read, "a step is made", holds=lambda page: page.step == 1)
        assert finder.look(1) == [], "it is found once"
        assert finder.look(0) == []
        assert launcher.folder.stat().st_mode & 0o777 == 0o700
        out, err = rank.communicate("", timeout=50)
    assert (rank.returncode, out, err) == (0, "", "")
    assert launcher.left() == []
    found.page.close()


@pytest.mark.usefixtures("watched")
def test_a_restart_is_found_as_the_next_round(launcher: Launcher) -> None:
    shown = "run.is_watched, run._link.starts_ranks"
    wait = BEGIN + f"print({shown}, flush=True)\nsys.stdin.read()"
    with (
        launcher.start("-c", wait) as old,
        launcher.start("-c", wait, TORCHELASTIC_RESTART_COUNT="1") as new,
    ):
        for rank in (old, new):
            assert rank.stdout is not None
            assert rank.stdout.readline() == "True False\n", "nobody here starts it again"
        finder = PageFinder(launcher.folder)
        rounds = [[one.round for one in finder.look(0)] for _ in range(3)]
        assert rounds == [[1], [2], []], "one after the other"
        assert [one.pid for one in PageFinder(launcher.folder).look(2)] == [new.pid]
        for rank in (old, new):
            rank.communicate("", timeout=50)
    assert launcher.left() == []


@pytest.mark.usefixtures("watched")
def test_a_truncated_page_is_ignored(launcher: Launcher) -> None:
    with launcher.start("-c", BEGIN + "print(1, flush=True)\nsys.stdin.read()") as rank:
        assert rank.stdout is not None
        rank.stdout.readline()
        (page,) = launcher.folder.glob("*/*/page")
        (page.parents[1] / "4-2").mkdir()
        (page.parents[1] / "4-2" / "page").write_bytes(b"short")
        assert [one.rank for one in PageFinder(launcher.folder).look(0)] == [3]
        rank.communicate("", timeout=50)


@pytest.mark.usefixtures("watched")
async def test_torch_answers_the_agent_also_in_the_second_life_of_a_rank(
    launcher: Launcher,
) -> None:
    """The socket of a killed rank is in the way of its successor."""
    script = BEGIN + "import torch\nprint(1, flush=True)\nsys.stdin.read()"
    for _ in range(2):
        with launcher.start("-c", script) as rank:
            assert rank.stdout is not None
            await asyncio.to_thread(rank.stdout.readline)
            (page,) = launcher.folder.glob("*/*/page")
            assert await ask(page.parent, "ping", 50.0) is not None
            rank.kill()
            _, err = rank.communicate(timeout=50)
            assert err == ""


CHILD = "import trainer_sdk; print(trainer_sdk.session().is_watched)"


@pytest.mark.usefixtures("watched")
@pytest.mark.parametrize(
    "start",
    [
        "import subprocess; subprocess.run([sys.executable, '-c', CHILD], check=True)",
        "os.fork() or (exec(CHILD), sys.stdout.flush(), os._exit(0))\nos.wait()",
    ],
    ids=["spawned", "forked"],
)
def test_a_process_that_a_rank_starts_is_not_a_rank(launcher: Launcher, start: str) -> None:
    out, err = launcher.run(f"{BEGIN}CHILD = {CHILD!r}\n{start}\nassert run.is_watched")
    assert (out, err) == ("False", "")


@pytest.mark.usefixtures("watched")
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_worker_of_a_rank_without_a_session_is_not_taken_for_a_rank(
    launcher: Launcher, tmp_path: Path, method: str
) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import multiprocessing\n"
        f"def work():\n    {CHILD}\n"
        "if __name__ == '__main__':\n"
        f"    worker = multiprocessing.get_context('{method}').Process(target=work)\n"
        "    worker.start()\n    worker.join()\n"
    )
    with launcher.start(str(script), PYTHONPATH=str(Path(__file__).parents[3])) as process:
        out, err = process.communicate(timeout=50)
    assert (process.returncode, out, err) == (0, "False\n", "")


@pytest.mark.usefixtures("watched")
def test_a_script_that_executes_itself_again_stays_the_rank(launcher: Launcher) -> None:
    again = "import os, sys, trainer_sdk\nprint(trainer_sdk.session().is_watched)"
    out, err = launcher.run(f"{BEGIN}os.execv(sys.executable, [sys.executable, '-c', {again!r}])")
    assert (out, err) == ("True", "")


def test_attachment_may_be_turned_off(launcher: Launcher) -> None:
    out, err = launcher.run(BEGIN + "print(run.is_watched)", EVERSTEP_ATTACH="off")
    assert (out, err) == ("False", "")
    assert not launcher.folder.exists()


def test_a_folder_of_another_kind_is_not_used(launcher: Launcher) -> None:
    launcher.folder.parent.mkdir()
    launcher.folder.write_text("a file")
    out, err = launcher.run(BEGIN + "run.step()\nprint(run.is_watched)", LOCAL_RANK="0")
    assert out == "False"
    assert err.startswith("everstep: this rank is not watched: ")
    assert err.count("\n") == 1


@pytest.mark.usefixtures("watched")
def test_the_exception_that_ends_a_rank_is_kept_for_its_agent(launcher: Launcher) -> None:
    held = launcher.folder / attachment.AGENT_LOCK
    script = (
        f"{BEGIN}import fcntl\n"
        f"lock = open({str(held)!r}, 'w')\n"
        "fcntl.flock(lock, fcntl.LOCK_EX)\n"  # as an agent does
        "raise RuntimeError('the loss is not finite')"
    )
    with launcher.start("-c", script) as rank:
        rank.communicate(timeout=50)
    (error,) = launcher.folder.glob("1/3-1/error.json")
    assert "the loss is not finite" in error.read_text()


def held(lock: Path) -> int:
    """The lock as the rank passes it to the agent that it starts."""
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    return descriptor


@pytest.mark.parametrize(
    ("error", "is_left"), [(None, False), (EverstepError("no bus"), False), (KeyError("x"), True)]
)
def test_an_agent_removes_a_folder_that_is_not_in_use(
    tmp_path: Path, error: Exception | None, is_left: bool
) -> None:
    folder = tmp_path / "attached-job"
    folder.mkdir()
    lock = held(folder / attachment.AGENT_LOCK)
    with suppress(EverstepError, KeyError), sole_agent(folder, lock):
        if error is not None:
            raise error
    os.close(lock)
    assert folder.exists() is is_left
    sweep(tmp_path)
    assert not folder.exists(), "the next agent removes it"


def test_a_folder_with_ranks_stays(tmp_path: Path) -> None:
    folder = tmp_path / "attached-job"
    folder.mkdir()
    lock, rank = held(folder / attachment.AGENT_LOCK), os.open(folder / "lock", os.O_CREAT)
    fcntl.flock(rank, fcntl.LOCK_SH)
    with sole_agent(folder, lock):
        pass
    sweep(tmp_path)
    os.close(lock)
    assert folder.exists()
    os.close(rank)
    sweep(tmp_path)
    assert not folder.exists()


def test_no_folder_is_swept_between_the_making_of_its_lock_and_its_hold(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    sweeping = threading.Thread(target=sweep, args=(tmp_path,))
    with alone_in(tmp_path):
        folder.mkdir()
        lock = os.open(folder / "lock", os.O_CREAT | os.O_RDWR)
        sweeping.start()
        sweeping.join(0.2)  # it has to wait
        fcntl.flock(lock, fcntl.LOCK_EX)
    sweeping.join()
    assert folder.exists()
    os.close(lock)
    sweep(tmp_path)
    assert not folder.exists()
