"""A training whose ranks can be slowed, and which reports how many steps it has made.

Arguments: the folder, `sections` or `plain`, and a `Shape` as JSON. While `FOLDER/slow-KIND-RANK`
exists, that rank loses the seconds that the file holds, in each step: `input` where it reads its
data, `compute` in backward, before gradients are exchanged. `FOLDER/steps-RANK` holds the number of
its steps. With `plain` it knows nothing of Everstep. It ends once `FOLDER/end` is there.
"""

import contextlib
import os
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    import trainer_sdk

_BATCH = 256


class Shape(msgspec.Struct, frozen=True):
    """What a step consists of."""

    rest_s: float = 0.16
    """Of waiting for data."""
    repeats: int = 1
    """How often the model is computed."""
    width: int = 256
    """The number of squared gradients that are exchanged."""


def main(folder: Path, how: str, shape: Shape) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    if how == "plain":
        train(folder, None, shape)
    else:
        import trainer_sdk

        with trainer_sdk.session() as run:
            train(folder, run, shape)
    dist.destroy_process_group()


def train(folder: Path, run: "trainer_sdk.Session | None", shape: Shape) -> None:
    rank, end, made = dist.get_rank(), torch.zeros(1), 0
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(shape.width, shape.width), nn.Tanh(), nn.Linear(shape.width, 1))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    inputs = torch.randn(_BATCH, shape.width)
    model.module[-1].register_full_backward_pre_hook(lambda *_: lose(folder, "compute", rank))
    section = no_section if run is None else run.section
    with (folder / f"steps-{rank}").open("wb", buffering=0) as steps:
        while not end:
            with section("data"):
                time.sleep(shape.rest_s)
                lose(folder, "input", rank)
            with section("forward"):
                for _ in range(shape.repeats - 1):
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
            made += 1
            os.pwrite(steps.fileno(), b"%10d" % made, 0)


def lose(folder: Path, kind: str, rank: int) -> None:
    with contextlib.suppress(FileNotFoundError, ValueError):
        time.sleep(float((folder / f"slow-{kind}-{rank}").read_text()))


no_section: Callable[[str], AbstractContextManager[None]] = contextlib.nullcontext  # type: ignore[assignment]


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], msgspec.json.decode(sys.argv[3], type=Shape))
