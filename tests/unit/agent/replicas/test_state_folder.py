"""Where the states of a node are: taken over from a dead agent, removed with the job."""

import shutil
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from everstep.clock import SystemClock
from everstep_services.agent.replicas import state_folder as image_folder
from everstep_services.agent.replicas.state_folder import LeftoverPolicy, opened_images


def leave(memory: Path, job: str, node: str) -> Path:
    """As an agent that was killed: nobody holds the lock, and everything is there."""
    with opened_images(job, node, memory) as folder:
        assert folder is not None
        name, base = folder.name, folder.parent
        (folder / "own").mkdir()
        kept = folder.rename(base.parent / "kept")
    return kept.rename(base / name)


def test_it_is_there_for_as_long_as_its_agent(tmp_path: Path) -> None:
    with opened_images("j", "n1", tmp_path) as folder:
        assert folder is not None
        assert folder.stat().st_mode & 0o777 == 0o700
        (folder / "own" / "rank-0").mkdir(parents=True)
    assert not folder.exists()


def test_what_a_dead_agent_of_the_same_node_and_job_has_left_is_taken_over(tmp_path: Path) -> None:
    """Images that are still needed are kept (A9.4)."""
    left = leave(tmp_path, "j", "n1")
    (left / "offer.json").write_text("{}")
    (left / "coded" / "part").mkdir(parents=True)
    with opened_images("j", "n1", tmp_path) as folder:
        assert folder == left
        assert {one.name for one in left.iterdir()} == {"own", "lock"}
    assert not left.exists()


def test_what_dead_agents_of_other_jobs_have_left_is_removed_and_the_living_are_not_touched(
    tmp_path: Path,
) -> None:
    """Orphans go, by their job (A9.4)."""
    dead = leave(tmp_path, "other", "n1")
    with ExitStack() as stack:
        alive = stack.enter_context(opened_images("another", "n1", tmp_path))
        stack.enter_context(opened_images("j", "n1", tmp_path))
        assert not dead.exists()
        assert alive is not None
        assert alive.exists()


def test_what_an_agent_has_left_that_was_killed_before_it_had_a_lock_is_removed(
    tmp_path: Path,
) -> None:
    dead = leave(tmp_path, "other", "n1")
    (dead / "lock").unlink()
    with opened_images("j", "n1", tmp_path):
        assert not dead.exists()


def test_an_agent_that_is_killed_while_it_removes_its_images_leaves_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def rmtree(path: Path, **_: object) -> None:
        seen.append((path.name, (own / "lock").exists()))

    with opened_images("j", "n1", tmp_path) as folder:
        assert folder is not None
        own = folder
        (own / "own").mkdir()
        (own / "held").mkdir()
        monkeypatch.setattr(shutil, "rmtree", rmtree)
    assert sorted(seen[:2]) == [("held", True), ("own", True)]
    assert seen[2:] == [(own.name, True)]


@dataclass
class WallClock(SystemClock):
    """Some seconds ahead."""

    ahead_s: float = 0.0

    def wall(self) -> datetime:
        return super().wall() + timedelta(seconds=self.ahead_s)


def left_by(job: str, memory: Path, departure: LeftoverPolicy, size: int = 1) -> Path:
    """The folder of an agent that has ended, with one image of this size."""
    with opened_images(job, "n1", memory, departure) as folder:
        assert folder is not None
        image = folder / "own" / "rank-0" / "a"
        image.mkdir(parents=True)
        (image / "image").write_bytes(bytes(size))
        (image / "index.json").write_text("{}")
        (folder / "coded").mkdir(exist_ok=True)
        (folder / "offer.json").write_text("{}")
    return folder


def test_states_stay_for_a_job_that_may_come_again(tmp_path: Path) -> None:
    """The same agent finds them; agents of other jobs leave them alone until they are too old."""
    clock = WallClock()
    departure = LeftoverPolicy(for_s=600, clock=clock)
    left = left_by("j", tmp_path, departure)
    assert {one.name for one in left.iterdir()} == {"own", "lock", "left.json", "offer.json"}
    with opened_images("other", "n1", tmp_path, LeftoverPolicy(clock=clock)) as folder:
        assert folder is not None
        assert left.exists()
    with opened_images("j", "n1", tmp_path, departure) as folder:
        assert folder == left
        assert {one.name for one in left.iterdir()} == {"own", "lock"}
    assert (left / "left.json").exists(), "it was not told that the job has ended well"
    clock.ahead_s = 601
    with opened_images("other", "n1", tmp_path, LeftoverPolicy(clock=clock)) as folder:
        assert folder is not None
        assert not left.exists()


