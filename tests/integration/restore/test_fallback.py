"""Ranks that go back to an older image, as one of them has lost the newest: that one then stays."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from everstep_services.agent.replicas.images import OwnImages
from tests.checkpoint_helpers.saved_by import JOB, Saving, saving
from tests.unit.trainer_sdk.checkpoint.saved_states import together
from trainer_sdk.checkpoint.image_folder import RestoredState
from trainer_sdk.checkpoint.job_context import JobContext
from trainer_sdk.checkpoint.manifest import INDEX
from trainer_sdk.checkpoint.rank_group import RankGroup
from trainer_sdk.checkpoint.restore.discovery import RestoreContext
from trainer_sdk.checkpoint.restore.restore import Restore, Restored


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as found:
        yield Path(found)


def state_of(value: int) -> dict[str, Any]:
    return {"a": torch.full((1 << 12,), value)}


class Rank:
    """One rank in one round; its node is a folder."""

    def __init__(self, folder: Path, group: RankGroup, number: int, rank: Saving) -> None:
        self.node = folder / f"node-{group.rank}"
        self._group = group
        self._round = number
        self._rank = rank

    def restore(self) -> Restored:
        home = RestoreContext(
            job=JOB,
            round=self._round,
            rank=self._group.rank,
            world_size=self._group.size,
            images=self.node,
            storage=None,
        )
        state = state_of(0)
        found = Restore(home, self._group, self._rank.told).restore(state)
        assert found is not None
        assert set(state["a"].tolist()) == {found.step}
        restored = RestoredState(identity=found.choice.identity, round=self._round)
        self._rank.saver.prepare(state, restored)
        return found

    def save(self, step: int) -> None:
        assert self._rank.save(step, state_of(step), to_root=False) is not None
        assert self._rank.finish()

    @property
    def steps(self) -> list[int]:
        """What the agent has to send, the newest first."""
        found = OwnImages(self.node, JOB).going_on(self._group.rank)
        return [one.head.identity.step for one in found]


def run(folder: Path, number: int, work: Any) -> list[Any]:
    """Two ranks in a round of this number, which then die."""

    def one(group: RankGroup) -> Any:
        context = JobContext(JOB, number, str(folder / f"node-{group.rank}"), has_keeper=number > 0)
        kept: dict[str, Any] = {"root": "", "keeps": True, "buffers": 2, "context": context}
        with saving(folder, group, **kept) as rank:
            found = work(Rank(folder, group, number, rank))
            rank.saver.close(keeps_images=True)
            return found

    return together(2, one)


def save_two(rank: Rank) -> None:
    rank.save(10)
    rank.save(20)


def lose(folder: Path, rank: int, step: int) -> None:
    images = OwnImages(folder / f"node-{rank}", JOB).of(rank)
    (lost,) = [one for one in images if one.head.identity.step == step]
    shutil.rmtree(lost.path.parent)


def test_what_was_restored_stays_until_there_is_a_newer_one(folder: Path) -> None:
    run(folder, 1, save_two)
    lose(folder, rank=1, step=20)
    for number in (2, 3):
        restored = run(folder, number, Rank.restore)
        assert [(one.step, one.tier) for one in restored] == [(10, "memory")] * 2, f"round {number}"

    def go_on(rank: Rank) -> list[int]:
        assert rank.restore().step == 10
        before = rank.steps
        rank.save(20)
        rank.save(30)
        return before

    assert run(folder, 4, go_on) == [[10], [10]]
    (found, _) = run(folder, 5, lambda rank: (rank.restore(), rank.steps))
    assert found[0].step == 30
    assert found[0].choice.identity.round == 4
    assert found[1][0] == 30


def test_what_the_training_has_left_makes_room_first(folder: Path) -> None:
    run(folder, 1, save_two)
    lose(folder, rank=1, step=20)

    def go_on(rank: Rank) -> list[int]:
        rank.restore()
        rank.save(15)
        return rank.steps

    assert run(folder, 2, go_on) == [[15, 10], [15, 10]]
    (first, _) = run(folder, 3, Rank.restore)
    assert (first.step, first.choice.identity.round) == (15, 2)


def test_the_agent_sends_what_is_there_if_nothing_was_restored(folder: Path) -> None:
    run(folder, 1, save_two)
    assert run(folder, 2, lambda rank: rank.steps) == [[20, 10]] * 2
    (folder / "node-0" / "own" / "rank-0" / "restored.json").write_text("{")
    assert run(folder, 3, lambda rank: rank.steps) == [[20, 10]] * 2
    assert len(list(folder.rglob(INDEX))) == 4
