"""Ranks save together: each a part, all of them or none."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint_helpers.saved_by import Saving, load, manifest_of, path_of, same, saving
from tests.stopping import stop
from tests.unit.trainer_sdk.checkpoint.saved_states import together
from tests.waiting import until
from trainer_sdk.checkpoint import Timeouts
from trainer_sdk.checkpoint.manifest import IMAGE, INDEX, ImageIndex, decode
from trainer_sdk.checkpoint.rank_group import RankGroup
from trainer_sdk.checkpoint.storage.names import SAVING
from trainer_sdk.checkpoint.writer.files import failure_name

IMPATIENT = Timeouts(delayed_after_s=0.3, write_within_s=1.0)
SCRIPT = Path(__file__).parents[1] / "scripts" / "saving.py"


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as found:
        yield Path(found)


def state(rank: int) -> dict[str, Any]:
    same_on_all = {f"w{one}": torch.full((1000,), float(one)) for one in range(4)}
    return {"model": same_on_all, "value": {"lr": 0.1}, f"rank{rank}": torch.full((9,), rank)}


def test_what_all_ranks_have_is_written_once(folder: Path) -> None:
    def one(group: RankGroup) -> str:
        with saving(folder, group) as rank:
            for step in (1, 2):
                rank.save(step, state(group.rank))
                rank.finish()
            assert rank.saver._preparation.plan is not None
            assert bool(rank.events("committed")) is (group.rank == 0)
            return rank.saver._preparation.plan.layout

    layouts = together(2, one)
    assert len(set(layouts)) == 1
    manifest = manifest_of(folder, 2)
    assert manifest.identity.world_size == 2
    assert manifest.identity.layout == layouts[0]
    sizes = {one.name: one.size_bytes for one in manifest.files}
    assert max(sizes["__0_0.distcp"], sizes["__1_0.distcp"]) <= 4 * 4096
    wanted = state(0) | state(1)
    blank = {
        "model": {key: one * 0 for key, one in wanted["model"].items()},
        "value": {"lr": None},
        "rank0": torch.full((9,), 7),
        "rank1": torch.full((9,), 7),
    }
    assert same(load(folder, 2, blank), wanted)


def test_a_rank_may_have_nothing_to_write(folder: Path) -> None:
    state = {"a": torch.arange(1000)}

    def one(group: RankGroup) -> None:
        with saving(folder, group) as rank:
            rank.save(1, state)
            assert rank.finish() == [1]

    together(2, one)
    assert same(load(folder, 1, {"a": torch.zeros(1000, dtype=torch.int64)}), state)


def test_an_image_has_also_what_others_write(folder: Path) -> None:
    def one(group: RankGroup) -> dict[str, bytes]:
        with saving(folder, group, keeps=True, buffers=2) as rank:
            rank.save(1, state(group.rank))
            rank.finish()
            found = Path(rank.events("image")[0]["folder"])
            index = decode((found / INDEX).read_bytes(), ImageIndex, INDEX)
            octets = (found / IMAGE).read_bytes()
            return {one.key: octets[one.offset : one.offset + one.length] for one in index.entries}

    for number, found in enumerate(together(2, one)):
        assert found.keys() == {f"model.w{one}" for one in range(4)} | {"value.lr", f"rank{number}"}
        for key, tensor in state(number)["model"].items():
            assert found[f"model.{key}"] == tensor.numpy().tobytes()


def test_a_failure_on_one_rank_is_told_on_all(folder: Path) -> None:
    """Every rank's error names the rank whose writer died (A8.2)."""

    def one(group: RankGroup) -> list[str]:
        with saving(folder, group) as rank:
            rank.save(1, state(group.rank))
            rank.finish()
            pid = until(lambda: rank.queue.writer_pid, "a writer")
            if group.rank == 1:
                stop(pid)
            rank.save(2, state(group.rank))
            if group.rank == 1:
                until(lambda: any(one.is_sent for one in rank.queue._saves.values()), "an order")
                os.kill(pid, signal.SIGKILL)
            assert rank.finish() == []
            rank.save(3, state(group.rank))
            assert rank.finish() == [3]
            facts = [one["error"] for one in rank.events("failed")]
            assert facts == (["writer_died"] if group.rank else [])
            return rank.told.warned

    zero, first = together(2, one)
    assert "rank 1 has given up: the writer" in zero[0]
    assert "died by signal 9" in first[0]
    assert not path_of(folder, 2).exists()
    left = [path.name for path in (folder / "root" / SAVING).rglob("*") if path.is_file()]
    assert set(left) <= {failure_name(0), failure_name(1)}, "a disk that was full stays full"


