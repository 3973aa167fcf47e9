"""Saves of tensors on a GPU: copied by a stream of their own, while the training goes on."""

from pathlib import Path

import pytest
import torch

from tests.saved_by import load, same, saving

pytestmark = pytest.mark.gpu


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("is_lazy", [True, False])
def test_what_is_saved_is_the_state_at_the_call(tmp_path: Path, is_lazy: bool) -> None:
    weight = torch.nn.Parameter(torch.randn(4 << 20, device="cuda"))
    optimizer = torch.optim.AdamW([weight], lr=0.1)
    with saving(tmp_path, is_lazy=is_lazy, optimizers=(optimizer,)) as rank:
        for step in range(1, 6):
            expected = {"weight": weight.detach().cpu().clone()}
            rank.save(step, {"weight": weight})
            weight.grad = torch.randn_like(weight)
            optimizer.step()
            rank.finish()
            found = load(tmp_path, step, {"weight": torch.zeros_like(expected["weight"])})
            assert same(found, expected), f"step {step}"
