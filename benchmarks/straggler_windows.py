"""Times the live verdict on slow ranks: a window of all nodes, from bytes to changes (A6.4).

    python -m benchmarks.straggler_windows [--ranks 512 --ranks 4096 …] [--windows 7]

Each rank sends 64 entries into collectives (16 steps of 4 buckets), 5 sections with wall and
processor time, and what the host says; one rank is 30 ms late in steps of 100 ms. `decode`, `hear`
and `close` are this process's processor time; MiB are the most that the process holds, above what
it holds after its imports. For comparison: NVRx's formulas for a report (sections and 64 kernels,
relative and individual) on summaries of as many ranks; its rank 0 matches no entries. Exit code 1
when a window of 16 384 ranks takes more than 1 s to hear and to judge, or when another rank than
the slow one is named.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

import numpy as np

from everstep.messages import (
    ClockOffset,
    CollectiveEntries,
    HostUse,
    NodeTimings,
    RankTiming,
    SectionTiming,
    decode,
    encode,
)
from everstep_services.straggler.domain import scores
from everstep_services.straggler.domain.changes import SlowRankFound
from everstep_services.straggler.domain.job import JobJudge
from everstep_services.straggler.domain.rules import LiveRules
from tests.unit.messages.sketches import sketch_of

SIZES = (512, 4096, 16_384, 100_000)
LIMIT = (16_384, 1.0)
STEPS, BUCKETS, PER_NODE, STEP_S, SLOW, LATE_S = 16, 4, 8, 0.1, 3, 0.03
KERNELS = 64
BEGIN_S = 1_700_000_000.0
SECTIONS = {"": 0.131, "data": 0.01, "forward": 0.03, "backward": 0.05, "optimizer": 0.01}
Samples = dict[str, list[float]]


def window(ranks: int, number: int) -> Iterator[bytes]:
    """What the nodes send of one window, node by node."""
    random = np.random.default_rng(number)
    begin_s = BEGIN_S + number * STEPS * (STEP_S + LATE_S + 0.001)
    starts = np.arange(STEPS) * (STEP_S + LATE_S + 0.001)
    sections = tuple(
        SectionTiming(section=name, wall=spread, cpu=spread)
        for name, length in SECTIONS.items()
        for spread in [sketch_of(random.normal(length, length * 0.02, STEPS).tolist())]
    )
    nodes = ranks // PER_NODE
    for node in range(nodes):
        first = node * PER_NODE
        own = np.array([0.07, 0.01, 0.01, 0.01]) * random.normal(
            1, 0.02, (PER_NODE, STEPS, BUCKETS)
        )
        if node == SLOW // PER_NODE:
            own[SLOW % PER_NODE, :, 0] += LATE_S
        us = ((own.cumsum(axis=2) + starts[None, :, None]) * 1e6).astype(int)
        yield encode(
            NodeTimings(
                job="job", node=f"node-{node}", round=1, slot=node, slots=nodes, world=ranks,
                first_step=number * STEPS + 1, last_step=(number + 1) * STEPS,
                window_s=STEPS * (STEP_S + LATE_S),
                clocks=(ClockOffset(clock="straggler-0", offset_s=0.0, error_s=0.0002),),
                ranks=tuple(
                    rank_timing(first + one, number, begin_s, us[one].ravel().tolist(), sections)
                    for one in range(PER_NODE)
                ),
            )
        )  # fmt: skip


def rank_timing(
    rank: int, number: int, begin_s: float, us: list[int], sections: tuple[SectionTiming, ...]
) -> RankTiming:
    entries = CollectiveEntries(
        group="0", first_sequence=number * STEPS * BUCKETS, entered_us=tuple(us),
        ops=tuple(f"all_reduce {1000 + one}" for one in range(BUCKETS)),
        op=tuple(range(BUCKETS)) * STEPS, section=(3,) * (STEPS * BUCKETS),
    )  # fmt: skip
    host = HostUse(
        cpu_s=1.7, main_cpu_s=1.6, runnable_s=0.01, involuntary_switches=9, major_faults=0,
        cpu_pressure_s=0.0, round_trip_s=0.0001, retransmits=0,
    )  # fmt: skip
    return RankTiming(
        rank=rank, steps=STEPS, window_s=STEPS * (STEP_S + LATE_S + 0.001), sections=sections,
        entries_from_s=begin_s, collectives=(entries,), host=host,
    )  # fmt: skip


class Stopwatch:
    """Adds up processor time."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __enter__(self) -> None:
        self._begun = time.process_time()

    def __exit__(self, *_: object) -> None:
        self.seconds += time.process_time() - self._begun


