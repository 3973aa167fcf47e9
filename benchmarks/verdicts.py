"""How often the verdict about a training of the corpus is right, and how sure it may be.

    python -m benchmarks.verdicts [--faults NAMES] [--variants N] [--seeds N] [--results FILE]
    python -m benchmarks.verdicts --report FILE
    python -m benchmarks.verdicts --again FOLDER

Each fault of `tests/corpus` is run under `everstep run` with four ranks and no restart, once for
each seed; the verdict that holds some seconds after its end is compared with the label. The seed
draws the order of the faults, and for each of them the rank and the step. With
--results, runs are added to a file, and those that it has are not made again. Printed are classes
of faults, the confusion of causes, precision and recall, how often it is silent, how often it is
right by its confidence, and whether any node was accused: all of them are healthy. --keep has the
facts and the evidence of each run written to a folder; --again judges them anew by today's rules.
"""

import argparse
import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from benchmarks.verdict_runs.kept import judged_again, keep
from benchmarks.verdict_runs.scores import Score, append_score, read_scores, tables
from everstep_services.cli.errors import CliError
from tests.corpus.faults import FAULTS, WORLD, Fault, command
from tests.e2e.cluster import Cluster
from tests.e2e.control_planes import PATIENT, Up, running_up
from tests.waiting import until

LIMITS = {"first-step": 90, "step": 8, "outside": 10}
SETTLES_S = 4.0
"""Evidence may come later, and change a verdict."""
ENDS_WITHIN_S = 240.0


def runs(asked: argparse.Namespace, known: Sequence[Score]) -> Iterator[tuple[Fault, int]]:
    """What is still to be run, in an order that the seed draws: any part of it is a sample.

    Each fault has a seed of its own, so that not all of them hit the same rank.
    """
    made = {(one.fault, one.variant, one.seed) for one in known}
    names = set(asked.faults.split(",")) if asked.faults else {name for name, _ in FAULTS}
    unknown = names - {name for name, _ in FAULTS}
    if unknown:
        raise SystemExit(f"there is no fault {', '.join(sorted(unknown))} in tests/corpus")
    for seed in range(asked.seed, asked.seed + asked.seeds):
        faults = list(FAULTS.items())
        random.Random(seed).shuffle(faults)
        for (name, variant), fault in faults:
            own = random.Random(f"{seed} {fault}").randrange(10**6)
            if (
                name in names
                and variant < asked.variants
                and not fault.needs
                and (name, variant, own) not in made
            ):
                yield fault, own


def play(up: Up, folder: Path, fault: Fault, seed: int, kept: Path | None) -> Score:
    """One training, to its end, and its verdict."""
    job = f"{str(fault).replace('_', '-')}-{seed}-{os.getpid()}"
    own = folder / job
    own.mkdir()
    began = time.monotonic()
    cluster = Cluster(own, job, up)
    try:
        limits = [word for name, of in LIMITS.items() for word in ("--limit", f"{name}={of}")]
        options = ("--nproc-per-node", str(WORLD), "--max-restarts", "0", *limits)
        agent = cluster.run(*options, *command(fault, seed, own))
        agent.wait(ENDS_WITHIN_S)
        threading.Event().wait(SETTLES_S)
        score = _score(fault, seed, _said(cluster), time.monotonic() - began)
        if kept is not None:
            keep(kept, f"{fault}-{seed}", score, cluster.api, job)
    finally:
        with redirect_stdout(sys.stderr if os.environ.get("EVERSTEP_VERBOSE") else _Nowhere()):
            cluster.close()
    return score


def _said(cluster: Cluster) -> list[dict[str, Any]]:
    """The verdicts about its first incident, in their order."""

    def first() -> str | None:
        found = cluster.incidents()
        return found[0]["incident"] if found else None

    try:
        incident = until(first, "an incident", despite=CliError, within_s=10)
    except AssertionError:
        return []
    found = [dict(one) for one in cluster.facts("verdict_reached")]
    return [one for one in found if one["incident"] == incident]


def _score(fault: Fault, seed: int, said: list[dict[str, Any]], seconds: float) -> Score:
    causes = (fault.cause, *fault.also)
    culprits = fault.culprits(seed, WORLD)
    label: dict[str, Any] = {
        "fault": fault.name, "variant": fault.variant, "seed": seed, "causes": causes,
        "culprits": culprits, "world": WORLD, "seconds": round(seconds, 1),
    }  # fmt: skip
    if not said:
        return Score(**label)
    last = said[-1]
    return Score(
        **label, said=last["cause"], kind=last.get("kind", ""), confidence=last["confidence"],
        ranks=tuple(last.get("culprit_ranks", ())), nodes=tuple(last.get("culprit_nodes", ())),
        is_inconclusive=last.get("is_inconclusive", False), reason=last["reason"],
        first_s=said[0].get("took_s"),
    )  # fmt: skip


class _Nowhere:
    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None:
        pass


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--faults", default="", help="classes, with commas; all by default")
    words.add_argument("--variants", type=int, default=99, help="the most of each class")
    words.add_argument("--seed", type=int, default=1, help="the first seed")
    words.add_argument("--seeds", type=int, default=1, help="how many seeds")
    words.add_argument("--minutes", type=float, default=600.0, help="begin no run after that")
    words.add_argument("--results", type=Path)
    words.add_argument("--report", type=Path)
    words.add_argument("--keep", type=Path, help="a folder for facts and evidence")
    words.add_argument("--again", type=Path, help="such a folder: judge its runs anew")
    asked = words.parse_args()
    if asked.report:
        print("\n".join(tables(read_scores(asked.report))))
        return
    if asked.again:
        again = []
        for one in judged_again(asked.again):
            again.append(one)
            print(one.line, flush=True)
        print("\n".join(["", *tables(again)]))
        return
    scores = read_scores(asked.results) if asked.results else []
    ends_s = time.monotonic() + 60 * asked.minutes
    with tempfile.TemporaryDirectory(prefix="verdicts-") as name, \
            running_up(Path(name), **PATIENT) as up:  # fmt: skip
        for fault, seed in runs(asked, scores):
            if time.monotonic() >= ends_s:
                break
            scores.append(one := play(up, Path(name), fault, seed, asked.keep))
            if asked.results:
                append_score(asked.results, one)
            print(one.line, flush=True)
    print()
    print("\n".join(tables(scores)))


if __name__ == "__main__":
    main()
