"""A training with gloo whose steps nobody counts: no optimizer of torch's, no session.

    uncounted.py FOLDER LATE_RANK LATE_S

It ends when the file `end` is in the folder.
"""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist


def main(folder: Path, late_rank: int, late_s: float) -> None:
    dist.init_process_group("gloo")
    own_s = 0.05 + (late_s if dist.get_rank() == late_rank else 0.0)
    weight, go_on = torch.ones(8), torch.ones(1)
    while go_on.item():
        time.sleep(own_s)
        gradient = weight * 0.1
        dist.all_reduce(gradient)
        weight = weight - 1e-3 * gradient
        go_on.fill_(0.0 if (folder / "end").exists() else 1.0)
        dist.broadcast(go_on, 0)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
