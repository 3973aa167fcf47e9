"""The course of a training by what its script calls: saved, stopped, restored, quarantined."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import trainer_sdk
from everstep.clock import SystemClock
from everstep.messages import (
    CheckpointQuarantined,
    CheckpointRestored,
    Fact,
    FreshStarted,
    IntervalChosen,
    RestoreFailed,
    StartRanks,
)
from everstep_services.agent.replicas.recorder import CheckpointRecorder
from everstep_services.agent.telemetry.facts import AgentFacts
from tests.contract.s3_server import BUCKET, s3_server
from trainer_sdk import sdk_log, testing
from trainer_sdk.checkpoint.checkpointer import Checkpointer
from trainer_sdk.checkpoint.data import PositionedSampler
from trainer_sdk.checkpoint.manifest import MANIFEST, Manifest, decode, step_name
from trainer_sdk.checkpoint.restore.errors import RestoreError
from trainer_sdk.checkpoint.restore.quarantine import BadLossError
from trainer_sdk.checkpoint.restore.stored_image import StoredImage
from trainer_sdk.wire import Checkpointed

EVENTS = {"fresh", "interval", "quarantine", "restore_failed", "restored"}
GOLDEN = Path(__file__).parents[2] / "unit/messages/golden/0.1.0/StartRanks.json"


@pytest.fixture
def watch() -> Iterator[testing.Watch]:
    with testing.watched() as watch:
        yield watch


@pytest.fixture(autouse=True)
def said_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lines that earlier tests have logged once are logged again."""
    monkeypatch.setattr(sdk_log, "_printed", set())


class Training:
    """One of a single rank, with a script's own hands."""

    def __init__(self, root: Path | str, **how: Any) -> None:
        self.weights = torch.zeros(5)
        self.data = PositionedSampler(100, batch_size=2)
        self.state: dict[str, Any] = {"weights": self.weights, "data": self.data}
        self.saves = Checkpointer(root, job="course", **{"every": 5} | how)

    def steps(self, first: int, last: int) -> None:
        run = trainer_sdk.session()
        for step in range(first, last + 1):
            self.weights.fill_(step)
            self.data.advance()
            run.step(step)
            self.saves.step(step, self.state)
            self.saves.maybe_finalize(blocking=True)


def facts(watch: testing.Watch) -> list[Fact]:
    """The agent's reading of all messages; none may be unreadable."""
    story = CheckpointRecorder(AgentFacts("course", "node-01", clock := SystemClock()), clock)
    order = msgspec.json.decode(GOLDEN.read_bytes(), type=StartRanks)
    story.begins(msgspec.structs.replace(order, round=1))
    told = [one for one in watch.messages if isinstance(one, Checkpointed) and one.event in EVENTS]
    found = [fact for one in told for fact in story.heard(one)]
    assert len(found) == len(told)
    return found


def facts_of(watch: testing.Watch, kind: type[Any]) -> list[Any]:
    return [one for one in facts(watch) if isinstance(one, kind)]


def manifest(root: Path, step: int) -> Manifest:
    return decode((root / step_name(step) / MANIFEST).read_bytes(), Manifest, "")


def test_from_scratch_and_on_from_the_last_save(tmp_path: Path, watch: testing.Watch) -> None:
    first = Training(tmp_path)
    assert first.saves.restore(first.state) is None
    first.steps(1, 12)
    first.saves.close()
    saved = manifest(tmp_path, 10)
    assert saved.has_data_position
    assert float(saved.user["ran_s"]) >= 0

    second = Training(tmp_path)
    found = second.saves.restore(second.state)
    second.saves.close()
    assert found is not None
    assert (found.step, found.tier) == (10, "global")
    assert second.weights.tolist() == [10] * 5
    assert second.data.consumed == 20
    assert trainer_sdk.session().steps_made == 10
    [fresh] = facts_of(watch, FreshStarted)
    assert fresh.cause == "no_checkpoints"
    [restored] = facts_of(watch, CheckpointRestored)
    assert (restored.step, restored.reason, restored.tiers[0].tier) == (10, "the newest", "global")


