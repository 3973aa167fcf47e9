"""From a rank that hangs to the finding, and to the next step: Everstep next to NVRx.

    python -m benchmarks.stalls
    python -m benchmarks.stalls --ft-launcher NVRX/bin/ft_launcher --rounds 5 --peer-rounds 3

The last rank of a training over gloo hangs in a section, asleep, or asleep with the interpreter's
lock. All limits are 2 s. The rank notes when it hangs; counted is from the moment at which the
limit was passed. "found" is the time in the fact; NVRx leaves none, so that both have "killed": the
rank is dead. NVRx looks every 5 s by default, and every 0.1 s where the table has it.

Then what an agent costs that watches 8 ranks, each with 20 sections a step and 10 steps a second.
"""

import argparse
import os
import statistics
import sys
from pathlib import Path

from benchmarks.restarts.options import parser, rotated, workplace
from benchmarks.restarts.table import show
from benchmarks.stalling.cases import Limited, Outcome, Sectioned, agent_ms_a_second, play

BUDGET_MS_A_S = 10.0
KINDS = ("sleep", "gil")
US = "everstep"


def main() -> int:
    asked = _asked()
    with workplace() as folder:
        for ranks in asked.ranks:
            for kind in KINDS:
                _play(folder / f"{ranks}-{kind}", ranks, kind, asked)
        return _cost(folder / "watched", asked.seconds)


def _asked() -> argparse.Namespace:
    made = parser(str(__doc__), "2,8", 5)
    made.add_argument("--peer-rounds", type=int, default=3, help="of NVRx (3)")
    made.add_argument("--seconds", type=float, default=15.0, help="for the agent's cost (15)")
    return made.parse_args()


def _play(folder: Path, ranks: int, kind: str, asked: argparse.Namespace) -> None:
    contenders: list[Limited | Sectioned] = [Limited()]
    if asked.ft_launcher is not None:
        for check_s in (None, 0.1):
            contenders.append(Sectioned(asked.ft_launcher, asked.ft_options, check_s))
    outcomes: dict[str, list[Outcome]] = {one.name: [] for one in contenders}
    notes: dict[str, str] = {}
    for turn in range(max(asked.rounds, asked.peer_rounds)):
        for number, one in enumerate(rotated(contenders, turn)):
            if turn >= (asked.rounds if one.name == US else asked.peer_rounds):
                continue
            try:
                outcomes[one.name].append(play(folder / f"{turn}.{number}", one, ranks, kind))
            except TimeoutError as error:
                notes[one.name] = str(error)
    print(f"\n{ranks} ranks, {kind}: from the limit (load {os.getloadavg()[0]:.1f})\n", flush=True)
    found = [one.found_ms for one in outcomes[US] if one.found_ms is not None]
    show({"everstep: found": found}, {})
    for what in ("killed_ms", "back_ms"):
        title = what.removesuffix("_ms")
        print(f" {title}")
        show(
            {name: [getattr(one, what) for one in all_of] for name, all_of in outcomes.items()},
            notes,
            US,
        )


def _cost(folder: Path, seconds: float) -> int:
    costs = [agent_ms_a_second(folder / str(turn), 8, seconds) for turn in range(3)]
    middle = statistics.median(costs)
    word = "met" if middle <= BUDGET_MS_A_S else "MISSED"
    print(
        f"\nagent, 8 ranks, 20 sections a step, 10 steps a second: {middle:.1f} ms of processor "
        f"time a second (min {min(costs):.1f}, max {max(costs):.1f}, n {len(costs)}); "
        f"budget {BUDGET_MS_A_S:g}; {word}"
    )
    return 0 if middle <= BUDGET_MS_A_S else 1


if __name__ == "__main__":
    sys.exit(main())
