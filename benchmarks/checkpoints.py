"""Saves a state by all means there are, side by side: what the training pays, when it is durable.

    python -m benchmarks.checkpoints [--gib 1] [--ranks 1] [--rounds 5] [--folder DIR]
                                     [--nvrx NVRX/bin/python] [--saves 200]

The limit and ours save in turns, if the memory is enough for that: a disk is now faster and now
slower, by what it has just written.

Exit code 1 when a median misses: eager, 1.15 of a copy of the bytes into warm memory; lazy, 10 ms a
GiB; durable, 1/0.9 of a plain write of them, synced; a busy step meanwhile, 1.05; a restore
from the memory of the node, 1.3 of a copy; memory and descriptors after all saves, 1.02 of those
after a few (A8.4).
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import psutil

from benchmarks.checkpointing.flat import flat
from benchmarks.rig import HEAD, row

OURS = ("everstep", "everstep-lazy")
PEERS = ("dcp", "dcp-async-thread", "dcp-async-process")
NVRX = ("nvrx", "nvrx-fork")
_STATES_IN_TURNS = 5
"""The state, a copy of each of three contenders, and some room."""
MOST_EAGER, MOST_LAZY_MS_A_GIB, LEAST_OF_WRITE, MOST_BUSY = 1.15, 10.0, 0.9, 1.05
MOST_RESTORE = 1.3
_WITHIN_S = 900.0
Samples = dict[str, list[float]]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gib", type=float, default=1.0, help="of all ranks together")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="on the disk to measure")
    parser.add_argument("--nvrx", type=Path, metavar="PYTHON", help="one that has NVRx, as a peer")
    parser.add_argument("--saves", type=int, default=200, help="for memory; 0 leaves it out")
    asked = parser.parse_args()
    limits = ("limit", *OURS)
    has_room = psutil.virtual_memory().available > _STATES_IN_TURNS * asked.gib * 2**30
    first = (",".join(limits),) if has_room else limits
    mib = int(asked.gib * 1024 / asked.ranks)
    print(f"{asked.gib:g} GiB, {asked.ranks} ranks, load {os.getloadavg()[0]:.1f}; milliseconds")
    found: dict[str, Samples] = {}
    with tempfile.TemporaryDirectory(dir=asked.folder, prefix="everstep-bench-") as folder:
        for names in [*first, *PEERS, *(NVRX if asked.nvrx else ())]:
            python = str(asked.nvrx) if names in NVRX else sys.executable
            samples = run(python, asked.ranks, [names, str(mib), str(asked.rounds), folder])
            for name in names.split(","):
                found[name] = of(name, samples)
                show(name, found[name])
        steps = ["everstep-lazy", str(mib), "1", folder]
        hurried = run(sys.executable, asked.ranks, [*steps, "busy"])
        show("busy step, and somebody waits for the save", hurried)
        paced = run(sys.executable, asked.ranks, [*steps, "paced"])
        show("busy step, and nobody waits", paced)
        back = run(sys.executable, asked.ranks, ["restore", str(mib), str(asked.rounds), folder])
        show("restore from own memory", back)
    is_flat = not asked.saves or flat(asked.saves)
    return 0 if judge(found, hurried, paced, back, asked.gib / asked.ranks) and is_flat else 1


def run(python: str, ranks: int, case: Sequence[str]) -> Samples:
    """The slowest rank's times."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(ranks)}
    common |= {"EVERSTEP_ATTACH": "off", "PYTHONPATH": str(Path(__file__).parents[1])}
    common |= {"CUDA_VISIBLE_DEVICES": ""}
    if ranks > 1:
        common |= {"OMP_NUM_THREADS": "1"}  # as launchers have it
    processes = [
        subprocess.Popen(
            [python, "-m", "benchmarks.checkpointing.case", *case],
            env=os.environ | common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        said = [one.communicate(timeout=_WITHIN_S)[0] for one in processes]
    except subprocess.TimeoutExpired:
        said = []
    finally:
        for one in processes:
            one.kill()
    if not said or any(one.returncode for one in processes):
        return {}
    samples: Samples = json.loads(said[0].splitlines()[-1])
    return samples


def of(name: str, samples: Samples) -> Samples:
    """Those of one contender."""
    by_names = ((key.split(), values) for key, values in samples.items())
    return {what: values for (whose, what), values in by_names if whose == name}


def show(name: str, samples: Samples) -> None:
    if not samples:
        print(f"\n{name}: does not run here")
        return
    print(f"\n{name}\n{HEAD}")
    for key, values in samples.items():
        if key != "later":
            print(row(f"  {key}", values))
    if samples.get("later"):
        what = "LATER VALUES than those" if max(samples["later"]) else "what was there"
        print(f"  stores {what} at the call")


def judge(
    found: dict[str, Samples], hurried: Samples, paced: Samples, back: Samples, gib: float
) -> bool:
    middle = {
        name: {key: statistics.median(values) for key, values in samples.items() if values}
        for name, samples in found.items()
        if samples
    }
    copy, write = middle["limit"]["stall"], middle["limit"]["written"]
    lines = [
        at_most("eager stall, of one copy", middle["everstep"]["stall"] / copy, MOST_EAGER),
        at_most("lazy stall, ms a GiB", middle["everstep-lazy"]["stall"] / gib, MOST_LAZY_MS_A_GIB),
        at_most("plain write, of durable", -write / middle["everstep"]["durable"], -LEAST_OF_WRITE),
    ]
    if hurried:
        alone, limit, draining = (statistics.median(values) for values in hurried.values())
        print(f"busy step next to a plain write: {limit / alone:.2f}")
        print(f"busy step while a save drains for which somebody waits: {draining / alone:.2f}")
    if paced:
        alone, draining, _ = (statistics.median(values) for values in paced.values())
        lines.append(at_most("busy step while a save drains", draining / alone, MOST_BUSY))
    if back:
        restore, copy = (statistics.median(back[key]) for key in ("restore", "copy"))
        lines.append(at_most("restore from own memory, of one copy", restore / copy, MOST_RESTORE))
    for name in (*PEERS, *NVRX):
        if name in middle:
            stall, durable = (
                middle[name][key] / middle["everstep"][key] for key in ("stall", "durable")
            )
            print(f"{name}: {stall:.1f} times our eager stall, {durable:.1f} times our durable")
    return all(lines)


def at_most(what: str, value: float, limit: float) -> bool:
    """Negative ones are floors."""
    is_met = value <= limit
    word = "met" if is_met else "MISSED"
    bound = "at least" if limit < 0 else "at most"
    print(f"{what}: {abs(value):.2f} ({bound} {abs(limit):g}): {word}")
    return is_met


if __name__ == "__main__":
    sys.exit(main())
