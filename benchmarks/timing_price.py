"""What timings cost: a training with a step of 100 ms, with them and with everything off, in turns.

    python -m benchmarks.timing_price [--pairs 16] [--block 10] [--ranks 4]

One training with 20 sections and three collectives a step; the switch `straggler.timings` is set
off and on while it runs, block after block. A block with timings is compared with the mean of
those without before and after it, so that a drift of the machine does not count. The noise floor
is the same with blocks that are all without. Windows are of 32 steps, a quarter of what they are by
default, so that each block has some: what is read once a window is read four times as often.

    step          wall time of a step, the mean of the middle 90 % of a block's steps
    main thread   its processor time in a step: what a training that computes all the time loses
    other threads of the rank, which answer for the flight recorder
    agent         its own processor time, with windows as long as by default

Exit code 1 if the step, or the main thread in a step of 100 ms, loses more than 0.1 % by the upper
end of the interval, or the agent takes more than 1 % of a core.
"""

import argparse
import io
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, redirect_stdout
from dataclasses import dataclass
from itertools import pairwise
from math import comb
from pathlib import Path
from statistics import mean, median

import psutil

from benchmarks.slow_rank_runs.timed import RECORD
from everstep_services.cli.errors import CliError
from tests.e2e.cluster import Cluster
from tests.e2e.control_planes import PATIENT, Up, running_up
from tests.waiting import until

_SCRIPT = Path(__file__).with_name("slow_rank_runs") / "timed.py"
_REST_S = 0.095
_WINDOW_STEPS, _USUAL_STEPS = 32, 128
_SETTLES_S = 1.0
_TARGET_RATIO, _AGENT_RATIO = 0.001, 0.01
_STEP_S = 0.1


@dataclass(frozen=True, slots=True)
class Block:
    """What a step took while timings were on, or off."""

    is_on: bool
    step_s: float
    main_s: float
    others_s: float
    """In a step, of the mean rank."""


