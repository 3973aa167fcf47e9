"""A training whose ranks can be slowed while it runs, by files that somebody makes and removes.

Arguments: the folder, `sections` or `plain`, and how often each step computes its batch (once).
While `FOLDER/slow-KIND-RANK` exists, the rank of that number loses the seconds that the file holds,
in each step: `input` where it reads its data, `compute` in backward, before gradients are
exchanged. With `plain` it knows nothing of Everstep. Ends once `FOLDER/end` is there, on all ranks
after the same step.
"""

import contextlib
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    import trainer_sdk

_READ_S = 0.03
_BATCH, _WIDTH = 256, 256


def main(folder: Path, how: str, repeats: int = 1) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    if how == "plain":
        _train(folder, None, repeats)
    else:
        import trainer_sdk

        with trainer_sdk.session() as run:
            _train(folder, run, repeats)
    dist.destroy_process_group()


def _train(folder: Path, run: "trainer_sdk.Session | None", repeats: int) -> None:
    rank, end = dist.get_rank(), torch.zeros(1)
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.Tanh(), nn.Linear(_WIDTH, 1))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    inputs = torch.randn(_BATCH, _WIDTH)
    model.module[-1].register_full_backward_pre_hook(lambda *_: _lose(folder, "compute", rank))
    section = _no_section if run is None else run.section
    while not end:
        with section("data"):
            time.sleep(_READ_S)
            _lose(folder, "input", rank)
        with section("forward"):
            for _ in range(repeats - 1):
                model.module(inputs)
            loss = model(inputs).square().mean()
        with section("backward"):
            loss.backward()
        with section("optimizer"):
            optimizer.step()
            optimizer.zero_grad()
            end.fill_((folder / "end").exists())
            dist.all_reduce(end)
        if run is not None:
            run.step()


def _lose(folder: Path, kind: str, rank: int) -> None:
    with contextlib.suppress(FileNotFoundError, ValueError):
        time.sleep(float((folder / f"slow-{kind}-{rank}").read_text()))


_no_section: Callable[[str], AbstractContextManager[None]] = contextlib.nullcontext  # type: ignore[assignment]


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:]))