def measure(ranks: int, windows: int) -> Samples:
    """Processor time of each part, window by window; the first one is left out."""
    job = JobJudge("job", LiveRules())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    parts = ("decode", "hear", "close")
    found: Samples = {part: [] for part in (*parts, "named")}
    for number in range(windows + 1):
        took = {part: Stopwatch() for part in parts}
        for body in window(ranks, number):
            with took["decode"]:
                message = decode(body)
            assert isinstance(message, NodeTimings)
            with took["hear"]:
                job.hear(message, float(number))
        with took["close"]:
            changes = job.close_due(float(number))
        found["named"] += [float(one.rank) for one in changes if isinstance(one, SlowRankFound)]
        if number:
            for part in parts:
                found[part].append(took[part].seconds)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found["mib"] = [(after - before) / 1024]
    found["nvrx"] = [nvrx(ranks, number) for number in range(windows)]
    return found


def nvrx(ranks: int, seed: int) -> float:
    """NVRx's report, by its formulas, on summaries of as many ranks."""
    random = np.random.default_rng(seed)
    sections = random.lognormal(0, 0.1, (ranks, len(SECTIONS)))
    kernels = random.lognormal(0, 0.1, (ranks, KERNELS))
    counts = random.integers(1, 100, (ranks, KERNELS)).astype(float)
    names = [f"kernel {one}" for one in range(KERNELS)]

    took = Stopwatch()
    with took:
        scores.relative_section_scores(sections)
        scores.individual_section_scores(sections, sections)
        scores.relative_gpu_scores(kernels, counts, kernels, names)
        scores.individual_gpu_scores(kernels, counts, kernels, names, kernels)
    return took.seconds


def show(ranks: int, found: Samples) -> None:
    whole = [sum(parts) for parts in zip(found["hear"], found["close"], strict=True)]
    rows = {**{name: found[name] for name in ("decode", "hear", "close")}, "hear and close": whole}
    for name, times in {**rows, "NVRx's formulas": found["nvrx"]}.items():
        row = (statistics.median(times), min(times), max(times))
        shown = "".join(f"{one:10.3f}" for one in row)
        print(f"{ranks:9}{name:>18}{shown}{len(times):5}{row[0] / ranks * 1e6:12.1f}")
    ratio = statistics.median(whole) / max(statistics.median(found["nvrx"]), 1e-9)
    named = [int(one) for one in found["named"]]
    print(
        f"{ranks:9}  {found['mib'][0]:.0f} MiB; {ratio:.1f} times NVRx's formulas; named: {named}"
    )


def child(ranks: int, windows: int) -> Samples:
    command = [sys.executable, "-m", "benchmarks.straggler_windows", "--child", str(ranks)]
    command += ["--windows", str(windows)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    samples: Samples = json.loads(done.stdout)
    return samples


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, action="append", help=f"default: {SIZES}")
    parser.add_argument("--windows", type=int, default=7)
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    if asked.child:
        print(json.dumps(measure(asked.child, asked.windows)))
        return 0
    print(f"load {os.getloadavg()[0]:.1f}; seconds of processor time a window")
    print(f"{'ranks':>9}{'':>18}{'median':>10}{'min':>10}{'max':>10}{'n':>5}{'µs a rank':>12}")
    met = True
    for ranks in asked.ranks or SIZES:
        found = child(ranks, asked.windows)
        show(ranks, found)
        met &= found["named"] == [SLOW]
        if ranks == LIMIT[0]:
            whole = [sum(parts) for parts in zip(found["hear"], found["close"], strict=True)]
            met &= statistics.median(whole) <= LIMIT[1]
    print("met" if met else "MISSED")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
