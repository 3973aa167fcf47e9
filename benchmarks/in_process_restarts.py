"""From an exception in one rank to the next step of all: in the processes, or by a launcher.

    python -m benchmarks.in_process_restarts
    python -m benchmarks.in_process_restarts --nvrx NVRX/bin/python --rounds 3

The figure is the time from the `raise` in the last of the ranks until the last rank has made the
first step of the next life, as the ranks themselves write it down. Each round starts every
contender afresh, in another order. `in process` are the wrappers of
`trainer_sdk.nvrx.inprocess` and of NVRx, which restart the function in the same processes, with
their default of a second between the exception and the abort (`last_call_wait`), and without; the
others start processes again. The limit is what ranks that stay need to make their gloo group again
and a step.

NVRx is not a dependency: `--nvrx` is the Python of a venv that has it. Its 0.7.0 checks the GPU of
a rank that has a LOCAL_RANK, and ends a rank without one, so its ranks have none here. Its abort
does not end a collective of gloo: a rank that waits in one goes on after gloo's timeout of 20 s.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.in_process.contenders import Everstep, InProcess, Torchrun, Wrapped, limit, strike
from benchmarks.restarts.cases import Case, Outcome, play
from benchmarks.restarts.contenders import Contender, Shape, Training
from benchmarks.restarts.options import rotated, words, workplace
from benchmarks.restarts.table import show

LIMIT = "limit: a gloo group again, a step"
US = "everstep in process"
EXCEPTION = Case("an exception", strike)


@dataclass(frozen=True)
class Trial:
    """A contender, and how often it is struck in one life of its launcher."""

    contender: Contender
    times: int


def main() -> None:
    asked = _asked()
    began = time.monotonic()
    trials = _trials(asked)
    outcomes: dict[str, list[Outcome]] = {trial.contender.name: [] for trial in trials}
    floor: list[float] = []
    load = os.getloadavg()[0]
    with workplace() as folder:
        for turn in range(asked.rounds):
            floor += limit(folder / f"{turn}-limit", asked.ranks, asked.kills)
            for trial in rotated(trials, turn):
                name = trial.contender.name
                place = folder / f"{turn}-{name.replace(' ', '-')}"
                outcomes[name].append(_outcome(place, trial, asked.ranks))
    print(f"\nan exception in one of {asked.ranks} gloo ranks -> the next step of all\n")
    _show(floor, outcomes)
    print(f"{os.cpu_count()} cores, load {load:.1f}; took {time.monotonic() - began:.0f} s")


def _asked() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=2, help="of all contenders (2)")
    parser.add_argument("--kills", type=int, default=3, help="for each start of ours (3)")
    parser.add_argument("--nvrx", type=Path, metavar="PYTHON", help="one that has NVRx, as a peer")
    parser.add_argument("--contenders", type=words, help=f"only these: `{US},torchrun`")
    return parser.parse_args()


def _trials(asked: argparse.Namespace) -> list[Trial]:
    pythons = {"everstep": Path(sys.executable)}
    if asked.nvrx is not None:
        pythons["NVRx"] = asked.nvrx
    trials = [
        Trial(InProcess(name, python, is_patient=is_patient), 1 if name == "NVRx" else asked.kills)
        for name, python in pythons.items()
        for is_patient in (False, True)
    ]
    trials += [
        Trial(Wrapped(), asked.kills),
        Trial(Everstep("warm"), 1),  # a later exception may meet the backoff of crash loops
        Trial(Torchrun(), 1),
    ]
    if asked.contenders is None:
        return trials
    names = [trial.contender.name for trial in trials]
    if unknown := set(asked.contenders) - set(names):
        raise SystemExit(f"no contender {sorted(unknown)}: {names}")
    return [trial for trial in trials if trial.contender.name in asked.contenders]


def _outcome(folder: Path, trial: Trial, ranks: int) -> Outcome:
    try:
        return play(folder, trial.contender, Shape(1, ranks), EXCEPTION, Training(), trial.times)
    except TimeoutError as error:
        print(f"{trial.contender.name}: {error}", file=sys.stderr)
        return Outcome(0.0, not_back=[str(error).partition(";")[0]])


def _show(floor: Sequence[float], outcomes: dict[str, list[Outcome]]) -> None:
    figures = {LIMIT: list(floor)}
    notes = {}
    for name, each in outcomes.items():
        figures[name] = [back for outcome in each for back in outcome.back_ms]
        missing = [why for outcome in each for why in outcome.not_back]
        notes[name] = "; ".join(f"{missing.count(why)} times {why}" for why in set(missing))
    us = US if figures.get(US) else LIMIT
    show(figures, notes, us)
    if us == US:
        share = statistics.median(figures[US]) / statistics.median(floor)
        print(f"  {US} takes {share:.1f} times the limit")


if __name__ == "__main__":
    main()
