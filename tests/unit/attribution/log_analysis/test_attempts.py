"""Several attempts of a training in one log: the verdict is about the last one."""

from pathlib import Path

import pytest

from everstep_services.attribution.log_analysis import attempts
from everstep_services.attribution.log_analysis.files import analyze_files
from everstep_services.attribution.log_analysis.report import lines
from tests.unit.attribution.log_analysis.logs import raised, written

OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
REQUEUE = (
    "slurmstepd: error: *** JOB 608 ON n1 CANCELLED AT 2026-11-02T02:06:12 DUE TO JOB REQUEUE ***\n"
    "srun: error: n1: tasks 2-3: Exited with exit code 1\n"
)
TORCHRUN = (
    "I1102 03:11:11.000000 4711 api.py:1012] [default] Worker group FAILED. 2/3 attempts left; "
    "will restart worker group\n"
    "I1102 03:11:12.000000 4711 api.py:702] [default] Starting worker group\n"
)


def steps(first: int, last: int, prefix: str = "") -> str:
    return "".join(f"{prefix}step {step} loss 0.1\n" for step in range(first, last))


def lost(last: str, rank: int) -> str:
    """An exception that a rank may catch."""
    return raised(last, f"[rank{rank}]: ")


def ended(last: str, prefix: str = "") -> str:
    """An exception that went through the whole script."""
    return raised(last, prefix).replace("in step", "in <module>")


@pytest.mark.parametrize(
    ("log", "attempts", "same", "failure_class"),
    [
        ((steps(1, 6) + ended(OOM)) * 2, 2, 2, "gpu_oom"),
        ((steps(1, 6) + raised("KeyError: 'a'")) * 5, 5, 5, "python_exception"),
        ((steps(1, 6, "[rank1]: ") + raised(OOM, "[rank1]: ")) * 3, 3, 3, "gpu_oom"),
        (steps(1, 6) + ended(OOM) + steps(6, 12) + ended(OOM), 2, 2, "gpu_oom"),
        ((steps(1, 6) + "Segmentation fault (core dumped)\n") * 3, 3, 3, "segfault"),
        ((lost("KeyError: 'a'", 0) + TORCHRUN) * 2 + lost(OOM, 0), 3, 1, "gpu_oom"),
        (steps(1, 9) + REQUEUE + steps(5, 9) + raised(OOM), 2, 1, "gpu_oom"),
        (steps(1, 9) + REQUEUE + steps(5, 9) + REQUEUE, 2, 2, "preempted"),
        (f"Epoch 1 step 8\n{ended(OOM)}Epoch 1 step 3\n{ended(OOM)}", 2, 2, "gpu_oom"),
    ],
)  # fmt: skip
def test_the_last_attempt_has_the_verdict(
    log: str, attempts: int, same: int, failure_class: str, tmp_path: Path
) -> None:
    report = written(tmp_path, job=log)
    assert report.cause is not None
    assert (report.verdict, report.cause.failure_class) == ("cause", failure_class)
    assert (report.attempts, report.same_attempts) == (attempts, same)
    assert len(report.earlier) == attempts - 1
    text = "\n".join(lines(report))
    assert f"The logs show {attempts} attempts" in text
    assert (f"the last {same} ended in the same way" in text) == (same > 1)


@pytest.mark.parametrize(
    "log",
    [
        steps(1, 6) + lost("TimeoutError: read", 0) + steps(6, 9) + lost(OOM, 1),
        f"Epoch 1 step 9\n{raised('TimeoutError: read')}Epoch 2 step 1\n{raised(OOM)}",
        steps(1, 6) + raised(OOM) + "step 5 loss 0.1\n",
        "".join(raised("KeyError: 'a'", f"[rank{rank}]: ") for rank in range(8)),
        "".join(ended("KeyError: 'a'") for _ in range(8)),
        steps(1, 6, "[rank0]: ") + lost(OOM, 1) + steps(5, 6, "[rank2]: "),
    ],
)  # fmt: skip
def test_what_is_one_attempt(log: str, tmp_path: Path) -> None:
    """A caught exception, an epoch, a summary, ranks that fail alike, a late line of a rank."""
    report = written(tmp_path, job=log)
    assert (report.verdict, report.attempts, report.earlier) == ("cause", 1, ())


def test_an_attempt_that_goes_on_is_well(tmp_path: Path) -> None:
    report = written(tmp_path, job=steps(1, 6) + ended(OOM) + steps(3, 20))
    assert (report.verdict, report.attempts) == ("nothing", 2)
    assert [before.failure_class for before in report.earlier] == ["gpu_oom"]


def test_files_tell_their_attempts_by_their_names(tmp_path: Path) -> None:
    """Rounds of ours, attempts of torchrun, and cycles; rank 1 has no log of the first."""
    paths = []
    for name, log in (
        ("round-1/rank-0", ended("KeyError: 'a'")),
        ("round-2/rank-0", ended(OOM)),
        ("round-2/rank-1", raised("RuntimeError: Connection closed by peer [10.0.0.5]:1")),
    ):
        paths.append(tmp_path / name / "stderr.log")
        paths[-1].parent.mkdir(parents=True)
        paths[-1].write_text(log)
    report = analyze_files(paths).report()
    assert (report.attempts, report.culprits) == (2, (0,))
    assert [(before.number, before.failure_class) for before in report.earlier] == [
        (1, "python_exception")
    ]


def test_a_long_loop_is_counted_and_not_kept(tmp_path: Path) -> None:
    report = written(tmp_path, job=(steps(1, 4) + ended(OOM)) * 300)
    assert (report.attempts, len(report.earlier)) == (300, 7)
    assert report.cause is not None
    assert report.cause.line == 300 * 7


def test_origins_of_attempts_that_are_not_kept_take_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash loop of many attempts names the ranks of the last one, too."""
    monkeypatch.setattr(attempts, "MOST_ORIGINS", 64)
    attempt = "".join(raised("KeyError: 'a'", f"[rank{rank}]: ") for rank in range(4))
    log = "".join(f"[rank0]: Resuming training from step {n}\n{attempt}" for n in range(1, 40))
    report = written(tmp_path, job=log)
    assert (report.attempts, report.culprits) == (39, (0, 1, 2, 3))