def test_nothing_outlives_a_job_that_ended_well(tmp_path: Path) -> None:
    departure = LeftoverPolicy(for_s=600)
    with opened_images("j", "n1", tmp_path, departure) as folder:
        assert folder is not None
        (folder / "own" / "rank-0" / "a").mkdir(parents=True)
        (folder / "own" / "rank-0" / "a" / "index.json").write_text("{}")
        departure.stays = False
    assert not folder.exists()


def test_what_has_no_whole_state_does_not_stay(tmp_path: Path) -> None:
    with opened_images("j", "n1", tmp_path, LeftoverPolicy(for_s=600)) as folder:
        assert folder is not None
        (folder / "own" / "rank-0" / "a").mkdir(parents=True)
    assert not folder.exists()


def test_what_was_left_first_makes_room_first(tmp_path: Path) -> None:
    clock, size = WallClock(), 1 << 20
    departure = LeftoverPolicy(for_s=600, most_bytes=5 * size // 2, clock=clock)
    first = left_by("first", tmp_path, departure, size)
    clock.ahead_s = 1
    second = left_by("second", tmp_path, departure, size)
    assert first.exists()
    clock.ahead_s = 2
    third = left_by("third", tmp_path, departure, size)
    assert (first.exists(), second.exists(), third.exists()) == (False, True, True)
    no_room = LeftoverPolicy(room_least_bytes=1 << 62, clock=clock)
    with opened_images("fourth", "n1", tmp_path, no_room):
        assert not second.exists()
        assert not third.exists()


@pytest.mark.parametrize("octets", [b"{", b'{"job":"j","until":1e18}', b'{"job":"j","until":-1}'])
def test_a_marker_that_makes_no_sense_keeps_nothing(tmp_path: Path, octets: bytes) -> None:
    left = left_by("j", tmp_path, LeftoverPolicy(for_s=600))
    (left / "left.json").write_bytes(octets)
    with opened_images("other", "n1", tmp_path):
        assert not left.exists()


def test_two_agents_never_share_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_folder, "_WITHIN_S", 0.0)
    with opened_images("j", "n1", tmp_path) as first:
        with opened_images("j", "n1", tmp_path) as second:
            assert second is None
        assert first is not None
        assert first.exists()


def test_an_agent_that_is_killed_with_the_lock_keeps_nobody_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next agent has the folder and the images (A9.4)."""
    code = (
        "import sys, pathlib\n"
        "from everstep_services.agent.replicas.state_folder import opened_images\n"
        "with opened_images('j', 'n1', pathlib.Path(sys.argv[1])) as folder:\n"
        "    (folder / 'own').mkdir()\n"
        "    print(folder, flush=True)\n"
        "    sys.stdin.read()\n"
    )
    killed = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with killed:
        assert killed.stdout is not None
        left = Path(killed.stdout.readline().decode().strip())
        with monkeypatch.context() as patch:
            patch.setattr(image_folder, "_WITHIN_S", 0.0)
            with opened_images("j", "n1", tmp_path) as busy:
                assert busy is None
        killed.kill()
    with opened_images("j", "n1", tmp_path) as folder:
        assert folder == left
        assert (left / "own").is_dir()


def test_an_agent_that_is_on_its_way_out_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ExitStack() as stack:
        before = stack.enter_context(opened_images("j", "n1", tmp_path))
        looked = []

        def sleep(_: float) -> None:
            looked.append(before)
            stack.close()

        monkeypatch.setattr(time, "sleep", sleep)
        monkeypatch.setattr(image_folder, "_WITHIN_S", 1e9)
        with opened_images("j", "n1", tmp_path) as folder:
            assert folder == before
    assert len(looked) == 1


def test_without_memory_for_files_there_is_none(tmp_path: Path) -> None:
    with opened_images("j", "n1", tmp_path / "missing") as folder:
        assert folder is None
