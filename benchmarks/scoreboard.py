"""How right the analyzers are on data that others made, in one table.

    python -m benchmarks.scoreboard [--foreign DIR] [--mistakes]

Each data set is a module of `benchmarks/foreign`. The folder is named by --foreign or by
EVERSTEP_FOREIGN. *Silent* means that no cause was named, *wrong rank* that the cause was right but
not the ranks. The calibration error is the mean distance of the confidence from how often the
answers were right, in ten bins, over all answers that name a cause.
"""

import argparse
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.foreign import DataSet, data_sets

_HEAD = (
    "data set", "cases", "right", "silent", "wrong", "wrong rank", "calibration error", "ours",
    "published",
)  # fmt: skip


def table(sets: Sequence[DataSet]) -> Iterator[str]:
    """The table, in Markdown."""
    yield f"| {' | '.join(_HEAD)} |"
    yield f"|{'---|' * len(_HEAD)}"
    for scored in sets:
        error = scored.calibration_error()
        cells = (
            scored.name,
            len(scored.answers),
            *(scored.count(outcome) for outcome in ("right", "silent", "wrong", "wrong rank")),
            "–" if error is None else f"{error:.2f}",
            scored.ours or "–",
            scored.published or "–",
        )
        yield f"| {' | '.join(map(str, cells))} |"


def main() -> None:
    words = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    words.add_argument("--foreign", type=Path, default=os.environ.get("EVERSTEP_FOREIGN"))
    words.add_argument("--mistakes", action="store_true", help="list what was not right")
    asked = words.parse_args()
    if asked.foreign is None or not Path(asked.foreign).is_dir():
        raise SystemExit(f"there is no folder {asked.foreign}: name it with --foreign DIR")
    sets = list(data_sets(Path(asked.foreign)))
    print(*table(sets), sep="\n")
    if asked.mistakes:
        for scored in sets:
            for answer in scored.answers:
                if answer.outcome != "right":
                    print(f"{scored.name} {answer.case}: {answer.outcome}: {answer.detail}")


if __name__ == "__main__":
    main()
