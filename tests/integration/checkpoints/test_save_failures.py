"""Failed saves: rank and reason are reported; the training goes on, and so do later saves."""

import errno
import os
import signal
import socket
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint_helpers.saved_by import Saving, load, manifest_of, path_of, same, saving
from tests.stopping import stop
from tests.waiting import until
from trainer_sdk.checkpoint import Checkpointer, SaveError, Timeouts
from trainer_sdk.checkpoint.job_context import JobContext
from trainer_sdk.checkpoint.storage.checkpoints import QUARANTINED

STATE: dict[str, Any] = {"a": torch.arange(1 << 16), "value": {"lr": 0.5}}
IMPATIENT = Timeouts(delayed_after_s=0.3, write_within_s=2.0)


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as found:
        yield Path(found)


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    place = tmp_path / "small"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "everstep-test", str(place)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting needs root")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def writer_of(rank: Saving) -> int:
    return until(lambda: rank.queue.writer_pid, "a writer")


def kill(rank: Saving) -> None:
    """Before it can write anything."""
    pid = writer_of(rank)
    stop(pid)
    rank.save(2, STATE)
    until(lambda: any(one.is_sent for one in rank.queue._saves.values()), "an order")
    os.kill(pid, signal.SIGKILL)


def test_a_dead_writer_is_told_at_once_and_the_next_save_works(folder: Path) -> None:
    """The error has rank and step, and the training goes on (A8.2)."""
    with saving(folder) as rank:
        rank.save(1, STATE)
        rank.finish()
        kill(rank)
        assert rank.finish() == []
        assert "step 2 failed at write" in rank.told.warned[0]
        assert "died by signal 9" in rank.told.warned[0]
        (failed,) = rank.events("failed")
        assert failed["error"] == "writer_died"
        assert (failed["rank"], failed["step"], failed["last_good_step"]) == (0, 2, 1)
        rank.save(3, STATE)
        assert rank.finish() == [3]
    assert same(load(folder, 3, {"a": STATE["a"] * 0, "value": {"lr": 0}}), STATE)


def test_with_retry_another_writer_takes_over(folder: Path) -> None:
    """The save that failed is made by the next writer (A8.2)."""
    with saving(folder, on_error="retry") as rank:
        rank.queue.warm()
        kill(rank)
        assert rank.finish() == [1]
        assert [one["attempt"] for one in rank.events("failed")] == [1]
    assert path_of(folder, 2).exists()


def test_with_fatal_the_next_call_raises(folder: Path) -> None:
    """The error names the rank and the step (A8.2)."""
    with saving(folder, on_error="fatal") as rank:
        rank.queue.warm()
        kill(rank)
        with pytest.raises(SaveError, match="rank 0: the save of step 2 failed at write"):
            rank.finish()
        rank.save(3, STATE)
        assert rank.finish() == [2]


def test_a_slow_disk_delays_saves_and_no_step(folder: Path) -> None:
    """Later saves are skipped, so that one is waiting at most (A8.5)."""
    with saving(folder) as rank:
        rank.save(1, STATE)
        rank.finish()
        rank.wait_for_writer(Timeouts(delayed_after_s=0.3))
        stop(writer_of(rank))
        assert rank.save(2, STATE) is not None
        delayed = until(lambda: rank.events("delayed"), "word of the delay")[0]
        assert delayed["waiting"] == 1
        assert delayed["waiting_bytes"] > STATE["a"].nbytes
        for step in (3, 4):
            assert rank.save(step, STATE) is None
        skipped = [one for one in rank.events("delayed") if "was skipped" in one["reason"]]
        assert len(skipped) == 1, "a skipped step is reported once"
        os.kill(writer_of(rank), signal.SIGCONT)
        assert rank.finish() == [2]
        assert rank.events("delayed")[-1]["waiting"] == 0
        rank.save(5, STATE)
        assert rank.finish() == [3]


