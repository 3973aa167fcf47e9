"""From the command to the first step: Everstep, torchrun and no launcher start the same training.

    python -m benchmarks.launch --ranks 2,8
    python -m benchmarks.launch --ranks 8 --optimizer torch
    python -m benchmarks.launch --ranks 8 --against v0.1.0

The figure is the time from the start of the launcher's process until the last rank has made its
first step, as the ranks themselves write it down. Everstep runs with its bus and its services
inside; each round takes the contenders in another order.

The training's optimizer is its `own`, derived from torch's base, one of `torch`, or `none`. The
first one of a process imports torch._dynamo, which takes as long as torch; `own` avoids it.
"""

from benchmarks.restarts.cases import RANK, play
from benchmarks.restarts.contenders import SCRIPTS, Shape, Training
from benchmarks.restarts.limits import ByHand
from benchmarks.restarts.options import contenders, parser, rotated, workplace
from benchmarks.restarts.table import show


def main() -> None:
    made = parser(str(__doc__), "2,8", 5)
    made.add_argument("--optimizer", choices=SCRIPTS, default="own", help="of the training (own)")
    asked = made.parse_args()
    training = Training(asked.optimizer)
    with workplace() as folder, contenders(asked, folder, ByHand()) as everyone:
        for ranks in asked.ranks:
            took: dict[str, list[float]] = {one.name: [] for one in everyone}
            for turn in range(asked.rounds):
                for one in rotated(everyone, turn):
                    place = folder / f"{ranks}.{turn}" / one.name.replace(" ", "-")
                    outcome = play(place, one, Shape(1, ranks), RANK, training, times=0)
                    took[one.name].append(outcome.launch_ms)
            print(f"\nfrom the command to the first step: {ranks} ranks\n")
            show(took, {})


if __name__ == "__main__":
    main()
