"""What a killed rank and a save cost with each framework, next to the framework without Everstep.

    python -m benchmarks.frameworks
    python -m benchmarks.frameworks --only kills --frameworks torch,lightning --rounds 5
    python -m benchmarks.frameworks --only saves --mib 64 --rounds 3

`kills`: from SIGKILL of the last rank until all ranks have made a step again, as the ranks
themselves write it down, under `everstep run` and under torchrun; the script is the same, two ranks
on one node, and resumes from its newest checkpoint. Each round starts every contender afresh, in
another order. `saves`: by how much the step of a save is longer than the others, in one process,
with the framework's own checkpoints and with Everstep's classes. A framework that is not
installed is left out; DeepSpeed may be in a folder on PYTHONPATH.
"""

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.frameworks import saves
from benchmarks.frameworks.train import TOYS
from benchmarks.restarts.cases import RANK, play
from benchmarks.restarts.contenders import Contender, Elastic, Everstep, Shape, Training, torchrun
from benchmarks.restarts.options import rotated, words, workplace
from benchmarks.restarts.stage import Stage
from benchmarks.rig import HEAD, row

_SCRIPT = Path(__file__).with_name("train.py")
_PASSED_ON = ("DS_ACCELERATOR", "TORCH_EXTENSIONS_DIR", "PYTHONPATH")
_SAVES_WITHIN_S = 600.0


class FrameworkTraining(Training):
    """The toy of one framework."""

    framework: str

    def __init__(self, framework: str) -> None:
        super().__init__()
        object.__setattr__(self, "framework", framework)

    def command(self, stage: Stage) -> list[str]:
        return [str(_SCRIPT), str(stage.marks.folder), self.framework]


def _environ() -> dict[str, str]:
    own = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    path = [str(Path(__file__).parents[2]), own.get("PYTHONPATH", "")]
    return {**own, "PYTHONPATH": os.pathsep.join(filter(None, path))}


class _Everstep(Everstep):
    def environ(self, _node: str) -> Mapping[str, str]:
        return _environ()


def _contenders() -> list[Contender]:
    by_torch = torchrun()
    by_torch.environ = {**Elastic.environ, **_environ()}
    return [_Everstep("warm"), by_torch]


def main() -> None:
    asked = _asked()
    present = [name for name in asked.frameworks if importlib.util.find_spec(name) is not None]
    for name in asked.frameworks:
        if name not in present:
            print(f"{name} is not installed: left out")
    with workplace() as folder:
        if "kills" in asked.only:
            _kills(folder, present, asked.rounds)
        if "saves" in asked.only:
            _saves(folder, present, asked.rounds, asked.mib)


def _asked() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", type=words, default=["kills", "saves"])
    parser.add_argument("--frameworks", type=words, default=list(TOYS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--mib", type=int, default=64, help="of weights that a save has (64)")
    return parser.parse_args()


def _kills(folder: Path, frameworks: Sequence[str], rounds: int) -> None:
    print("\nSIGKILL of one of two ranks -> next step\n")
    print(HEAD, flush=True)
    for framework in frameworks:
        took: dict[str, list[float]] = {}
        for turn in range(rounds):
            for contender in rotated(_contenders(), turn):
                place = folder / f"{framework}-{turn}-{contender.name.replace(' ', '-')}"
                training = FrameworkTraining(framework)
                try:
                    outcome = play(place, contender, Shape(1, 2), RANK, training, 1)
                except TimeoutError as error:
                    print(f"  {framework}, {contender.name}: {error}")
                    continue
                took.setdefault(contender.name, []).extend(outcome.back_ms)
                for why in outcome.not_back:
                    print(f"  {framework}, {contender.name}: {why}")
        _show(framework, took)


def _saves(folder: Path, frameworks: Sequence[str], rounds: int, mib: int) -> None:
    print(f"\nA save of {mib} MiB of weights and its optimizer: how much longer its step is\n")
    print(HEAD, flush=True)
    for framework in frameworks:
        if framework not in saves.WAYS:
            continue
        took: dict[str, list[float]] = {}
        for turn in range(rounds):
            for way in rotated(list(saves.WAYS[framework]), turn):
                place = folder / f"saves-{framework}-{turn}-{way.replace(' ', '-')}"
                place.mkdir()
                took.setdefault(way, []).extend(_stalls(place, framework, way, mib))
        _show(framework, took)


def _stalls(folder: Path, framework: str, way: str, mib: int) -> list[float]:
    program = [sys.executable, "-m", "benchmarks.frameworks.saves"]
    done = subprocess.run(
        [*program, str(folder), framework, way, str(mib)],
        env={**os.environ, **_environ(), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        check=True,
        text=True,
        timeout=_SAVES_WITHIN_S,
    )
    return [float(each) for each in json.loads(done.stdout.splitlines()[-1])]


def _show(framework: str, took: Mapping[str, Sequence[float]]) -> None:
    ours = max((name for name in took if name.startswith("everstep")), default="")
    for name, values in took.items():
        if values:
            ratio = statistics.median(values) / statistics.median(took[ours] or values)
            print(row(f"  {framework}, {name}", values, f"ms  x{ratio:.2f}"), flush=True)


if __name__ == "__main__":
    main()