def test_who_saves_at_once_lets_go_of_the_image_that_was_checked_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is mapped, and a smaller state makes its file shorter."""
    first = Training(tmp_path, keep_memory=True)
    first.steps(1, 5)
    first.saves._ending.leave(True)
    closed: list[StoredImage] = []

    def close(image: StoredImage) -> None:
        closed.append(image)

    monkeypatch.setattr(StoredImage, "close", close)
    second = Training(tmp_path, keep_memory=True)
    ahead = second.saves._restorer._early
    assert ahead is not None
    ahead._thread.join()
    second.saves.save(6, {"weights": torch.zeros(1)})
    assert len(closed) == 1
    second.saves.close()


def test_a_training_that_is_to_stop_saves_that_step_once_and_waits_for_it(
    tmp_path: Path, watch: testing.Watch
) -> None:
    training = Training(tmp_path, every=1000)
    training.saves.restore(training.state)
    watch.ask_to_stop(after_step=7)
    run = trainer_sdk.session()
    for step in range(1, 10):
        run.step(step)
        training.saves.step(step, training.state)
    training.saves.close()
    assert [one.name for one in sorted(tmp_path.glob("step-*"))] == [step_name(7)]
    assert manifest(tmp_path, 7).occasion == "preemption"


def test_a_loss_that_is_no_number_sends_the_next_round_to_an_older_checkpoint(
    tmp_path: Path, watch: testing.Watch
) -> None:
    """The checkpoint is marked, and the next restore rejects it (A9.3)."""
    first = Training(tmp_path)
    first.saves.restore(first.state)
    first.steps(1, 10)
    first.saves.close()

    second = Training(tmp_path)
    second.saves.restore(second.state)
    second.saves.check_loss(0.5)
    with pytest.raises(BadLossError, match="step 12, 2 steps after loading step 10"):
        second.saves.check_loss(torch.tensor(math.nan))
    second.saves.close()
    [quarantined] = facts_of(watch, CheckpointQuarantined)
    assert (quarantined.step, quarantined.cause) == (10, "nan_after_load")

    third = Training(tmp_path)
    found = third.saves.restore(third.state)
    third.saves.close()
    assert found is not None
    assert found.step == 5
    rejected = facts_of(watch, CheckpointRestored)[-1].rejected
    assert [one.step for one in rejected] == [10]


def test_an_object_store_is_saved_to_restored_from_and_quarantined_in(
    tmp_path: Path, watch: testing.Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    with s3_server(tmp_path) as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        root = f"s3://{BUCKET}/course"
        first = Training(root)
        first.saves.restore(first.state)
        first.steps(1, 10)
        first.saves.close()

        second = Training(root)
        found = second.saves.restore(second.state)
        assert found is not None
        assert (found.step, second.weights.tolist()) == (10, [10] * 5)
        with pytest.raises(BadLossError, match="from the global tier"):
            second.saves.check_loss(math.inf)
        second.saves.close()

        third = Training(root)
        found = third.saves.restore(third.state)
        third.saves.close()
        assert found is not None
        assert (found.step, third.weights.tolist()) == (5, [5] * 5)


def test_an_automatic_interval_is_told_with_its_reason(
    tmp_path: Path, watch: testing.Watch, capfd: pytest.CaptureFixture[str]
) -> None:
    training = Training(tmp_path, every="auto")
    training.saves.restore(training.state)
    training.steps(1, 3)
    training.saves.save(3, training.state)
    training.saves.close()
    [chosen] = facts_of(watch, IntervalChosen)
    assert 30 <= chosen.every_s < 3600, "a save costs next to nothing"
    assert "a save costs" in chosen.reason
    assert f"saving every {chosen.every_s:.4g} s" in capfd.readouterr().err


def test_a_step_that_was_asked_for_and_is_not_there_is_told(
    tmp_path: Path, watch: testing.Watch
) -> None:
    training = Training(tmp_path)
    training.steps(1, 5)
    with pytest.raises(RestoreError, match="there are 5"):
        training.saves.restore(training.state, step=4)
    training.saves.close()
    [failed] = facts_of(watch, RestoreFailed)
    assert failed.wanted_step == 4


def test_going_back_says_that_newer_ones_are_still_there(
    tmp_path: Path, watch: testing.Watch, capfd: pytest.CaptureFixture[str]
) -> None:
    training = Training(tmp_path)
    training.steps(1, 10)
    found = training.saves.restore(training.state, step=5)
    training.saves.close()
    assert found is not None
    assert training.weights.tolist() == [5] * 5
    assert "the newer ones, up to 10, are still there" in capfd.readouterr().err
