"""Names the rank that hangs, from dumps of the flight recorder: Everstep beside torch's analyzer.

    python -m benchmarks.flight_recorder [--ranks 64,512] [--records 2000] [--rounds 3]

Both read the same folder of pickles, one a rank, of a job whose fault is known; each round takes
them in another order. The figures are those of whole processes: seconds, and the largest MiB that
one process took. Torch's analyzer reads no JSON, and prints a table for people to judge.
"""

import argparse
import json
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from tests.fakes import flight_dumps as fake


def main() -> None:
    words = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    words.add_argument("--ranks", default="64,512")
    words.add_argument("--records", type=int, default=2000)
    words.add_argument("--rounds", type=int, default=3)
    words.add_argument("--alone", action="store_true", help="without torch's analyzer")
    options = words.parse_args()
    print(" ranks  records              min s   median      max   n     MiB  named")
    for ranks in map(int, options.ranks.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            culprit = write_dumps(Path(folder), ranks, options.records)
            compare(Path(folder), ranks, culprit, options)


def write_dumps(folder: Path, ranks: int, records: int) -> int:
    """One pickle a rank; the rank that never joins, near the end."""
    groups = fake.three_dimensions(max(1, ranks // 16), 8, 2)
    per_step = 3
    job = fake.steady(groups, ranks, records // per_step)
    culprit = ranks // 3
    fake.leave(job, culprit, len(job.calls[culprit]) - 2)
    for rank, dump in fake.play(job).items():
        (folder / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(dump, protocol=2))
    return culprit


def compare(folder: Path, ranks: int, culprit: int, options: argparse.Namespace) -> None:
    ours = [
        sys.executable,
        "-m",
        "everstep_services.cli",
        "fr",
        "analyze",
        str(folder),
        "-o",
        "json",
    ]
    torchs = [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace", str(folder)]
    contenders = {"everstep": ours} if options.alone else {"everstep": ours, "torch": torchs}
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    memory: dict[str, int] = dict.fromkeys(contenders, 0)
    names = dict.fromkeys(contenders, "")
    for number in range(options.rounds):
        for name in sorted(contenders, reverse=bool(number % 2)):
            taken_s, mib, output = timed(contenders[name], folder)
            seconds[name].append(taken_s)
            memory[name] = max(memory[name], mib)
            names[name] = answer(name, output, culprit)
    for name, taken in seconds.items():
        figures = f"{min(taken):8.2f} {median(taken):8.2f} {max(taken):8.2f} {len(taken):3}"
        print(f"{ranks:6} {options.records:8} {name:<9} {figures} {memory[name]:7}  {names[name]}")
    if "torch" in seconds:
        ratio = median(seconds["torch"]) / median(seconds["everstep"])
        print(f"       torch's takes {ratio:.1f} times as long")


def answer(name: str, output: str, culprit: int) -> str:
    if name != "everstep":
        return "a table"
    report = json.loads(output)["report"]
    suspects = [one["rank"] for fault in report["faults"] for one in fault["suspects"]]
    return f"{suspects} ({'right' if suspects == [culprit] else f'wrong: it was {culprit}'})"


def timed(command: Sequence[str], folder: Path) -> tuple[float, int, str]:
    """How long a command takes, the most MiB that it or a child of it has, and what it prints."""
    with (folder.parent / f"{folder.name}.out").open("w+") as out:
        began = time.perf_counter()
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.DEVNULL)
        _, _, usage = os.wait4(process.pid, 0)
        taken_s = time.perf_counter() - began
        process.returncode = 0
        out.seek(0)
        output = out.read()
    Path(out.name).unlink()
    return taken_s, usage.ru_maxrss // 1024, output


if __name__ == "__main__":
    main()
