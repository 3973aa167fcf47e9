"""Saves and restores work the same in each mode of torch."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint_helpers.saved_by import WITHIN_S
from trainer_sdk import testing
from trainer_sdk.checkpoint import Checkpointer, FileSaver


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    with testing.watched():
        yield


def training() -> dict[str, Any]:
    model = torch.nn.Sequential(torch.nn.Linear(200, 200), torch.nn.BatchNorm1d(200))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 200)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "turned": torch.randn(50, 60).t()}


def tensors(state: dict[str, Any]) -> list[torch.Tensor]:
    inner = [one for each in state["optimizer"].state.values() for one in each.values()]
    return [*state["model"].state_dict().values(), *inner, state["turned"]]


AROUND: dict[str, Callable[[], Any]] = {
    "device": lambda: torch.device("meta"),
    "inference": torch.inference_mode,
    "no_grad": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
}


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("tier", ["memory", "global"])
def test_modes_of_torch_do_not_affect_saves_and_restores(
    around: str, tier: str, tmp_path: Path
) -> None:
    state, other = training(), training()
    first = Checkpointer(tmp_path / "root", on_error="fatal", keep_memory=True)
    with AROUND[around]():
        first.save(5, state)
        first.maybe_finalize(blocking=True, within_s=WITHIN_S)
    first._close(abort=False, is_failing=tier == "memory")
    keeps = tier == "memory"
    with (
        Checkpointer(tmp_path / "root", on_error="fatal", keep_memory=keeps) as second,
        AROUND[around](),
    ):
        found = second.restore(other)
        assert found is not None
        assert found.tier == tier
        second.save(6, other)
    for one, again in zip(tensors(state), tensors(other), strict=True):
        assert torch.equal(one, again)


def test_a_default_device_changes_no_file(tmp_path: Path) -> None:
    try:
        torch.set_default_device("meta")
        files = FileSaver("fatal")
        files.schedule({"a": torch.ones(3, device="cpu")}, tmp_path / "x.pt")
        files.close()
    finally:
        torch.set_default_device(None)
    assert torch.load(tmp_path / "x.pt")["a"].tolist() == [1, 1, 1]
