"""From SIGKILL to the next step: Everstep, torchrun and NVRx restart the same training.

    python -m benchmarks.restart
    python -m benchmarks.restart --ft-launcher NVRX/bin/ft_launcher --rounds 5
    python -m benchmarks.restart --only node,agent,silent
    python -m benchmarks.restart --only rank --ranks 8 --against v0.1.0
    python -m benchmarks.restart --only rank --ranks 8 --buses 1,3

The figure is the time from the signal until the last rank has made the first step of the next
round, as the ranks themselves write it down; none of the launchers takes part in that. Each round
starts every contender afresh, in another order. `rank` kills the last rank; `node` an agent with
all that it started, `agent` an agent alone, `silent` stops an agent with all that it started as
it stands: with two ranks on each node, and a spare. Peers take a spare for one more node of an
elastic range; the node that holds their store is never the one that is lost.

NVRx is not a dependency. To measure it, make it a venv that sees this one's packages:
`pip install --no-deps nvidia-resiliency-ext defusedxml`, and a .pth file that names them.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.restarts.cases import AGENT, NODE, RANK, SILENT, Case, Outcome, play
from benchmarks.restarts.contenders import Contender, Shape, Training
from benchmarks.restarts.limits import forked
from benchmarks.restarts.options import contenders, numbers, parser, rotated, words, workplace
from benchmarks.restarts.table import show, show_phases

FLOOR = "limit: fork, gloo, a first step"
CASES = {"rank": RANK, "node": NODE, "agent": AGENT, "silent": SILENT}


@dataclass(frozen=True)
class Trial:
    """One thing that is done to all contenders."""

    case: Case
    shape: Shape
    times: int

    @property
    def title(self) -> str:
        nodes = f"{self.shape.nodes} agents" if self.shape.nodes > 1 else "1 agent"
        spares = f" and {self.shape.spares} to spare" if self.shape.spares else ""
        return f"{self.case.name}: {nodes} x {self.shape.ranks} ranks{spares}"


def main() -> None:
    asked = _asked()
    training = Training(asked.optimizer)
    with workplace() as folder, contenders(asked, folder) as everyone:
        for number, trial in enumerate(_trials(asked)):
            outcomes: dict[str, list[Outcome]] = {}
            floor: list[float] = []
            for turn in range(asked.rounds):
                place = folder / f"{number}.{turn}"
                floor += forked(place / "floor", trial.shape.nodes * trial.shape.ranks, trial.times)
                for one in rotated(everyone, turn):
                    outcome = _outcome(place / one.name.replace(" ", "-"), one, trial, training)
                    outcomes.setdefault(one.name, []).append(outcome)
            _show(trial, floor, {one.name: outcomes[one.name] for one in everyone})


def _asked() -> argparse.Namespace:
    made = parser(str(__doc__), "2,4,8", 3)
    made.add_argument(
        "--kills",
        type=int,
        default=1,
        help="of a rank, for each start (1): more than one may meet the backoff of crash loops",
    )
    made.add_argument("--nodes", type=numbers, default=[2, 3], help="that are active (2,3)")
    made.add_argument("--only", type=words, default=list(CASES), metavar=",".join(CASES))
    made.add_argument("--optimizer", choices=("own", "torch"), default="own", help="(own)")
    asked = made.parse_args()
    if unknown := set(asked.only) - set(CASES):
        made.error(f"no case {sorted(unknown)}")
    return asked


def _trials(asked: argparse.Namespace) -> list[Trial]:
    trials = []
    if "rank" in asked.only:
        shapes = [Shape(1, ranks) for ranks in asked.ranks]
        if 8 in asked.ranks:
            shapes.append(Shape(2, 4))
        trials += [Trial(RANK, shape, asked.kills) for shape in shapes]
    lost = [CASES[name] for name in ("node", "agent", "silent") if name in asked.only]
    return trials + [Trial(case, Shape(nodes, 2, 1), 1) for case in lost for nodes in asked.nodes]


def _outcome(folder: Path, contender: Contender, trial: Trial, training: Training) -> Outcome:
    try:
        return play(folder, contender, trial.shape, trial.case, training, trial.times)
    except TimeoutError as error:
        print(f"{contender.name}, {trial.title}: {error}")
        return Outcome(0.0, not_back=[str(error).partition(";")[0]])


def _show(trial: Trial, floor: list[float], outcomes: dict[str, list[Outcome]]) -> None:
    print(f"\n{trial.title}\n")
    figures = {FLOOR: floor}
    for name, each in outcomes.items():
        figures[name] = [back for outcome in each for back in outcome.back_ms]
    show(figures, {name: _notes(each, trial) for name, each in outcomes.items()})
    for name, each in outcomes.items():
        show_phases(name, [ledger for outcome in each for ledger in outcome.phases])


def _notes(outcomes: Sequence[Outcome], trial: Trial) -> str:
    notes = []
    world = trial.shape.nodes * trial.shape.ranks
    if others := {found for outcome in outcomes for found in outcome.worlds} - {world}:
        notes.append(f"with {sorted(others)} ranks instead of {world}")
    if most := max((left for outcome in outcomes for left in outcome.left), default=0):
        notes.append(f"{most} ranks of the round before left")
    missing = [why for outcome in outcomes for why in outcome.not_back]
    notes += [f"{missing.count(why)} times {why}" for why in dict.fromkeys(missing)]
    return "; ".join(notes)


if __name__ == "__main__":
    main()
