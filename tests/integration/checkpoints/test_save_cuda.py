"""Saves of tensors on a GPU: copied by a stream of their own, while the training goes on."""

from pathlib import Path

import pytest
import torch

from tests.checkpoint_helpers.saved_by import load, same, saving

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize("is_lazy", [True, False])
def test_what_is_saved_is_the_state_at_the_call(tmp_path: Path, is_lazy: bool) -> None:
    """Steps on the GPU follow each call at once (A8.3)."""
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


def test_what_is_changed_without_its_optimizer_is_never_saved_wrong(tmp_path: Path) -> None:
    """The copy takes longer than the change, which torch does not count (A8.3)."""
    weight = torch.nn.Parameter(torch.randn(128 << 20, device="cuda"))
    average = torch.randn_like(weight)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    with saving(tmp_path, optimizers=(optimizer,)) as rank:
        rank.save(1, {"weight": weight})
        assert rank.finish() == [1]
        torch.cuda.synchronize()
        rank.save(2, {"weight": weight})
        weight.data.copy_(average)
        assert rank.finish() == []
        assert "weight was changed before the optimizer's step" in rank.told.warned[0]
        expected = {"weight": weight.detach().cpu()}
        rank.save(3, {"weight": weight})
        weight.data.zero_()
        assert rank.finish() == [3]
    assert same(load(tmp_path, 3, {"weight": torch.zeros_like(expected["weight"])}), expected)
