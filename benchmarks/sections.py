"""Times sections, steps and heartbeats, side by side in one run (A1.4, A6.4).

    python -m benchmarks.sections [--nvrx NVRX/bin/python] [--rounds 5]

`cpu` is everstep with the processor times of sections. Exit code 1 when a section pair or a step
costs more than 1 µs, or a step of 100 ms more than 0.1 %, as medians.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.sectioning.calls import SECTIONS_A_STEP

MOST_NS = 1000.0
MOST_OF_A_STEP = 0.001
STEP_NS = 100e6
TITLES = {
    "pair": "section, entered and left",
    "step": "step",
    "heartbeat": "heartbeat",
    "bundle": f"{SECTIONS_A_STEP} sections and a step, caches swept",
}
Samples = dict[str, list[float]]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nvrx", type=Path, metavar="PYTHON", help="one that has NVRx, as a peer")
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    pythons = dict.fromkeys(("limit", "everstep", "cpu"), sys.executable)
    if asked.nvrx is not None:
        pythons["nvrx"] = str(asked.nvrx)
    found: dict[str, Samples] = {name: {} for name in pythons}
    for _ in range(asked.rounds):  # in turns: what else this machine does hits all of them
        for name, python in pythons.items():
            for call, times in run(python, name).items():
                found[name].setdefault(call, []).extend(times)
    print(f"load {os.getloadavg()[0]:.1f}; nanoseconds")
    show(found)
    return judge(found)


def run(python: str, name: str) -> Samples:
    command = [python, "-m", "benchmarks.sectioning.calls", name]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    samples: Samples = json.loads(done.stdout)
    return samples


def show(found: dict[str, Samples]) -> None:
    for call, title in TITLES.items():
        print(f"\n{title:44}{'min':>12}{'p50':>12}{'p99':>12}{'max':>14}{'n':>8}")
        for name, samples in found.items():
            times = sorted(samples[call])
            row = (times[0], at(times, 0.5), at(times, 0.99), times[-1])
            shown = "".join(f"{one:12,.0f}" for one in row[:3])
            print(f"{name:44}{shown}{row[3]:14,.0f}{len(times):8}")
    print()
    for name, samples in found.items():
        shares = [at(sorted(samples["bundle"]), part) / STEP_NS for part in (0.5, 0.99)]
        print(f"{name}: {shares[0]:.4%} of a step of 100 ms (p99 {shares[1]:.4%})")
    if "nvrx" in found:
        for call in ("pair", "heartbeat"):
            ours, theirs = (statistics.median(found[one][call]) for one in ("everstep", "nvrx"))
            print(f"{TITLES[call]}: 1/{theirs / ours:.0f} of NVRx's")


def judge(found: dict[str, Samples]) -> int:
    ours = {call: statistics.median(times) for call, times in found["everstep"].items()}
    met = max(ours["pair"], ours["step"]) <= MOST_NS and ours["bundle"] <= MOST_OF_A_STEP * STEP_NS
    word = "met" if met else "MISSED"
    print(f"target: {MOST_NS:,.0f} ns and {MOST_OF_A_STEP:.1%} of a step; {word}")
    return 0 if met else 1


def at(times: Sequence[float], part: float) -> float:
    return times[min(len(times) - 1, int(part * len(times)))]


if __name__ == "__main__":
    sys.exit(main())