def test_how_late_a_save_is_is_told_again_as_it_grows(folder: Path) -> None:
    """The lag is recorded each time it has doubled (A8.5)."""
    with saving(folder, timeouts=Timeouts(delayed_after_s=0.1)) as rank:
        stop(writer_of_warm(rank))
        rank.save(1, STATE)
        told = until(lambda: rank.events("delayed"), "three words", holds=lambda it: len(it) > 2)
        lags = [one["lag_s"] for one in told]
        assert all(later >= 2 * lag for lag, later in pairwise(lags))
        assert {one["waiting"] for one in told} == {1}
        assert len(rank.told.warned) == 1, "people hear of it once"


def test_a_writer_that_hangs_for_too_long_is_replaced(folder: Path) -> None:
    """The next save has a new writer (A8.2)."""
    with saving(folder, timeouts=IMPATIENT) as rank:
        stop(writer_of_warm(rank))
        rank.save(1, STATE)
        assert rank.finish() == []
        assert rank.events("failed")[0]["error"] == "timeout"
        rank.wait_for_writer(Timeouts())
        rank.save(2, STATE)
        assert rank.finish() == [2]


def test_a_save_that_is_late_at_the_end_is_written_by_nobody(folder: Path) -> None:
    """The next one has its memory: it would have that one's values."""
    with saving(folder, timeouts=Timeouts(exit_within_s=0.1)) as rank:
        rank.queue.warm()
        late = writer_of(rank)
        stop(late)
        assert rank.save(1, STATE) is not None
        rank.saver.settle()
        rank.queue.await_all()
        assert rank.save(2, STATE | {"a": -STATE["a"]}) is not None
        with suppress(ProcessLookupError):
            os.kill(late, signal.SIGCONT)
        assert rank.finish() == [2]
    assert not path_of(folder, 1).exists()


