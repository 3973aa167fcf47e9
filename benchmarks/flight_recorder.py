"""Names the rank that hangs, from dumps of the flight recorder: how often right, and how fast.

    python -m benchmarks.flight_recorder --what accuracy [--seeds 1000] [--first-seed 0]
        [--fault NAME] [--show]
    python -m benchmarks.flight_recorder --what speed [--ranks 64,512] [--records 2000] [--rounds 3]
        [--peers torch,nvrx] [--nvrx-python PATH] [--folder DUMPS] [--peer-s 600] [--peer-gib 8]

Accuracy: cases of `tests/fakes/flight_faults.py`, some seeds of each fault, every other dump a
pickle. Exact: those who are named are those who caused it, or all of those among whom the dumps
cannot tell. Named is who is a suspect of a fault with a confidence of 0.5 or more. Set: how many
suspects the report lists in the median, with any confidence.

Speed: Everstep next to torch's analyzer and NVRx's. All read one folder of pickles, one a rank,
of a job whose fault is known; each round takes them in another order. The figures are those of
whole processes with their children: seconds, seconds of processors, and the largest MiB that one
process took. NVRx's runs in an interpreter that has it (`--nvrx-python`); torch's in this one. A
peer that needs more than `--peer-s` seconds, or more than `--peer-gib` GiB of addresses, is ended,
which is printed: a ratio is then at least that, or there is none.
"""

import argparse
import json
import os
import pickle
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from everstep_services.attribution.flight_recorder.analysis import FlightAnalysis
from everstep_services.attribution.flight_recorder.dump import read_dump
from everstep_services.attribution.flight_recorder.report import FlightReport
from tests.fakes import flight_dumps as fake
from tests.fakes import flight_faults as faults

_NAMED = 0.5


def main() -> None:
    words = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    words.add_argument("--what", choices=("accuracy", "speed"), default="speed")
    words.add_argument("--seeds", type=int, default=1000)
    words.add_argument("--first-seed", type=int, default=0)
    words.add_argument("--fault", choices=tuple(faults.FAULTS))
    words.add_argument("--show", action="store_true", help="print each case that is not exact")
    words.add_argument("--ranks", default="64,512")
    words.add_argument("--records", type=int, default=2000)
    words.add_argument("--rounds", type=int, default=3)
    words.add_argument("--peers", default="torch", help="torch, nvrx, both with a comma, or none")
    words.add_argument("--nvrx-python", help="an interpreter that has nvidia-resiliency-ext")
    words.add_argument("--peer-s", type=float, default=600.0, help="the longest run of a peer")
    words.add_argument("--peer-gib", type=float, default=8.0, help="the most memory of a peer")
    words.add_argument("--folder", type=Path, help="where dumps stand already, one size alone")
    options = words.parse_args()
    if options.what == "accuracy":
        measure_accuracy(options)
    else:
        measure_speed(options)


# --- accuracy


@dataclass
class _Score:
    """How often one fault was named rightly."""

    exact: int = 0
    top: int = 0
    silent: int = 0
    innocent: int = 0
    sizes: list[int] = field(default_factory=list)
    kinds: Counter[str] = field(default_factory=Counter)


def measure_accuracy(options: argparse.Namespace) -> None:
    print(f"seeds {options.first_seed} to {options.first_seed + options.seeds - 1} of each fault")
    print(
        f"{'fault':<34}{'n':>6}{'exact':>8}{'top-1':>8}{'silent':>8}{'innocent':>10}{'set':>5}"
        "  said"
    )
    for fault in [options.fault] if options.fault else faults.FAULTS:
        score = _Score()
        for seed in range(options.first_seed, options.first_seed + options.seeds):
            take(score, fault, seed, show=options.show)
        print_score(fault, score, options.seeds)


def take(score: _Score, fault: str, seed: int, *, show: bool) -> None:
    case = faults.draw(fault, seed)
    report = reported(case, seed)
    named = {s.rank for one in report.faults if one.confidence >= _NAMED for s in one.suspects}
    first = report.faults[0].suspects[0].rank if report.faults else None
    is_exact = named == case.culprits or (bool(case.any_of) and named <= case.any_of)
    score.exact += is_exact
    score.top += first in case.culprits if case.culprits else first is None
    score.silent += not named
    score.innocent += bool(named - case.culprits - case.any_of)
    score.sizes.append(len({s.rank for one in report.faults for s in one.suspects}))
    score.kinds[report.faults[0].kind if report.faults else report.verdict] += 1
    if show and not is_exact:
        label = f"{sorted(case.culprits)}, of {case.job.world}, {case.job.ahead} ahead"
        print(f"  seed {seed}: it was {label}; said {report.summary[:150]}")


def print_score(fault: str, score: _Score, n: int) -> None:
    said = ", ".join(f"{kind} {count}" for kind, count in score.kinds.most_common(5))
    shares = "".join(f"{count / n:>8.1%}" for count in (score.exact, score.top, score.silent))
    print(
        f"{fault:<34}{n:>6}{shares}{score.innocent:>10}{median(score.sizes):>5.0f}  {said}",
        flush=True,
    )


def reported(case: faults.Case, seed: int) -> FlightReport:
    dumps = faults.dumps(case, seed)
    entries = [one for dump in dumps.values() for one in dump["entries"]]
    newest = max((one["time_created_ns"] for one in entries), default=0)
    analysis = FlightAnalysis(world=case.job.world)
    for rank, dump in dumps.items():
        content = pickle.dumps(dump, protocol=2) if rank % 2 else json.dumps(dump).encode()
        analysis.add(read_dump(content, rank, newest + case.age_ns))
    return analysis.report()


