"""A training that writes down each step that it has done; told to stop, it saves, and ends.

Its arguments are a folder, the number of steps, and how long one takes. COUNTED_EVERY is how often
it saves, and COUNTED_SIZE how many numbers.
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import trainer_sdk
from trainer_sdk.checkpoint import Checkpointer


def main(folder: Path, steps: int, step_s: float) -> None:
    dist.init_process_group("gloo")
    rank, total = dist.get_rank(), torch.ones(1)
    state = {"weights": torch.zeros(int(os.environ.get("COUNTED_SIZE", "1000")))}
    with trainer_sdk.session() as run, (folder / f"steps-{rank}").open("a") as done:
        saves = Checkpointer(folder / "saved", every=int(os.environ.get("COUNTED_EVERY", "10")))
        found = saves.restore(state)
        step = 0 if found is None else found.step
        place = f"{os.environ['EVERSTEP_ROUND']} {os.environ.get('SLURMD_NODENAME', '')}"
        run.start_at(step)
        while step < steps and not run.should_stop:
            assert bool((state["weights"] == step).all()), "not the state of the step before"
            dist.all_reduce(total.fill_(1.0))
            time.sleep(step_s)
            step = run.step()
            state["weights"].fill_(float(step))
            done.write(f"{step} {place} {time.time():.3f}\n")
            done.flush()
            saves.step(step, state)
        saves.save(step, state, wait=True)
        saves.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
