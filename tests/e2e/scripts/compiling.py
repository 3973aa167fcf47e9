"""Two ranks whose forward pass torch compiles again in the middle of the training.

From step 3 on its input has another shape. What rank 0 compiles then is not done before the file
`compiled` is there; it makes the file `compiles` when it begins. Rank 1 waits for it. Where `hang`
is there, rank 0 of the first round hangs in its next forward pass; `end` ends the training.
"""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

import trainer_sdk

STEPS_BEFORE = 3
HANGS = 2.0


def main(folder: Path) -> None:
    run = trainer_sdk.session()
    dist.init_process_group("gloo")
    is_first = dist.get_rank() == 0

    def backend(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Callable[..., object]:
        if is_first and run.steps_made >= STEPS_BEFORE:
            (folder / "compiles").touch()
            wait_for(folder / "compiled")
        return graph.forward

    forward = torch.compile(torch.sin, backend=backend, dynamic=False)
    go_on = torch.ones(1)
    while go_on.item():
        with run.section("forward"):
            forward(torch.ones(4 if run.steps_made < STEPS_BEFORE else 5))
            if go_on.item() == HANGS:  # both ranks know it from rank 0, in the same step
                if is_first and os.environ["EVERSTEP_ROUND"] == "1":
                    (folder / "hangs").touch()
                    time.sleep(1000)
                wait_for(folder / "hangs")  # so that rank 0 has stopped before rank 1 waits for it
        with run.section("exchange"):
            hangs = HANGS if (folder / "hang").exists() else 1.0
            go_on.fill_(0.0 if (folder / "end").exists() else hangs)
            dist.broadcast(go_on, 0)
            time.sleep(0.02)
        run.step()
    dist.destroy_process_group()


def wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.02)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
