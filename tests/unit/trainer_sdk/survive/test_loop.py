"""Without an agent a training simply runs, from where its checkpoints are."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from trainer_sdk import sdk_log
from trainer_sdk.bootstrap.agent_link import AgentLink
from trainer_sdk.checkpoint import Checkpointer
from trainer_sdk.checkpoint.restore.restore import Restored
from trainer_sdk.environment import environ
from trainer_sdk.numerics.rollback import record
from trainer_sdk.rank_session import Session, replace_session
from trainer_sdk.survive.loop import SurvivalChoices, SurvivingTraining


def build() -> dict[str, Any]:
    model = nn.Linear(3, 1)
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}


def make_step(state: dict[str, Any]) -> None:
    state["model"](torch.rand(4, 3)).square().mean().backward()
    state["optimizer"].step()
    state["optimizer"].zero_grad()


@pytest.fixture(autouse=True)
def run(monkeypatch: pytest.MonkeyPatch) -> Any:
    for name in ("RANK", "WORLD_SIZE", "EVERSTEP_SURVIVE"):
        monkeypatch.delitem(environ, name, raising=False)
    monkeypatch.setattr(sdk_log, "_printed", set())
    made = Session(AgentLink({}))
    former = replace_session(made)
    yield made
    replace_session(former)


def test_it_runs_and_tells_what_is_missing(run: Session, capfd: pytest.CaptureFixture[str]) -> None:
    @run.survive(build)
    def train(state: dict[str, Any], step: int) -> list[int]:
        steps = [step]
        for _ in range(2):
            make_step(state)
            steps.append(run.step())
        return steps

    assert train() == [0, 1, 2]
    assert (
        "this training does not survive the failure of a rank: only `ever" in capfd.readouterr().err
    )
    make_step(build())  # no step of `run` any more
    assert run.step() == 3


def test_it_begins_where_its_checkpoints_are(run: Session, tmp_path: Path) -> None:
    weights = []

    def trained(until: int) -> int:
        @run.survive(build, checkpointer=lambda: Checkpointer(tmp_path / "root", every=1000))
        def train(state: dict[str, Any], step: int, saves: Checkpointer) -> int:
            begun = step
            weights.append(state["model"].weight.clone())
            while step < until:
                make_step(state)
                step = run.step()
            weights.append(state["model"].weight.clone())
            saves.save(step, state, wait=True)
            saves.close()
            return begun

        return train()

    assert trained(until=3) == 0
    assert trained(until=5) == 3
    assert torch.equal(weights[1], weights[2])


def test_a_roll_back_in_place_moves_the_boundary(run: Session, tmp_path: Path) -> None:
    choices = SurvivalChoices(
        build, lambda: Checkpointer(tmp_path / "root", every=1000), "", 0, 1.0, None
    )
    training = SurvivingTraining(run, choices, None)
    torn = []

    def train(state: dict[str, Any], step: int, saves: Checkpointer) -> int | None:
        make_step(state)
        saves.save(run.step(), state, wait=True)
        make_step(state)
        run.step()
        # What fails while the state is loaded leaves a mixture.
        state["extra"] = Watching(lambda: torn.append(training._boundary.is_torn))
        act = record("a case", "rollback", 2, "a reason", before_step=2)
        assert isinstance(saves.roll_back(state, act, saves.acts()), Restored)
        return training._boundary.step

    assert training.run(train) == 1
    training.close()
    assert torn[0]


class Watching:
    def __init__(self, loads: Callable[[], None]) -> None:
        self._loads = loads

    may_be_absent = True

    def state_dict(self) -> dict[str, Any]:
        self._loads()
        return {}

    def load_state_dict(self, _: dict[str, Any]) -> None:
        pass


def test_a_build_that_returns_something_else_is_refused(run: Session) -> None:
    with pytest.raises(TypeError, match="build must return a dict"):
        run.survive(lambda: nn.Linear(1, 1))(lambda *_: None)()  # type: ignore[arg-type, return-value]