# --- speed


def measure_speed(options: argparse.Namespace) -> None:
    peers = [one for one in options.peers.split(",") if one in {"torch", "nvrx"}]
    if "nvrx" in peers and not options.nvrx_python:
        print("NVRx is left out: pass --nvrx-python, an interpreter that has nvidia-resiliency-ext")
        peers.remove("nvrx")
    print(" ranks  records              min s   median      max   n    CPU s     MiB  named")
    for ranks in map(int, options.ranks.split(",")):
        with ExitStack() as stack:
            folder = options.folder
            if folder is None:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
                write_dumps(folder, ranks, options.records)
            compare(folder, ranks, peers, options)


def write_dumps(folder: Path, ranks: int, records: int) -> None:
    """One pickle a rank, one after the other; the rank that never joins, near the end."""
    per_step, played = 3, 3
    job = fake.steady(fake.three_dimensions(max(1, ranks // 16), 8, 2), ranks, played)
    rank = culprit(ranks)
    fake.leave(job, rank, len(job.calls[rank]) - 2)
    for rank, dump in fake.play(job).items():
        long = fake.lengthened(dump, per_step, records // per_step - played)
        (folder / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(long, protocol=2))


def culprit(ranks: int) -> int:
    return ranks // 3


def compare(folder: Path, ranks: int, peers: Sequence[str], options: argparse.Namespace) -> None:
    modules = {
        "everstep": [sys.executable, "-m", "everstep_services.cli", "fr", "analyze", "-o", "json"],
        "torch": [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace"],
        "nvrx": [
            str(options.nvrx_python),
            "-m",
            "nvidia_resiliency_ext.attribution.trace_analyzer.fr_attribution",
            *("-p", "nccl_trace_rank_*", "--emit-stdout", "--fr-path"),
        ],
    }
    takes: dict[str, list[Take]] = {name: [] for name in ("everstep", *peers)}
    for number in range(options.rounds):
        for name in sorted(takes, reverse=bool(number % 2)):
            limits = Limits() if name == "everstep" else Limits(options.peer_s, options.peer_gib)
            takes[name].append(timed([*modules[name], str(folder)], folder, limits))
    for name, taken in takes.items():
        seconds = [one.seconds for one in taken]
        print(
            f"{ranks:6} {options.records:8} {name:<9} {min(seconds):8.2f} {median(seconds):8.2f} "
            f"{max(seconds):8.2f} {len(taken):3} {median(one.cpu_s for one in taken):8.2f} "
            f"{max(one.mib for one in taken):7}  {answer(name, taken[-1], culprit(ranks))}",
            flush=True,
        )
    own = median(one.seconds for one in takes["everstep"])
    for name in peers:
        if any(one.status and not one.is_late for one in takes[name]):
            continue
        ratio = median(one.seconds for one in takes[name]) / own
        least = "more than " if any(one.is_late for one in takes[name]) else ""
        print(f"       {name}'s takes {least}{ratio:.1f} times as long", flush=True)


@dataclass(frozen=True)
class Limits:
    """The most that an analyzer may take."""

    seconds: float | None = None
    gib: float | None = None

    def around(self, command: Sequence[str]) -> list[str]:
        """The command with its memory limited."""
        memory = [] if self.gib is None else ["prlimit", f"--as={int(self.gib * (1 << 30))}"]
        return [*memory, *command]


@dataclass(frozen=True)
class Take:
    """One run of an analyzer."""

    seconds: float
    cpu_s: float
    mib: int
    """The most that it or one of its children had."""
    output: str
    status: int
    is_late: bool = False
    """It was ended because it took too long."""


def answer(name: str, taken: Take, rank: int) -> str:
    if taken.is_late:
        return "did not end"
    if taken.status and name != "everstep":
        return f"failed with {taken.status}: {taken.output.strip()[-80:]}"
    if name == "torch":
        return "a table"
    if name == "nvrx":
        return taken.output.strip().splitlines()[-1][-60:] if taken.output.strip() else "nothing"
    suspects = [
        s["rank"] for one in json.loads(taken.output)["report"]["faults"] for s in one["suspects"]
    ]
    return f"{suspects} ({'right' if suspects == [rank] else f'wrong: it was {rank}'})"


def timed(command: Sequence[str], folder: Path, limits: Limits) -> Take:
    """What a command and its children take, and what it prints."""
    with (
        tempfile.TemporaryFile("w+", dir=folder.parent) as out,
        tempfile.TemporaryFile("w+", dir=folder.parent) as errors,
    ):
        began = time.perf_counter()
        process = subprocess.Popen(limits.around(command), stdout=out, stderr=errors)
        is_late = threading.Event()

        def end_it() -> None:
            is_late.set()
            process.kill()

        end = threading.Timer(limits.seconds or 0.0, end_it)
        if limits.seconds is not None:
            end.start()
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - began
        end.cancel()
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        printed = errors if process.returncode and not out.read(1) else out
        printed.seek(0)
        output = printed.read()
    return Take(
        seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss // 1024, output,
        process.returncode, is_late.is_set(),
    )  # fmt: skip


if __name__ == "__main__":
    main()
