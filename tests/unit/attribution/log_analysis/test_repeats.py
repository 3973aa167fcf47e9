"""What a log repeats is not read again: the answer is the same."""

from pathlib import Path

import pytest

from everstep_services.attribution.log_analysis import chunks, files
from tests.fakes import failure_logs
from tests.unit.attribution.log_analysis.logs import raised, read_everything, written

OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"


def test_a_traceback_is_found_by_all_of_its_lines(tmp_path: Path) -> None:
    log = raised("KeyError: 'a'") * 30 + raised("KeyError: 'b'") * 30 + raised(OOM)
    report = written(tmp_path, job=log)
    assert report.cause is not None
    assert {report.cause.line, *(other.line for other in report.alternatives)} == {4, 124, 244}


def test_times_do_not_matter_and_ranks_do(tmp_path: Path) -> None:
    log = "".join(
        raised(OOM, f"[rank{turn % 5}]: 2026-11-02 03:{turn:02}:11,250 ") for turn in range(50)
    )
    assert written(tmp_path, job=log).culprits == (0, 1, 2, 3, 4)


@pytest.mark.parametrize("kind", ["python_exception", "collective_timeout", "gpu_oom", "killed"])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_answer_is_that_of_reading_everything(
    kind: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a log stands in a file several times."""
    truth = failure_logs.write(tmp_path, kind, seed, 16)
    for path in truth.paths:
        path.write_bytes(path.read_bytes() * 3)
    fast = files.analyze_files(truth.paths).report()
    read_everything(monkeypatch)
    assert files.analyze_files(truth.paths).report() == fast


def test_a_traceback_that_a_chunk_cuts_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A traceback is remembered by lines of one chunk only."""
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 1000)
    log = "".join(raised(f"KeyError: '{'abc'[turn % 3]}'", "[rank0]: ") for turn in range(60))
    fast = written(tmp_path, job=log)
    read_everything(monkeypatch)
    assert written(tmp_path, job=log) == fast


@pytest.mark.parametrize("size", [3000, 1 << 20])
def test_repeated_failures_mean_what_their_lines_mean(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attempts begin between them, by steps and by exceptions that end a process."""
    monkeypatch.setattr(chunks, "CHUNK_BYTES", size)
    timeout = (
        "[rank{}]: Watchdog caught collective operation timeout: WorkNCCL(SeqNum={}, "
        "OpType=ALLREDUCE, Timeout(ms)=800) ran for 801 milliseconds before timing out.\n"
    )
    parts = [raised(f"KeyError: '{name}'", f"[rank{rank}]: ") for rank, name in enumerate("abca")]
    parts += [timeout.format(rank, 7 + rank % 2) for rank in range(3)]
    end = raised(OOM).replace("in step", "in <module>")
    turns = [
        "".join(parts),
        "all is well\n" + end,
        "iteration 7/ 9 loss: 1\n",
        "".join(parts[::-1]),
    ]
    log = "".join(turns * 30)
    fast = written(tmp_path, job=log)
    read_everything(monkeypatch)
    assert written(tmp_path, job=log) == fast


def test_steps_within_a_traceback_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line of code and one about progress have the same meaning for a traceback."""
    monkeypatch.setattr(files, "_LOOKED_UP", 40)
    codes = ["all is well"] * 20 + [f"step {step}" for step in (3, 4, 5, 6)]
    codes += ["all is well"] * 10 + [f"step {step}" for step in (7, 8, 9, 1, 2, 3)]
    parts = [raised("KeyError: 'a'").replace("x = y[3]", code) for code in codes]
    log = f"step 1 loss 1\nstep 2 loss 1\n{''.join(parts)}"
    fast = written(tmp_path, job=log)
    read_everything(monkeypatch)
    assert written(tmp_path, job=log) == fast
    assert fast.attempts == 2
