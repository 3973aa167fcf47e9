"""MB/s of `everstep logs analyze` on generated logs, beside a plain read of the same file.

    python -m benchmarks.log_analysis [--megabytes 200] [--rounds 5]

`ordinary` is a log as trainings write it: Megatron's progress line of 8 ranks of a node, of which
only numbers differ, and one line in 200 of 12 kinds of remarks. `varied` is the worst case:
each line has letters of its own, drawn by chance, so that no line has an earlier one's shape.
Both end in the traceback of one rank. One process, one core, files in the page cache; the part of
20 MB that a file repeats is larger than what the analyzer remembers.
"""

import argparse
import random
import resource
import string
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

from everstep_services.attribution.log_analysis.files import analyze_files

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
    words.add_argument("--megabytes", type=int, default=200)
    words.add_argument("--rounds", type=int, default=5)
    options = words.parse_args()
    print("log       what      min MB/s   median      max  n")
    for name, lines in (("ordinary", ordinary), ("varied", varied)):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "job.log"
            size = write(path, lines(), options.megabytes * 10**6)
            for what, work in (("read", read), ("analyze", analyze)):
                speeds = [size / 1e6 / seconds(work, path) for _ in range(options.rounds)]
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


def varied() -> Iterator[str]:
    dice = random.Random(1)
    while True:
        letters = "".join(dice.choices(string.ascii_lowercase + "    ", k=160))
        yield f"[default3]: {letters}\n"


def write(path: Path, lines: Iterator[str], size: int) -> int:
    """Write so many bytes: a few MB that are repeated."""
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


def analyze(path: Path) -> None:
    report = analyze_files([path]).report()
    assert report.culprits == (3,)


def seconds(work: Callable[[Path], None], path: Path) -> float:
    start = time.perf_counter()
    work(path)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
