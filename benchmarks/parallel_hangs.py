"""Who is accused of a hang among 64 ranks in groups of tensor, pipeline and data parallelism.

    python -m benchmarks.parallel_hangs [--runs 10] [--a-job 10] [--seed S] [--fault NAME]
        [--shape 4,4,4] [--results FILE]
    python -m benchmarks.parallel_hangs --report FILE
    python -m benchmarks.parallel_hangs --simulated gloo|nccl [--runs 100] [--seed S] [--fault NAME]

Each run is a training over gloo under `everstep run`, TP x PP x DP = 4 x 4 x 4 on two nodes. One
thing fails at a rank and a step that the seed draws (`parallel_hang_runs/cases.py`). Right: the
verdict that holds 5 s after the limit of the step that did not end names exactly that rank. A rank
that ends is counted from its end. Printed are faults, right, silent and wrong ranks, the time from
the limit to the first verdict, nodes that were accused although all are healthy, and the size of
the evidence of an incident. With --results, runs are added to a file.

Several runs are the rounds of one job (--a-job): Everstep starts the ranks again after each fault,
once the time for its verdict is over. Agents, and the processes that have imported torch and fork
the ranks, live on; verdicts know the incidents before.

With --simulated, the same script runs in threads of one process over a made backend, and only
recorders and stacks are judged (`parallel_hang_runs/simulated.py`): hangs whose ranks all live.
"""

import argparse
import json
import os
import random
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from datetime import datetime
from pathlib import Path
from statistics import median

import msgspec

from benchmarks.parallel_hang_runs.cases import FAULTS, drawn
from benchmarks.parallel_hang_runs.simulated import score
from benchmarks.verdict_runs.kept import keep
from benchmarks.verdict_runs.scores import Score
from tests.e2e.cluster import Body, Cluster
from tests.e2e.control_planes import PATIENT, Up, running_up
from tests.waiting import until

