"""What a log repeats is counted, and not read again: the answer is the same."""

from pathlib import Path

import pytest

from everstep_services.attribution.log_analysis import chunks, files
from everstep_services.attribution.log_analysis.repeats import RepeatedBlocks
from tests.fakes import failure_logs
from tests.unit.attribution.log_analysis.logs import raised, written

OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"


def test_a_block_is_found_by_all_of_its_lines(tmp_path: Path) -> None:
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
    monkeypatch.setattr(RepeatedBlocks, "find", lambda *_: None)
    assert files.analyze_files(truth.paths).report() == fast


def test_a_block_that_a_chunk_cuts_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block is known by lines of one chunk only."""
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 1000)
    log = "".join(raised(f"KeyError: '{'abc'[turn % 3]}'", "[rank0]: ") for turn in range(60))
    fast = written(tmp_path, job=log)
    monkeypatch.setattr(RepeatedBlocks, "find", lambda *_: None)
    assert written(tmp_path, job=log) == fast
