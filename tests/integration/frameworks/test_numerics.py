"""Results that cannot be right, as all frameworks look at them, on two real gloo ranks."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from tests.integration.frameworks.in_process import TRAININGS
from tests.integration.frameworks.ranks import ROOT, SCRIPTS
from trainer_sdk import testing
from trainer_sdk.integrations import framework_session
from trainer_sdk.wire import NumericsReported

KNOWN, HASH_EVERY = 60, 100
Ranks = list[dict[str, Any]]
pytestmark = [pytest.mark.timeout(400), pytest.mark.xdist_group("framework_numerics")]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """What each rank tells of each case."""
    folder = tmp_path_factory.mktemp("looked_at")
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / "looked_at.py"), str(folder)],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]


def events(results: Ranks, case: str) -> list[tuple[str, int, str]]:
    """The events of the first rank: name, step, and what was seen or done."""
    return [
        (name, body["step"], body.get("action") or body.get("kind") or body["signal"])
        for name, body in results[0][case]["events"]
    ]


def test_a_value_of_the_last_step_is_reported(results: Ranks) -> None:
    assert events(results, "last_step") == [("suspected", 5, "nan")]


def test_replicas_that_differ_at_the_end_are_reported(results: Ranks) -> None:
    assert events(results, "last_parameters")[:2] == [
        ("suspected", 5, "replicas_differ"),
        ("judged", 5, "replica_differs"),
    ]


def test_a_spike_right_after_a_restart_is_noticed(results: Ranks) -> None:
    """The statistics of the round before are known."""
    assert events(results, "spike_after_a_restart") == [("suspected", KNOWN + 1, "loss_spike")]


def test_a_loss_that_does_not_continue_after_a_restart_is_noticed(
    results: Ranks,
) -> None:
    """Its own spread would not tell: the median of 8 losses is compared."""
    seen = events(results, "another_loss_after_a_restart")
    assert seen == [("suspected", KNOWN + 8, "restored_loss")]
    assert events(results, "same_loss_after_a_restart") == []


def test_replicas_that_differ_end_the_job_on_all_ranks(results: Ranks) -> None:
    assert [rank["stop"]["ended"] for rank in results] == ["exit 17", "exit 17"]
    assert ("acted", "stop") in [(name, what) for name, _, what in events(results, "stop")]


def test_replicas_that_differ_lead_back_to_when_they_were_equal(
    results: Ranks,
) -> None:
    """They were equal at the first hash; checkpoints since then are quarantined."""
    assert [rank["rollback"]["ended"] for rank in results] == ["restart", "restart"]
    assert results[0]["rollback"]["good"] == [*range(10, HASH_EVERY, 10)]


@pytest.mark.parametrize("case", ["error_on_a_single_rank", "error_of_a_single_rank_at_a_hash"])
def test_an_error_on_a_single_rank_hangs_no_other(results: Ranks, case: str) -> None:
    """All ranks train to the end, and look at nothing after it."""
    assert [rank[case]["ended"] for rank in results] == ["", ""]
    assert len({rank[case]["step"] for rank in results}) == 1


@pytest.mark.filterwarnings("ignore")  # Lightning warns of itself
@pytest.mark.parametrize("framework", TRAININGS)
def test_statistics_are_in_the_checkpoints_of_a_framework(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, framework: str
) -> None:
    """So a spike is noticed in the first step after a restart."""
    monkeypatch.setattr(framework_session, "_reporting", [])  # as in a process of its own
    used: list[int] = []
    with testing.watched():
        TRAININGS[framework](tmp_path, KNOWN, used)
    with testing.watched() as watch:
        TRAININGS[framework](tmp_path, KNOWN + 1, used, scale=1e4)
    assert len(used) == KNOWN + 1
    events = [message for message in watch.messages if isinstance(message, NumericsReported)]
    suspected = [event.body for event in events if event.event == "suspected"]
    assert [(body["step"], body["signal"]) for body in suspected] == [(KNOWN + 1, "loss_spike")]


def test_statistics_are_in_the_states_that_lightning_keeps_in_memory() -> None:
    """A state from before them can be restored, too."""
    pytest.importorskip("lightning.pytorch")
    from trainer_sdk.integrations.lightning import _Progress

    kept = {"rank-0-of-1": "statistics"}
    trainer, numerics = Mock(lr_scheduler_configs=[]), Mock()
    trainer.fit_loop.state_dict.return_value = {}
    numerics.state_dict.return_value = kept
    state = _Progress(trainer, numerics).state_dict()
    _Progress(trainer, numerics).load_state_dict(state)
    numerics.load_state_dict.assert_called_once_with(kept)
    before = _Progress(trainer, None).state_dict()
    _Progress(trainer, numerics).load_state_dict(before)
    numerics.load_state_dict.assert_called_with({})
