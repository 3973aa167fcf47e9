"""How many restarts a bug costs before its job is stopped, where attribution may stop it.

    python -m benchmarks.wasted_restarts [--faults NAMES] [--seed S] [--most N]

Each variant of faults of `tests/corpus` that fail in the same way whenever they run, by `everstep
run` with four ranks, ten restarts and `attribution.user_errors=enforce`. Without the rule all ten
would be used. Target: two (the retry that confirms, and the one that ran before the verdict).
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from statistics import median

from tests.corpus.faults import FAULTS, WORLD, Fault, command
from tests.e2e.cluster import Cluster
from tests.e2e.control_planes import PATIENT, Up, running_up

RESTARTS = 10
TARGET = 2
ENDS_WITHIN_S = 240.0
ALWAYS = "exception,bad_config,missing_file"


@dataclass(frozen=True, slots=True)
class Wasted:
    """One job."""

    fault: str
    restarts: int
    exit_code: int
    rules: tuple[str, ...]
    """By which it was stopped."""
    seconds: float

    def __str__(self) -> str:
        by = ", ".join(self.rules) or "nothing"
        return (
            f"{self.fault:<16} {self.restarts} restarts, exit code {self.exit_code}, stopped by "
            f"{by}, {self.seconds:.0f} s"
        )


def play(up: Up, folder: Path, fault: Fault, seed: int) -> Wasted:
    """One training until its job is over."""
    job = f"{str(fault).replace('_', '-')}-{seed}-{os.getpid()}"
    own = folder / job
    own.mkdir()
    began = time.monotonic()
    cluster = Cluster(own, job, up)
    try:
        options = ("--nproc-per-node", str(WORLD), "--max-restarts", str(RESTARTS))
        code = cluster.run(*options, *command(fault, seed, own)).wait(ENDS_WITHIN_S)
        cluster.until_fact("job_ended")
        stops = [one for one in cluster.facts("action_decided") if one["action"] == "stop"]
        rules = [one["rule"] for one in stops if one.get("mode", "enforce") == "enforce"]
        rounds = len(cluster.facts("round_formed"))
    finally:
        with redirect_stdout(sys.stderr if os.environ.get("EVERSTEP_VERBOSE") else StringIO()):
            cluster.close()
    took_s = time.monotonic() - began
    return Wasted(str(fault), rounds - 1, code, tuple(dict.fromkeys(rules)), took_s)


def chosen(names: str, most: int) -> Iterator[Fault]:
    """Variants of these classes that need nothing of the machine."""
    for fault in FAULTS.values():
        if fault.name in names.split(",") and fault.variant < most and not fault.needs:
            yield fault


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--faults", default=ALWAYS, help="classes, with commas")
    words.add_argument("--seed", type=int, default=1)
    words.add_argument("--most", type=int, default=99, help="the most variants of each class")
    asked = words.parse_args()
    switch = {"EVERSTEP_ATTRIBUTION__USER_ERRORS": "enforce"}
    done = []
    with tempfile.TemporaryDirectory(prefix="wasted-") as name, \
            running_up(Path(name), **PATIENT, **switch) as up:  # fmt: skip
        for fault in chosen(asked.faults, asked.most):
            done.append(one := play(up, Path(name), fault, asked.seed))
            print(one, flush=True)
    counts = [one.restarts for one in done]
    within = sum(count <= TARGET for count in counts)
    print(
        f"\n{len(done)} jobs: restarts median {median(counts):g}, most {max(counts)}; at most "
        f"{TARGET} in {within} of {len(done)}"
    )


if __name__ == "__main__":
    main()
