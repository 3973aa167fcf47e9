"""How often a slow rank of a real gloo training is named, with the right cause, and how soon.

    python -m benchmarks.slow_ranks [--ranks 4,8] [--runs 20] [--kinds input,compute,nice,host]
    python -m benchmarks.slow_ranks --runs 100 --results FILE [--minutes 30]
    python -m benchmarks.slow_ranks --report FILE FILE

One training for each kind and number of ranks. In each run a rank that is drawn is slowed until it
is found, then healed until it is cleared. A run fails if another rank is named
meanwhile, or nobody within 40 s.

    input     loses 150 ms where it reads data
    compute   loses 200 ms in backward, before gradients are exchanged
    nice      has nice 19 on a processor where another program computes with nice 5 (root)
    host      on one of four hosts, control groups with a quota, other programs compute (root)
    link      one of four hosts in namespaces sends and receives 40 Mbit/s at most (root)
    delay     each packet from and to one of four hosts takes 10 ms longer (root)
    plain-…   the same, and the script knows nothing of Everstep: only the rank counts

`host`, `link` and `delay` slow all ranks of a host: each of them may be named. Windows of four
steps are the shortest that can be measured here; three are needed for a finding by design. With
--results, runs are added to a file until there are as many as asked for; what was begun
can be continued, and files put together. Exit code 1 below 95 % (A6.1).
"""

import argparse
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from benchmarks.slow_rank_runs.cases import case_of
from benchmarks.slow_rank_runs.results import (
    HEAD,
    Result,
    append_result,
    missed,
    read_results,
    row,
    table,
)
from benchmarks.slow_rank_runs.training import Training, Wires
from benchmarks.slow_rank_runs.wires import Wiring
from tests.e2e.control_planes import PATIENT, ControlPlane, Pieces, running_up

LIGHT, FOR_ROOT = "input,compute,plain-input,plain-compute", "nice,host,link,delay"


@dataclass(frozen=True, slots=True)
class Part:
    """The runs of one training that are still to be made."""

    name: str
    ranks: int
    numbers: tuple[int, ...]


@dataclass
class Sitting:
    """All runs of one call."""

    folder: Path
    seed: int
    ends_s: float
    file: Path | None
    results: list[Result]

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._out = sys.stdout  # others' is turned away while agents' logs are printed

    def is_over(self) -> bool:
        return time.monotonic() >= self.ends_s

    def add(self, one: Result) -> None:
        with self._lock:
            self.results.append(one)
            if self.file is not None:
                append_result(self.file, one)
            same = [of for of in self.results if (of.kind, of.ranks) == (one.kind, one.ranks)]
            print(row(same), one.wrong[:100], sep="  ", file=self._out, flush=True)

    def play(self, part: Part, plane: ControlPlane, wires: Wires | None) -> None:
        """Slow ranks of one training, one after the other."""
        if self.is_over():
            return
        folder = self.folder / f"slow-{part.ranks}-{part.name}-{os.getpid()}"
        with Training(folder, plane, part.name, part.ranks, wires) as training:
            for number in part.numbers:
                if self.is_over():
                    return
                self.add(training.run(self.seed, number))


def parts(asked: argparse.Namespace, known: Sequence[Result]) -> Iterator[Part]:
    for name in asked.kinds.split(","):
        case_of(name)
        for ranks in map(int, asked.ranks.split(",")):
            made = {one.number for one in known
                    if (one.kind, one.ranks, one.seed) == (name, ranks, asked.seed)}  # fmt: skip
            numbers = tuple(number for number in range(asked.runs) if number not in made)
            if numbers:
                yield Part(name, ranks, numbers)


def sit(asked: argparse.Namespace, folder: Path) -> list[Result]:
    known = read_results([asked.results] if asked.results else [])
    ends_s = time.monotonic() + 60 * asked.minutes
    sitting = Sitting(folder, asked.seed, ends_s, asked.results, known)
    wanted = list(parts(asked, known))
    wired = [one for one in wanted if case_of(one.name).place == "network"]
    others = [one for one in wanted if one not in wired]
    settings = {**PATIENT, "EVERSTEP_STRAGGLER__WINDOW_STEPS": str(asked.window_steps)}
    print(HEAD, flush=True)
    if others:
        with running_up(folder, **settings) as up:
            _play_all(others, sitting, up, asked.parallel)
    for one in wired:
        _play_wired(one, sitting, settings)
    return sitting.results


def _play_all(wanted: Sequence[Part], sitting: Sitting, plane: ControlPlane, most: int) -> None:
    """Those that compute little side by side, the others alone."""
    light = [one for one in wanted if case_of(one.name).is_light]
    with ThreadPoolExecutor(most) as pool:
        for done in [pool.submit(sitting.play, one, plane, None) for one in light]:
            done.result()
    for one in wanted:
        if one not in light:
            sitting.play(one, plane, None)


def _play_wired(part: Part, sitting: Sitting, settings: dict[str, str]) -> None:
    if sitting.is_over():
        return
    folder = sitting.folder / f"wired-{part.ranks}-{part.name}-{os.getpid()}"
    folder.mkdir()
    with ExitStack() as stack:
        wiring = stack.enter_context(Wiring(folder, is_relayed=case_of(part.name).kind == "delay"))
        pieces = Pieces(folder, host=wiring.address, **settings)
        stack.callback(pieces.stop)
        pieces.start()
        sitting.play(part, pieces, wiring)


def main() -> int:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--ranks", default="4,8")
    made.add_argument("--runs", type=int, default=20, help="of each kind and number of ranks (20)")
    made.add_argument("--kinds", default=LIGHT if os.geteuid() else f"{LIGHT},{FOR_ROOT}")
    made.add_argument("--seed", type=int, default=1)
    made.add_argument("--window-steps", type=int, default=4)
    made.add_argument("--parallel", type=int, default=2, help="trainings that sleep the most (2)")
    made.add_argument("--minutes", type=float, default=1e6, help="no run begins later")
    made.add_argument("--results", type=Path, metavar="FILE", help="add runs to this file")
    made.add_argument("--report", type=Path, nargs="+", metavar="FILE", help="of these, runs none")
    asked = made.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was started ends with us
    if asked.report:
        results = read_results(asked.report)
    else:
        with tempfile.TemporaryDirectory() as name:
            results = sit(asked, Path(name))
    print("", *table(results), *(below := missed(results)), sep="\n")
    return 1 if below else 0


if __name__ == "__main__":
    sys.exit(main())
