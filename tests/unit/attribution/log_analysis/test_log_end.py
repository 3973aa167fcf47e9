"""How logs end: hangs before a limit, work that was not done, ranks in different collectives."""

from pathlib import Path

import pytest

from everstep_services.attribution.log_analysis.report import lines
from tests.unit.attribution.log_analysis.logs import written

WORLD = 32
LIMIT = (
    "0: slurmstepd: error: *** STEP 34.0 ON n1 CANCELLED AT 2026-11-02T09:22:22 "
    "DUE TO TIME LIMIT ***\n"
)
EARLY, LATER = LIMIT.replace("09:22", "03:06"), LIMIT.replace("09:22:22", "05:05:31")
CANCEL = LIMIT.replace(" DUE TO TIME LIMIT", "")
OOM = "Nov  2 09:22:22 n1 kernel: Out of memory: Killed process 77 (python) total-vm:1000kB\n"


def printed(form: str, silent: tuple[int, ...] = (), steps: int = 6) -> str:
    """Lines of all ranks, a minute a step; the silent ones do not write the last."""
    return "".join(
        form.format(rank=rank, step=step, at=f"2026-11-02 03:{step:02}:{rank:02}")
        for step in range(steps)
        for rank in range(WORLD)
        if step < steps - 1 or rank not in silent
    )


@pytest.mark.parametrize(
    "form",
    [
        "[rank{rank}]: {at} step {step} forward done\n",
        "{rank:>2}: {at} step {step} forward done\n",
        "{rank:>2}: iteration {step} done\n",
        "{rank:>2}: before barrier\n",
        "{at} Rank {rank}: entering all_reduce {step}\n",
    ],
)
@pytest.mark.parametrize("end", [LIMIT, CANCEL])
def test_a_hang_that_a_limit_ended(form: str, end: str, tmp_path: Path) -> None:
    """The limit is not the cause, and rank 0, before whose number it stands, has no part in it."""
    report = written(tmp_path, job=printed(form, (0, 25)) + end)
    assert report.cause is not None
    assert (report.verdict, report.cause.failure_class) == ("inconclusive", "hang")
    assert report.culprits == (0, 25)
    assert "ranks 0 and 25 fell silent first" in next(lines(report))
    assert report.missing[0].startswith("why they stood still")
    assert report.alternatives[0].failure_class in {"time_limit", "cancelled"}


@pytest.mark.parametrize("end", [LIMIT, CANCEL, OOM])
def test_silence_of_all_ranks_is_a_hang(end: str, tmp_path: Path) -> None:
    report = written(tmp_path, job=printed("[rank{rank}]: {at} step {step} loss 2\n") + end)
    assert report.cause is not None
    assert (report.cause.failure_class, report.culprits) == ("hang", ())
    assert "in the last 6.3 h" in report.cause.means


@pytest.mark.parametrize(
    ("log", "failure_class"),
    [
        (printed("[rank{rank}]: {at} step {step}\n", (0, 25)) + EARLY, "time_limit"),
        (printed("{rank:>2}: step {step}\n") + LIMIT, "time_limit"),
        (printed("{rank:>2}: step {step}\n", (3,)) + "step 9 loss 1\n" * 900 + LIMIT, "time_limit"),
        (printed("[rank{rank}]: {at} step {step}\n") + LATER, "time_limit"),
        (printed("{rank:>2}: step {step}\n", (3,)) + OOM, "host_oom"),
        ("2026-11-02 03:00:00 ready\n" * 9 + OOM, "host_oom"),
    ],
)  # fmt: skip
def test_ranks_that_worked_to_the_end(log: str, failure_class: str, tmp_path: Path) -> None:
    """Also where a clock may be in another time zone."""
    report = written(tmp_path, job=log)
    assert report.cause is not None
    assert (report.verdict, report.cause.failure_class) == ("cause", failure_class)


