"""From the command to the first step: Everstep, torchrun and no launcher start the same training.

    python -m benchmarks.launch --ranks 2,8

The figure is the time from the start of the launcher's process until the last rank has made its
first step, as the ranks themselves write it down. Everstep runs with its bus and its services
inside; each round takes the contenders in another order.
"""

from benchmarks.restarts.cases import RANK, play
from benchmarks.restarts.contenders import Shape, Training
from benchmarks.restarts.limits import ByHand
from benchmarks.restarts.options import contenders, parser, rotated, workplace
from benchmarks.restarts.table import show


def main() -> None:
    made = parser(str(__doc__), "2,8", 5)
    made.add_argument("--optimizer", action="store_true", help="train with one of torch's own")
    asked = made.parse_args()
    training = Training(kind="torch" if asked.optimizer else "own")
    with workplace() as folder:
        for ranks in asked.ranks:
            everyone = contenders(asked, ByHand())
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