class Training:
    """Four ranks of one agent, that train for as long as blocks are measured."""

    def __init__(self, up: Up, folder: Path, ranks: int) -> None:
        folder.mkdir()
        self.cluster, self._ranks = Cluster(folder, folder.name, up), ranks
        options = ("--nproc-per-node", str(ranks), str(_SCRIPT), str(folder), str(_REST_S))
        self._agent = psutil.Process(self.cluster.run(*options).pid)
        until(self._is_on, "timings are heard", despite=CliError, within_s=120)

    def _is_on(self) -> bool:
        found = self.cluster.api.get(f"jobs/{self.cluster.job}/stragglers/now")
        return bool(found["is_on"])

    def switch(self, *, is_on: bool, window_steps: int = _WINDOW_STEPS) -> None:
        value = "on" if is_on else "off"
        changes = {"straggler.timings": value, "straggler.window_steps": str(window_steps)}
        asked = {"changes": changes, "job": self.cluster.job, "reason": "benchmark"}
        self.cluster.api.post("control", asked)
        until(lambda: self._is_on() == is_on, f"timings are {value}", despite=CliError)
        time.sleep(_SETTLES_S)  # an agent and the pages follow the document

    def block(self, seconds: float, *, is_on: bool) -> Block:
        self.switch(is_on=is_on)
        began = time.monotonic()
        time.sleep(seconds)
        ended = time.monotonic()
        ranks = [self._steps(rank, began, ended) for rank in range(self._ranks)]
        step_s, main_s, others_s = (mean(of) for of in zip(*ranks, strict=True))
        return Block(is_on, step_s, main_s, others_s)

    def agent_ratio(self, seconds: float) -> float:
        """Of a core."""
        before, began = self._agent_s(), time.monotonic()
        time.sleep(seconds)
        return (self._agent_s() - before) / (time.monotonic() - began)

    def _agent_s(self) -> float:
        used = self._agent.cpu_times()
        return float(used.user + used.system)

    def _steps(self, rank: int, began: float, ended: float) -> tuple[float, float, float]:
        octets = (self.cluster.folder / f"times-{rank}").read_bytes()
        whole = octets[: len(octets) // RECORD.size * RECORD.size]
        steps = [one for one in RECORD.iter_unpack(whole) if began <= one[0] < ended]
        walls = sorted(after[0] - before[0] for before, after in pairwise(steps))
        cut, count = len(walls) // 20, len(walls)
        main_s = (steps[-1][1] - steps[0][1]) / count
        process_s = (steps[-1][2] - steps[0][2]) / count
        return mean(walls[cut : count - cut]), main_s, process_s - main_s

    def finish(self) -> None:
        (self.cluster.folder / "end").touch()
        self.cluster.until_done()


def interval(values: Sequence[float]) -> tuple[float, float]:
    """At least 95 % for the median: by ranks, whatever the distribution."""
    ordered, count = sorted(values), len(values)
    outside, low = 0.0, 0
    while low < count // 2 and 2 * (outside + comb(count, low) / 2**count) <= 0.05:
        outside += comb(count, low) / 2**count
        low += 1
    low = max(0, low - 1)
    return ordered[low], ordered[count - 1 - low]


def against(values: Sequence[float]) -> list[float]:
    """Each second value less the mean of its neighbours."""
    return [
        values[at] - (values[at - 1] + values[at + 1]) / 2 for at in range(1, len(values) - 1, 2)
    ]


def row(name: str, values: Sequence[float], usual: float) -> str:
    low, high = interval(values)
    middle = median(values)
    return (
        f"{name:38}{usual * 1e3:10.3f}{middle * 1e6:10.1f}{low * 1e6:10.1f}{high * 1e6:10.1f}"
        f"{middle / _STEP_S:10.3%}{high / _STEP_S:10.3%}{len(values):5}"
    )


HEAD = (
    f"{'':38}{'off, ms':>10}{'more, µs':>10}{'from':>10}{'to':>10}{'of 100 ms':>10}{'at most':>10}"
    f"{'n':>5}"
)


def report(blocks: Sequence[Block], agent: float, idle: float) -> int:
    off = [one for one in blocks if not one.is_on]
    measures: dict[str, Callable[[Block], float]] = {
        "step": lambda one: one.step_s,
        "main thread": lambda one: one.main_s,
        "other threads of the rank": lambda one: one.others_s,
    }
    print(f"load {os.getloadavg()[0]:.1f}\n{HEAD}")
    met = True
    for name, of in measures.items():
        usual = median(map(of, off))
        more = against([of(one) for one in blocks])
        print(row(name, more, usual))
        if len(off) > 2:
            print(row("  noise floor: off against off", against([of(one) for one in off]), usual))
        if name != "other threads of the rank":
            met &= interval(more)[1] <= _TARGET_RATIO * _STEP_S
    print(f"agent: {agent:.2%} of a core, {idle:.2%} with timings off")
    met &= agent <= _AGENT_RATIO
    print("met" if met else "MISSED: 0.1 % of a step of 100 ms, 1 % of a core for the agent")
    return 0 if met else 1


def main() -> int:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--pairs", type=int, default=16, help="blocks with timings (16)")
    made.add_argument("--block", type=float, default=10.0, help="seconds of a block (10)")
    made.add_argument("--agent", type=float, default=52.0, help="seconds for its processor time")
    made.add_argument("--ranks", type=int, default=4)
    asked = made.parse_args()
    if asked.pairs < 6 or asked.block < 8:
        made.error("--pairs is 6 at least, for an interval, and --block 8, for whole windows")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was started ends with us
    with tempfile.TemporaryDirectory() as name:
        return report(*_measured(Path(name), asked))


def _measured(folder: Path, asked: argparse.Namespace) -> tuple[list[Block], float, float]:
    settings = {**PATIENT, "EVERSTEP_STRAGGLER__WINDOW_STEPS": str(_WINDOW_STEPS)}
    with running_up(folder, **settings) as up, ExitStack() as stack:
        training = Training(up, folder / "timing-price", asked.ranks)
        stack.callback(training.cluster.close)
        blocks = [
            training.block(asked.block, is_on=bool(number % 2))
            for number in range(2 * asked.pairs + 1)  # the last is off
        ]
        idle = training.agent_ratio(asked.agent / 2)
        training.switch(is_on=True, window_steps=_USUAL_STEPS)
        agent = training.agent_ratio(asked.agent)
        training.finish()
        stack.pop_all()
    with redirect_stdout(io.StringIO()):  # what the agent logged
        training.cluster.close()
    return blocks, agent, idle


if __name__ == "__main__":
    sys.exit(main())