IN_STEP = "".join(f"step {n} forward\nstep {n} backward\nstep {n} update\n" for n in range(5))


@pytest.mark.parametrize(
    ("log", "missing"),
    [
        ("iteration 3/ 500 loss 1\niteration 4/ 500 loss 1\n", "counts 4 of 500"),
        ("Train Epoch: 1 [58240/60000 (97%)] Loss: 0.4\n", "counts 58240 of 60000"),
        (f"{IN_STEP}step 5 forward\nstep 5 backward\n", "another line of the step"),
        ("2026-11-02 03:11:11,5 - root - INFO - Starting training step on epoch 3\n", "begins"),
    ],
)
def test_a_log_that_stops_within_its_work(log: str, missing: str, tmp_path: Path) -> None:
    report = written(tmp_path, job=log)
    assert (report.verdict, report.cause) == ("inconclusive", None)
    assert missing in report.missing[0]


@pytest.mark.parametrize(
    "log",
    [
        IN_STEP,
        "iteration 4/ 500 loss 1\ntraining is complete\n",
        "Train Epoch: 14 [59520/60000 (99%)] Loss: 0.1\nTest set: average loss 0.03\n",
        "iteration 500/ 500 loss 1\n",
        "loading the model before training took 3 s\n",
    ],
)
def test_a_log_that_is_at_its_end(log: str, tmp_path: Path) -> None:
    assert written(tmp_path, job=log).verdict == "nothing"


def timed_out(rank: int, number: int, kind: str, size: int = 8, group: str = "") -> str:
    return (
        f"[rank{rank}]:[E513 13:25:57.7 ProcessGroupNCCL.cpp:616] [{group}Rank {rank}] Watchdog "
        f"caught collective operation timeout: WorkNCCL(SeqNum={number}, OpType={kind}, "
        f"NumelIn={size}, NumelOut={size}, Timeout(ms)=1800000) ran for 1800042 milliseconds\n"
    )


@pytest.mark.parametrize(
    ("works", "culprits", "weight"),
    [
        ([(7, "ALLREDUCE"), (7, "ALLREDUCE"), (7, "BROADCAST")], (2,), 0.9),
        ([(7, "ALLREDUCE", 8), (7, "ALLREDUCE", 9), (7, "ALLREDUCE", 8)], (1,), 0.9),
        ([(7, "ALLREDUCE"), (7, "BROADCAST")], (), 0.9),
        ([(9, "_ALLGATHER_BASE"), (7, "BROADCAST"), (7, "BROADCAST")], (0,), 0.6),
    ],
)
def test_ranks_in_different_collectives(
    works: list[tuple[int, str]], culprits: tuple[int, ...], weight: float, tmp_path: Path
) -> None:
    log = "".join(timed_out(rank, *work) for rank, work in enumerate(works))
    report = written(tmp_path, job=log)
    assert report.cause is not None
    assert report.cause.failure_class == "collective_mismatch"
    assert (report.verdict, report.culprits) == ("cause", culprits)
    assert report.weight == weight


@pytest.mark.parametrize(
    "log",
    [
        "".join(timed_out(rank, 7, "ALLREDUCE") for rank in (1, 2, 3)),
        timed_out(0, 7, "ALLREDUCE", group="PG 1 ") + timed_out(1, 7, "BROADCAST", group="PG 2 "),
        timed_out(0, 7, "ALLREDUCE") + timed_out(1, 900, "BROADCAST"),
        timed_out(0, 7, "SEND", 8) + timed_out(1, 7, "RECV", 8),
        timed_out(0, 7, "ALLTOALL_BASE", 8) + timed_out(1, 7, "ALLTOALL_BASE", 9),
    ],
)
def test_what_is_no_mismatch(log: str, tmp_path: Path) -> None:
    """Also: rank 0 without a line in the first of them is not accused for that."""
    report = written(tmp_path, job=log)
    assert (report.verdict, report.culprits) == ("inconclusive", ())
