"""How long `dcp.save` and `dcp.async_save` hold a training up: torch's writer and ours, in one run.

    python -m benchmarks.dcp_saves [--mib 256] [--ranks 2] [--rounds 7] [--folder DIR]

All save in turns, in the same processes, the same tensors of `--mib` MiB in all. `stall` is how
long the call blocks, `durable` until the checkpoint is visible and synced. Ours are `DcpWriter`,
with `DcpStager` where the save is asynchronous, and `keep_memory` where the name has `memory`. The
limit is a copy into warm memory, then a plain synced write of the same bytes.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.checkpoints import Samples, of, run, show

LIMIT = "limit"
SYNC = ("dcp", "everstep-dcp", "everstep-dcp-memory")
ASYNC = ("dcp-async-thread", "everstep-dcp-async", "everstep-dcp-async-memory")
PAIRS = ((SYNC[0], SYNC[1:]), (ASYNC[0], ASYNC[1:]))
"""Torch's way, and ours that do the same."""


def main() -> int:
    asked = _asked()
    began, load = time.monotonic(), os.getloadavg()[0]
    names = (LIMIT, *SYNC, *ASYNC)
    with tempfile.TemporaryDirectory(dir=asked.folder, prefix="everstep-bench-") as folder:
        mib = asked.mib // asked.ranks
        case = [",".join(names), str(mib), str(asked.rounds), folder]
        samples = run(sys.executable, asked.ranks, case)
    if not samples:
        print("a rank has failed: run benchmarks.checkpointing.case by hand", file=sys.stderr)
        return 1
    print(f"{asked.mib} MiB, {asked.ranks} ranks, load {load:.1f}; milliseconds")
    for name in names:
        show(name, of(name, samples))
    print()
    for theirs, ours in PAIRS:
        for name in ours:
            stall, durable = (ratio(samples, theirs, name, what) for what in ("stall", "durable"))
            print(f"{theirs}: {stall:.2f} times the stall of {name}, durable after {durable:.2f}")
    print(f"{os.cpu_count()} cores; took {time.monotonic() - began:.0f} s")
    return 0


def ratio(samples: Samples, theirs: str, ours: str, what: str) -> float:
    """How many times ours theirs takes, by the medians."""
    own, other = (statistics.median(of(name, samples)[what]) for name in (ours, theirs))
    return other / own


def _asked() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=256, help="of all ranks together (256)")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, help="on the disk to measure")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
