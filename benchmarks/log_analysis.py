"""How right `everstep logs analyze` is on generated logs, and how fast.

    python -m benchmarks.log_analysis [--megabytes 100] [--rounds 5] [--only NAME …]
    python -m benchmarks.log_analysis --failures DIR [--megabytes 20] [--rounds 5]
    python -m benchmarks.log_analysis --score SEED [--logs 5] [--ranks 64] [--held-out]

`--score` writes logs of each class (tests/fakes/failure_logs.py) and prints macro-F1, what was
taken for what, how often the first failing rank and the node are right, and how many were left
open.

Without, it prints MB per second of a processor next to a plain read of the same file and to
`grep -c -F` with the words of the rules, which only counts lines. `ordinary` is a log as trainings
write it: Megatron's progress line of 8 ranks of a node, which differ in numbers only, and one line
in 200 of 12 kinds of remarks. `noisy` is the same with colours, progress bars, and one line in 10
that means nothing but has words of the rules or of NCCL. `varied` is the worst case: each line has
letters of its own, drawn by chance, so that no line has an earlier one's shape. Logs of nothing but
failures: `crashes` is a crash loop, with other times, processes, addresses and steps in each turn;
`failures` has all failures of tests/corpus/public again and again, each time with other digits but
in names; with --failures the same with the logs of a folder (`*.log`), and with their own digits
(`equal`). One process, one core, files in the page cache; the part of 20 MB that a file
repeats is larger than what the analyzer remembers.
"""

import argparse
import os
import random
import resource
import string
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median

from benchmarks.foreign import public
from benchmarks.score_logs import score
from everstep_services.attribution.log_analysis.files import analyze_files
from everstep_services.attribution.log_analysis.rules import shipped
from tests.fakes.failure_lines import NOISE
from tests.fakes.failure_loops import crashes, with_other_digits

_END = (
    "[default3]:[rank3]: Traceback (most recent call last):\n"
    '[default3]:[rank3]:   File "/home/u/train.py", line 61, in main\n'
    "[default3]:[rank3]: KeyError: 'tokens'\n"
)
_REMARKS = tuple(f"{word} of the {word} is ready" for word in string.ascii_lowercase[:12])


def main() -> None:
    words = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    words.add_argument("--score", type=int, metavar="SEED", help="score instead of measuring speed")
    words.add_argument("--logs", type=int, default=5, help="logs of each class")
    words.add_argument("--ranks", type=int, default=64)
    words.add_argument("--held-out", action="store_true", help="lines that came after the rules")
    words.add_argument("--megabytes", type=int, default=100)
    words.add_argument("--rounds", type=int, default=5)
    words.add_argument("--only", nargs="+", choices=list(_LOGS), default=list(_LOGS))
    words.add_argument("--failures", type=Path, metavar="DIR", help="measure with logs of a folder")
    options = words.parse_args()
    if options.score is None:
        logs = {name: _LOGS[name] for name in options.only}
        if options.failures:
            texts = [path.read_text(errors="replace") for path in options.failures.glob("*.log")]
            logs = {
                "equal": lambda: failures(texts, share=0.0),
                "failures": lambda: failures(texts),
            }
        print_speeds(logs, options.megabytes, options.rounds)
        return
    scores = score(options.score, options.logs, options.ranks, held_out=options.held_out)
    print(*scores.wrong, *scores.lines(), sep="\n")


def print_speeds(
    logs: Mapping[str, Callable[[], Iterator[str]]], megabytes: int, rounds: int
) -> None:
    print("MB per second of a processor\nlog       what           min   median      max  n")
    for name, lines in logs.items():
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "job.log"
            size = write(path, lines(), megabytes * 10**6)
            for what, work in (("read", read), ("grep -F", grep), ("analyze", analyze)):
                speeds = [size / 1e6 / seconds(work, path) for _ in range(rounds)]
                print(
                    f"{name:<9} {what:<9} {min(speeds):8.0f} {median(speeds):8.0f}"
                    f" {max(speeds):8.0f}  {len(speeds)}"
                )
    print(f"largest memory: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10} MiB")


def ordinary() -> Iterator[str]:
    dice = random.Random(1)
    step = 0
    while True:
        step += 1
        for rank in range(8):
            if dice.randrange(200) == 0:
                yield f"[default{rank}]: INFO {dice.choice(_REMARKS)} {step}\n"
            yield (
                f"[default{rank}]: [2026-11-02 03:{step % 60:02}:11] iteration {step:8d}/  500000 "
                f"| consumed samples: {step * 1024:12d} | elapsed time per iteration (ms): "
                f"{dice.random() * 1000:.1f} | learning rate: {dice.random():.6E} | global batch "
                f"size: 1024 | lm loss: {dice.random():.6E} | loss scale: 1.0 | grad norm: "
                f"{dice.random():.3f} | number of skipped iterations: 0 | number of nan iterations:"
                " 0 |\n"
            )


def noisy() -> Iterator[str]:
    dice = random.Random(2)
    for number, line in enumerate(ordinary()):
        match number % 20:
            case 3 | 7:
                yield f"[default{number % 8}]: {dice.choice(NOISE)} {number}\n"
            case 11:
                bar = (f"\r {part}%|{'#' * (part // 10)}| {part}/100" for part in range(0, 100, 5))
                yield f"{''.join(bar)}\n"
            case 13:
                yield f"\x1b[32m2026-11-02 03:11:11.{number}\x1b[0m | \x1b[1mINFO\x1b[0m | {line}"
            case _:
                yield line


def varied() -> Iterator[str]:
    dice = random.Random(1)
    while True:
        letters = "".join(dice.choices(string.ascii_lowercase + "    ", k=160))
        yield f"[default3]: {letters}\n"


def failures(texts: Sequence[str] = (), share: float = 1.0) -> Iterator[str]:
    dice = random.Random(5)
    texts = texts or ["".join(f"{line}\n" for line in case.lines) for case in public.cases()]
    while True:
        yield from (with_other_digits(text, dice, share) for text in texts)


_LOGS: Mapping[str, Callable[[], Iterator[str]]] = {
    "ordinary": ordinary, "noisy": noisy, "varied": varied, "crashes": crashes,
    "failures": failures,
}  # fmt: skip


def write(path: Path, lines: Iterator[str], size: int) -> int:
    """Write this number of bytes: a few MB that are repeated."""
    part, length = [], 0
    for line in lines:
        part.append(line)
        length += len(line)
        if length > min(size, 20_000_000):
            break
    block = "".join(part).encode()
    with path.open("wb") as file:
        for _ in range(max(1, size // len(block))):
            file.write(block)
        file.write(_END.encode())
    return path.stat().st_size


def read(path: Path) -> None:
    with path.open("rb", buffering=0) as file:
        while file.read(1 << 20):
            pass


def grep(path: Path) -> None:
    words = "\n".join(shipped().words)
    subprocess.run(
        ["grep", "-c", "-i", "-a", "-F", "-e", words, str(path)],
        check=False,
        stdout=subprocess.PIPE,  # into /dev/null, grep ends with the first match
        env={"LC_ALL": "C"},
    )


def analyze(path: Path) -> None:
    report = analyze_files([path]).report()
    assert report.verdict == "cause", report


def seconds(work: Callable[[Path], None], path: Path) -> float:
    """Processor seconds of this process and its children: others on the machine count less."""
    start = sum(os.times()[:4])
    work(path)
    return max(0.01, sum(os.times()[:4]) - start)


if __name__ == "__main__":
    main()