def test_a_root_that_vanishes_is_not_made_anew_for_the_reason(folder: Path) -> None:
    """A root below an unmounted place would take the next saves, on another disk."""
    root = folder / "root"

    def one(group: RankGroup) -> None:
        with saving(folder, group) as rank:
            rank.save(1, state(group.rank))
            assert rank.finish() == [1]
            group.gather(0, int)
            if not group.rank:
                root.rename(folder / "elsewhere")
            group.gather(0, int)
            for step in (2, 3):
                rank.save(step, state(group.rank))
                assert rank.finish() == []

    together(2, one)
    assert not root.exists()


def test_a_rank_waits_for_the_others_as_long_as_the_training_says(folder: Path) -> None:
    def one(group: RankGroup) -> dict[str, Any]:
        with saving(folder, group, timeouts=IMPATIENT) as rank:
            pid = with_writer(rank)
            if group.rank == 0:  # it writes nothing, and so cannot publish
                stop(pid)
            else:  # only the other ranks may be late
                rank.wait_for_writer(Timeouts())
            rank.save(1, state(group.rank))
            assert rank.finish() == []
            return rank.events("failed")[0]

    zero, first = together(2, one)
    assert (zero["stage"], zero["error"]) == ("write", "timeout")
    assert (first["stage"], first["error"]) == ("publish", "timeout")
    assert first["reason"] == "the part of rank 0 was not there within 1 s"


def test_a_writer_that_hangs_while_others_are_waited_for_is_given_up(folder: Path) -> None:
    def one(group: RankGroup) -> dict[str, Any]:
        with saving(folder, group) as rank:
            pid = with_writer(rank)
            if group.rank == 1:
                stop(pid)
            save = rank.save(1, state(group.rank))
            assert save is not None
            if group.rank == 0:
                until(lambda: save.stage == "publish", "its part is written")
                stop(pid)
            rank.wait_for_writer(IMPATIENT)
            assert rank.finish() == []
            return rank.events("failed")[0]

    zero, _ = together(2, one)
    assert (zero["stage"], zero["error"]) == ("publish", "timeout")
    assert "the writer was not done" in zero["reason"]


def with_writer(rank: Saving) -> int:
    rank.queue.warm()
    return until(lambda: rank.queue.writer_pid, "a writer")


def test_all_ranks_begin_a_save_or_none_does(folder: Path) -> None:
    def one(group: RankGroup) -> list[bool]:
        with saving(folder, group) as rank:
            begun = [rank.save(1, state(group.rank)) is not None]
            rank.finish()
            if group.rank == 1:
                rank.saver._preparation.arena.buffers[0].is_free = False
            begun.append(rank.save(2, state(group.rank)) is not None)
            rank.saver._preparation.arena.buffers[0].is_free = True
            broken = {"it": lambda: None} if group.rank else {}
            begun.append(rank.save(3, state(group.rank) | broken) is not None)
            begun.append(rank.save(4, state(group.rank)) is not None)
            rank.finish()
            return begun

    assert together(2, one) == [[True, False, False, True]] * 2


@pytest.mark.timeout(180)  # each rank imports torch and its compiler
def test_fsdp_and_dtensor_load_at_another_world_size(folder: Path) -> None:
    common = {"WORLD_SIZE": "2", "EVERSTEP_ATTACH": "off", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, SCRIPT, folder / "root"],
            env=os.environ | common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=150)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
    expected = torch.load(folder / "root" / "expected-0.pt", weights_only=True)
    blank = {key: torch.zeros_like(one) for key, one in expected.items()}
    assert same(load(folder, 1, {"model": blank})["model"], expected)
