"""A thousand saves whose tensors change at once: each image is the state at the call."""

import random
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.saved_by import saving
from trainer_sdk.checkpoint.manifest import IMAGE, INDEX, ImageIndex, decode
from trainer_sdk.checkpoint.reading import flatten
from trainer_sdk.checkpoint.readying import Wish

SAVES = 1000


@pytest.mark.chaos
@pytest.mark.timeout(600)
@pytest.mark.parametrize("is_lazy", [True, False])
def test_a_thousand_saves_hold_what_was_there(is_lazy: bool) -> None:
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
            rank.saver.save(Wish(step=number, to_root=False), state)
            state["own"].fill_(number)
            for _ in range(dice.randrange(3)):
                step()
            rank.finish()
            found = _image(Path(rank.events("image")[-1]["folder"]), number)
            wanted = {key: one for key, one in expected.items() if one is not None}
            assert {key: found[key] for key in wanted} == wanted, f"save {number}"
    assert not rank.told.warned


def _bytes(value: object) -> bytes | None:
    if not isinstance(value, torch.Tensor):
        return None
    return bytes(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


def _image(folder: Path, step: int) -> dict[str, bytes]:
    index = decode((folder / INDEX).read_bytes(), ImageIndex, INDEX)
    assert index.identity.step == step
    octets = (folder / IMAGE).read_bytes()
    return {one.key: octets[one.offset : one.offset + one.length] for one in index.entries}
