"""Runs many drawn trainings, in one tree of processes for each world size, and judges them."""

import json
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tests.chaos.numerics_runs.drawing import drawn
from tests.chaos.numerics_runs.tally import Row, judged

ROOT = Path(__file__).parents[3]
_LAST_LINES = 12


def judged_runs(seeds: Iterable[int], folder: Path) -> Iterator[Row]:
    """A row for each seed. A training in which a rank dies is a row, too."""
    by_world: dict[int, list[int]] = {}
    for seed in seeds:
        by_world.setdefault(drawn(seed).world, []).append(seed)
    for world, of_world in sorted(by_world.items()):
        left, tree = of_world, 0
        while left:
            own = folder / f"{world}-{tree}"
            own.mkdir(parents=True)
            tree += 1
            errors = _carry_out(world, left, own)
            results = _results(world, own)
            done = [seed for seed in left if all(seed in of_rank for of_rank in results)]
            for seed in done:
                yield judged(drawn(seed), [of_rank[seed] for of_rank in results])
            left = [seed for seed in left if seed not in done]
            if left:
                yield Row(drawn(left[0]), faults=[f"a rank has died: {errors}"])
                left = left[1:]


def _carry_out(world: int, seeds: list[int], folder: Path) -> str:
    """The last lines of what the ranks have complained of; empty if all have ended well."""
    command = [sys.executable, "-m", "tests.chaos.numerics_runs.training", str(world), str(folder)]
    run = subprocess.run(
        [*command, *map(str, seeds)], capture_output=True, text=True, cwd=ROOT, check=False
    )
    (folder / "stderr.log").write_text(run.stderr)
    lines = [line for line in run.stderr.splitlines() if not line.startswith(" ")]
    return " / ".join(lines[-_LAST_LINES:]) if run.returncode else ""


def _results(world: int, folder: Path) -> list[dict[int, dict[str, Any]]]:
    results = []
    for rank in range(world):
        file = folder / f"rank-{rank}.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        decoded = [json.loads(line) for line in lines if line.endswith("}")]
        results.append({result["seed"]: result for result in decoded})
    return results