@pytest.mark.parametrize("what", ["descriptor", "thread"])
def test_a_writer_that_cannot_be_started_holds_nothing_up(
    folder: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    def no_pair() -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    plain = threading.Thread.start

    def start(self: threading.Thread) -> None:
        if self.name == "everstep-writer":
            raise RuntimeError("can't start new thread")
        plain(self)

    with saving(folder) as rank:
        if what == "descriptor":
            monkeypatch.setattr(socket, "socketpair", no_pair)
        else:
            monkeypatch.setattr(threading.Thread, "start", start)
        assert rank.save(1, STATE) is not None
        assert rank.finish() == []
        assert "the writer cannot be started" in rank.told.warned[0]
        monkeypatch.undo()
        assert rank.save(2, STATE) is not None
        assert rank.finish() == [2]


def test_a_full_disk_is_seen_before_anything_is_written(small: Path) -> None:
    state = {"a": torch.zeros(8 << 20, dtype=torch.uint8)}
    with saving(small.parent, root=str(small)) as rank:
        rank.save(1, {"a": torch.ones(10)})
        rank.finish()
        rank.save(2, state)
        assert rank.finish() == []
        (failed,) = rank.events("failed")
        assert failed["error"] == "ENOSPC"
        assert "free some space" in failed["reason"]
        assert not list((small / ".saving").glob("*/*.distcp"))
        rank.save(3, {"a": torch.ones(10)})
        assert rank.finish() == [3]
    assert sorted(one.name for one in small.glob("step-*")) == ["step-000000001", "step-000000003"]


def test_too_little_shared_memory_is_a_refusal_with_both_numbers(small: Path) -> None:
    """The save is refused before a byte is copied (A8.4)."""
    state = {"a": torch.zeros(8 << 20, dtype=torch.uint8)}
    about = JobContext("job", 1, str(small), has_keeper=True)
    with saving(small.parent, keeps=True, buffers=2, context=about) as rank:
        assert rank.save(1, state) is None
        (refused,) = rank.events("refused")
        assert refused["needed_bytes"] > 8 << 20 > refused["available_bytes"]
        assert "--shm-size" in rank.told.warned[0]
        assert rank.save(2, {"a": torch.ones(5)}) is not None
        assert rank.finish() == [1]


def test_images_do_not_come_in_waves(folder: Path) -> None:
    with saving(folder, keeps=True, buffers=2, memory_limit=1 << 16) as rank:
        assert rank.save(1, STATE) is None
        assert "memory_limit" in rank.events("refused")[0]["place"]


def test_a_place_that_is_no_folder_is_named_with_what_to_do(folder: Path) -> None:
    (folder / "root").write_text("a file")
    with saving(folder) as rank:
        rank.save(1, STATE)
        assert rank.finish() == []
        assert str(folder / "root") in rank.told.warned[0]
        assert "give a folder" in rank.told.warned[0]


@pytest.mark.parametrize("error", [None, SystemExit(0), SystemExit(3), KeyError("their own")])
def test_the_end_of_with_raises_unless_there_is_another_reason(
    folder: Path, error: BaseException | None
) -> None:
    """The script's own exception is the one that is raised (A8.6)."""
    (folder / "root").write_text("a file")
    ours = error is None or (isinstance(error, SystemExit) and not error.code)
    with (
        pytest.raises((SaveError,) if ours else (SystemExit, KeyError)),
        Checkpointer(folder / "root", on_error="fatal", job="vit-l") as saves,
    ):
        saves.save(1, STATE)
        if error is not None:
            raise error


def test_the_place_of_another_job_is_refused(folder: Path) -> None:
    with saving(folder) as rank:
        rank.save(1, STATE)
        rank.finish()
    other = JobContext("resnet", 1, str(folder / "others"), has_keeper=True)
    with saving(folder, context=other) as rank:
        rank.save(2, STATE)
        assert rank.finish() == []
        assert "has the checkpoints of job vit-l, and this is resnet" in rank.told.warned[0]
    assert not path_of(folder, 2).exists()


class Broken:
    """An object of the user's whose state cannot be had."""

    def state_dict(self) -> dict[str, Any]:
        raise RuntimeError("not initialised")

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@pytest.mark.parametrize(
    ("what", "said"),
    [
        (Broken(), "not initialised"),
        (lambda: None, "it is of class function, which no restore would read"),
        ({1: torch.ones(2), "1": torch.ones(3)}, "two values of the state are called it.1:"),
        ({"b.0": 0, "b": [torch.ones(2)]}, "two values of the state are called it.b.0:"),
    ],
)
def test_a_state_that_cannot_be_saved_is_told(folder: Path, what: object, said: str) -> None:
    with saving(folder) as rank:
        assert rank.save(1, {"a": torch.ones(3), "it": what}) is None
        assert said in rank.told.warned[0]
        assert rank.save(2, {"a": torch.ones(3)}) is not None
        assert rank.finish() == [1]


def test_what_is_visible_is_never_replaced(folder: Path) -> None:
    """Neither by a round that was fenced off, nor by one that comes to this step once more."""
    first, later = (
        JobContext("vit-l", one, str(folder / f"r{one}"), has_keeper=True) for one in (1, 2)
    )
    with saving(folder, context=later) as rank:
        rank.save(5, STATE)
        rank.finish()
    before = manifest_of(folder, 5)
    with saving(folder, context=first) as rank:
        rank.save(5, {"a": torch.zeros(3)})
        assert rank.finish() == [1]
        assert "round 2 has saved step 5 there" in rank.told.warned[0]
        assert not rank.events("committed")
    assert manifest_of(folder, 5) == before
    assert not list((folder / "root" / ".saving").iterdir())


def test_what_is_quarantined_makes_room(folder: Path) -> None:
    with saving(folder) as rank:
        rank.save(5, STATE)
        rank.finish()
    (path_of(folder, 5) / QUARANTINED).write_text('{"reason":"NaN"}')
    with saving(folder) as rank:
        rank.save(5, {"a": torch.ones(3)})
        rank.finish()
        assert rank.events("committed")
    assert same(load(folder, 5, {"a": torch.zeros(3)}), {"a": torch.ones(3)})
    assert [one.name for one in (folder / "root" / ".replaced").iterdir()]


def test_abandoned_saves_leave_no_process(folder: Path) -> None:
    with saving(folder) as rank:
        pid = writer_of_warm(rank)
        stop(pid)
        rank.save(1, STATE)
        assert rank.queue.close(abort=True) is None
        until(lambda: not Path(f"/proc/{pid}").exists(), "the end of the writer")
        assert rank.queue.unfinished == 0


def writer_of_warm(rank: Saving) -> int:
    rank.queue.warm()
    return writer_of(rank)
