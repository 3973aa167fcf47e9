"""A thousand saves whose tensors change at once: each image is the state at the call, or none."""

import random
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.changed import save_and_change, save_in_small_pieces, save_in_waves
from tests.checkpoint_helpers.saved_by import saving
from trainer_sdk.checkpoint.flat_state import flatten
from trainer_sdk.checkpoint.manifest import IMAGE, INDEX, ImageIndex, decode
from trainer_sdk.checkpoint.save.request import SaveRequest

SAVES = 1000


@pytest.mark.chaos
@pytest.mark.timeout(600)
@pytest.mark.parametrize("is_lazy", [True, False])
def test_a_thousand_saves_hold_what_was_there(is_lazy: bool) -> None:
    """Steps and direct writes follow each call at once (A8.3)."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 300), torch.nn.BatchNorm1d(300))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "own": torch.zeros(999)}
    dice = random.Random(5)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(8, 64)).square().sum().backward()
        optimizer.step()

    step()
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as folder,
        saving(Path(folder), keeps=True, buffers=2, is_lazy=is_lazy, root="") as rank,
    ):
        for number in range(1, SAVES + 1):
            expected = {key: _bytes(one) for key, one in flatten(state).values.items()}
            rank.saver.save(SaveRequest(step=number, to_root=False), state)
            state["own"].fill_(number)
            for _ in range(dice.randrange(3)):
                step()
            rank.finish()
            found = _image(Path(rank.events("image")[-1]["folder"]), number)
            wanted = {key: one for key, one in expected.items() if one is not None}
            assert {key: found[key] for key in wanted} == wanted, f"save {number}"
    assert not rank.told.warned


@pytest.mark.chaos
@pytest.mark.timeout(600)
@pytest.mark.parametrize("is_lazy", [True, False])
def test_what_torch_does_not_count_is_saved_as_it_was_or_not_at_all(is_lazy: bool) -> None:
    """Everything the optimizer owns is written over through `.data` or NumPy (A8.3)."""
    model = torch.nn.Sequential(torch.nn.Linear(500, 2000), torch.nn.Linear(2000, 500))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(8, 500)).square().sum().backward()
    optimizer.step()
    state: dict[str, Any] = {"model": model, "optimizer": optimizer}
    dice = random.Random(6)
    owned = [*model.parameters()]
    owned += [one[key] for one in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
    refused = 0
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as folder,
        saving(Path(folder), keeps=True, buffers=2, is_lazy=is_lazy, root="") as rank,
    ):
        for number in range(1, SAVES // 5 + 1):
            expected = {key: _bytes(one) for key, one in flatten(state).values.items()}
            rank.saver._is_lazy = is_lazy  # a save that was refused has turned it off
            rank.saver.save(SaveRequest(step=number, to_root=False), state)
            for _ in range(dice.randrange(20_000)):
                """The copy goes on meanwhile."""
            for one in dice.sample(owned, len(owned)):
                if dice.random() < 0.5:
                    one.data.copy_(torch.full_like(one, number))
                else:
                    one.detach().numpy()[...] = -number
            if not rank.finish():
                assert "was changed before the optimizer's step" in rank.told.warned.pop()
                refused += 1
                continue
            found = _image(Path(rank.events("image")[-1]["folder"]), number)
            wanted = {key: one for key, one in expected.items() if one is not None}
            assert {key: found[key] for key in wanted} == wanted, f"save {number}"
    assert not rank.told.warned
    assert is_lazy or not refused


@pytest.mark.chaos
@pytest.mark.timeout(600)
@pytest.mark.parametrize("is_lazy", [True, False])
def test_a_thousand_states_that_a_writer_begins_early_are_what_was_there(
    monkeypatch: pytest.MonkeyPatch, is_lazy: bool
) -> None:
    """The writer reads while the state is still being copied (A8.3)."""
    seen = save_in_small_pieces(monkeypatch, SAVES, is_lazy=is_lazy)
    assert min(seen.killed, seen.refused if is_lazy else SAVES) > SAVES // 5


@pytest.mark.chaos
@pytest.mark.timeout(600)
def test_500_states_in_waves_are_what_was_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """The state is larger than the memory for it (A8.3)."""
    seen = save_in_waves(monkeypatch, SAVES // 2)
    assert seen.killed == seen.refused > SAVES // 10


@pytest.mark.chaos
@pytest.mark.timeout(600)
@pytest.mark.parametrize("is_lazy", [True, False])
def test_large_states_that_change_at_any_moment_are_saved_as_they_were_or_not_at_all(
    monkeypatch: pytest.MonkeyPatch, is_lazy: bool
) -> None:
    """In pieces of their usual size; nobody waits for the change (A8.3)."""
    saves = SAVES // 20
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        seen = save_and_change(
            Path(folder), monkeypatch, saves=saves, values=3 << 20, is_lazy=is_lazy, races=True
        )
    assert seen.ahead == saves
    assert seen.killed


def _bytes(value: object) -> bytes | None:
    if not isinstance(value, torch.Tensor):
        return None
    return bytes(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


def _image(folder: Path, step: int) -> dict[str, bytes]:
    index = decode((folder / INDEX).read_bytes(), ImageIndex, INDEX)
    assert index.identity.step == step
    octets = (folder / IMAGE).read_bytes()
    return {one.key: octets[one.offset : one.offset + one.length] for one in index.entries}