SCRIPT = Path(__file__).parent / "parallel_hang_runs" / "train.py"
LIMIT_S = 6.0
LATEST_S = 5.0
"""A verdict that comes later than that after the limit is not right."""
_CALM_S = LATEST_S + 2.0
"""No ranks are started again earlier than that after a fault was found."""
ENDS = ("killed", "cut_off")
"""Faults that end the rank: nothing waits for a limit."""
_SETTLES_S = 2.0
_WITHIN_S = 600.0


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One training, what failed, and what was said of it."""

    fault: str
    seed: int
    rank: int
    cause: str = ""
    reason: str = ""
    ranks: tuple[int, ...] = ()
    """Those that the verdict accuses that held at the latest moment."""
    last_ranks: tuple[int, ...] = ()
    """Those of the last verdict."""
    nodes: tuple[str, ...] = ()
    """All that any of its verdicts accuses."""
    confidence: float = 0.0
    found_s: float | None = None
    """From the limit to the first report."""
    first_s: float | None = None
    """From the limit to the first verdict that names ranks."""
    evidence_bytes: int = 0
    evidence_parts: int = 0
    seconds: float = 0.0
    load: float = 0.0

    @property
    def outcome(self) -> str:
        if self.nodes:
            return "node accused"
        if not self.ranks:
            return "silent" if not self.last_ranks else "late"
        return "right" if self.ranks == (self.rank,) else "wrong"

    @property
    def line(self) -> str:
        both = (self.found_s, self.first_s)
        times = " ".join("  –  " if after is None else f"{after:5.2f}" for after in both)
        return (
            f"{self.outcome:12} {self.fault:19} {self.seed:6} {self.cause:10} "
            f"{self.confidence:4.2f} "
            f"{list(self.ranks)} of {self.rank}, then {list(self.last_ranks)}; {times} s; "
            f"{self.evidence_bytes / 1024:.0f} KiB in {self.evidence_parts}; {self.seconds:.0f} s; "
            f"load {self.load:.0f}  {self.reason[:120]}"
        )


def play(
    up: Up,
    folder: Path,
    seeds: range,
    fault: str | None,
    kept: Path | None = None,
    shape: tuple[int, int, int] = (4, 4, 4),
    nodes: int = 2,
) -> Iterator[Run]:
    """One training for each seed, up to its verdict: the rounds of one job."""
    first, began = seeds[0], time.monotonic()
    job = f"hangs-{first}-{os.getpid()}"
    own = folder / job
    own.mkdir()
    ranks = shape[0] * shape[1] * shape[2]
    cluster = Cluster(own, job, up)
    try:
        options = (
            *("--nnodes", str(nodes), "--nproc-per-node", str(ranks // nodes)),
            *("--max-restarts", str(len(seeds) - 1)),
            *("--limit", "first-step=120", "--limit", f"step={LIMIT_S:g}"),
            *("-m", "benchmarks.parallel_hang_runs.train", "--seed", str(first)),
            *("--shape", ",".join(map(str, shape)), "--folder", str(own)),
            *(("--fault", fault) if fault else ()),
        )
        for number in range(nodes):
            cluster.run(*options, node=f"node-{number}")
        note, runs = _note(own, 0), list[tuple[Run, float]]()
        for number, seed in enumerate(seeds):
            case = drawn(seed, shape, fault)
            limit_at = note["at"] + (0 if case.fault in ENDS else LIMIT_S)
            is_last = seed == seeds[-1]
            following = _ended(cluster, limit_at) if is_last else _note(own, number + 1)
            ended = time.monotonic()
            run = Run(
                fault=case.fault, seed=seed, rank=case.rank, seconds=round(ended - began, 1),
                load=os.getloadavg()[0],
            )  # fmt: skip
            runs.append((run, limit_at))
            note, began = following, ended
        for number, (run, limit_at) in enumerate(runs):  # all that was said of it has arrived
            yield _judged(run, cluster, number, limit_at)
            if kept is not None and len(seeds) == 1:
                score = Score(
                    fault=run.fault, variant=0, seed=first, causes=(), culprits=(run.rank,),
                    world=ranks,
                )  # fmt: skip
                keep(kept, f"{run.fault}-{first}", score, cluster.api, job)
    finally:
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
            cluster.close()


def _note(folder: Path, restarts: int) -> Body:
    """When the fault of a round began, once it has."""
    path = folder / f"fault-{restarts}.json"
    until(path.exists, f"the fault after {restarts} restarts", within_s=_WITHIN_S)
    note: Body = json.loads(path.read_text())
    return note


def _ended(cluster: Cluster, limit_at: float) -> Body:
    """Wait for the end of the last round, and until its verdict is due."""
    for agent in cluster.agents:
        agent.wait(_WITHIN_S)
    ended = cluster.until_fact("job_ended", within_s=_WITHIN_S)
    threading.Event().wait(max(_SETTLES_S, limit_at + LATEST_S - time.time()))
    return ended


def _judged(run: Run, cluster: Cluster, restarts: int, limit_at: float) -> Run:
    """The run with what was said of it, and what that cost."""
    round_ = cluster.facts("round_formed")[restarts]["round"]
    opened = [body for body in cluster.facts("incident_opened") if body["round"] == round_]
    if not opened:
        return run
    incident = opened[0]["incident"]
    verdicts, evidence = (
        [body for body in cluster.facts(kind) if body["incident"] == incident]
        for kind in ("verdict_reached", "evidence_collected")
    )
    naming = [body for body in verdicts if _ranks(body)]
    in_time = [body for body in verdicts if _after_s(body, limit_at) <= LATEST_S]
    blobs = [body["blob"]["size_bytes"] for body in evidence if body.get("blob")]
    last = (in_time or verdicts or [{}])[-1]
    return msgspec.structs.replace(
        run, cause=last.get("cause", ""), reason=last.get("reason", ""),
        confidence=last.get("confidence", 0.0), ranks=_ranks(in_time[-1]) if in_time else (),
        last_ranks=_ranks(verdicts[-1]) if verdicts else (),
        nodes=tuple(sorted({node for body in verdicts for node in body.get("culprit_nodes", ())})),
        found_s=_after_s(opened[0], limit_at), evidence_parts=len(evidence),
        first_s=_after_s(naming[0], limit_at) if naming else None,
        evidence_bytes=sum(blobs) + sum(len(msgspec.json.encode(body)) for body in evidence),
    )  # fmt: skip


def _ranks(verdict: Body) -> tuple[int, ...]:
    return () if verdict.get("is_inconclusive") else tuple(verdict.get("culprit_ranks", ()))


def _after_s(fact: Body, limit_at: float) -> float:
    return round(datetime.fromisoformat(fact["at"]).timestamp() - limit_at, 2)


def table(runs: Sequence[Run]) -> Iterator[str]:
    """Each fault, and all of them."""
    heads = ("right", "silent", "late", "wrong", "node accused")
    yield f"{'':20}{'n':>4}" + "".join(f"{head:>14}" for head in heads)
    for name in (*(name for name, *_ in FAULTS), "all"):
        of = [run for run in runs if name in (run.fault, "all")]
        if of:
            counts = (sum(run.outcome == head for run in of) for head in heads)
            yield f"{name:20}{len(of):4}" + "".join(f"{count:>14}" for count in counts)
    for what in ("found_s", "first_s", "evidence_bytes", "evidence_parts", "seconds"):
        values = [value for run in runs if (value := getattr(run, what)) is not None]
        if values:
            yield f"{what:20}{median(values):>10g} median, {max(values):g} most"


def outcomes(scores: Mapping[str, Counter[str]]) -> Iterator[str]:
    """The simulated hangs of each fault, and all of them."""
    heads = ("right", "hedged", "silent", "wrong")
    yield f"{'':20}{'n':>4}" + "".join(f"{head:>8}" for head in heads)
    rows = {**dict(sorted(scores.items())), "all": sum(scores.values(), Counter())}
    for name, of in rows.items():
        yield f"{name:20}{of.total():4}" + "".join(f"{of[head]:>8}" for head in heads)


def played(asked: argparse.Namespace) -> Iterator[Run]:
    """All runs, those of a job together."""
    tp, pp, dp = map(int, asked.shape.split(","))
    calm = {"EVERSTEP_RENDEZVOUS__BACKOFF_S": f"[{_CALM_S:g}]"}
    many, last = 1 if asked.keep else asked.a_job, asked.seed + asked.runs
    with tempfile.TemporaryDirectory(prefix="parallel-") as name, \
            running_up(Path(name), **PATIENT, **calm) as up:  # fmt: skip
        for first in range(asked.seed, last, many):
            seeds = range(first, min(first + many, last))
            yield from play(up, Path(name), seeds, asked.fault, asked.keep, (tp, pp, dp))


def main() -> None:
    words = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    words.add_argument("--runs", type=int, default=10)
    words.add_argument("--seed", type=int, default=random.randrange(10**6), help="of the first")
    words.add_argument("--fault", choices=[name for name, *_ in FAULTS], help="drawn by default")
    words.add_argument("--results", type=Path)
    words.add_argument("--report", type=Path)
    words.add_argument("--keep", type=Path, help="for python -m benchmarks.verdicts --again")
    words.add_argument("--a-job", type=int, default=10, help="runs of one job; 1 with --keep")
    words.add_argument("--shape", default="4,4,4", help="TP,PP,DP")
    words.add_argument("--simulated", choices=("gloo", "nccl"))
    asked = words.parse_args()
    if asked.simulated:
        is_gloo = asked.simulated == "gloo"
        scores = score(asked.runs, asked.seed, (4, 4, 4), is_gloo=is_gloo, fault=asked.fault)
        print(f"seeds from {asked.seed}", *outcomes(scores), sep="\n")
        return
    if asked.report:
        lines = asked.report.read_bytes().splitlines()
        print(*table([msgspec.json.decode(line, type=Run) for line in lines]), sep="\n")
        return
    runs = []
    for run in played(asked):
        runs.append(run)
        print(run.line, flush=True)
        if asked.results:
            with asked.results.open("ab") as out:
                out.write(msgspec.json.encode(run) + b"\n")
    print("", *table(runs), sep="\n")
    used_s = sum(os.times()[2:4]) / len(runs)
    print(f"{'processor seconds':20}{used_s:>10.1f} a run, all processes together")


if __name__ == "__main__":
    main()
