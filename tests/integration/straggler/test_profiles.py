"""Traces that torch.profiler makes of real gloo trainings, and what is found in them."""

import subprocess
import sys
from pathlib import Path

import pytest

from everstep_services.cli.__main__ import main
from everstep_services.straggler.domain.analysis import analyze
from everstep_services.straggler.domain.operations import OperationKind
from everstep_services.straggler.traces import read_traces
from tests.e2e.ports import free_port
from tests.variants import variant

SCRIPT = Path(__file__).parents[1] / "scripts" / "profile_ranks.py"
RANKS = 4
WITHIN_S = 150


def profiled(folder: Path, slow: int, where: str) -> list[Path]:
    """One trace a rank."""
    port = free_port()
    told = [str(RANKS), str(port), str(folder), str(slow), where]
    processes = [
        subprocess.Popen([sys.executable, str(SCRIPT), str(rank), *told], stderr=subprocess.DEVNULL)
        for rank in range(RANKS)
    ]
    codes = [process.wait(WITHIN_S) for process in processes]
    assert codes == [0] * RANKS
    return [folder / f"rank{rank}.json" for rank in range(RANKS)]


@pytest.mark.parametrize(("where", "cause"), [variant("data", "input"), ("forward", "compute")])
def test_the_rank_that_is_slow_in_a_real_training_is_named_with_its_cause(
    tmp_path: Path, where: str, cause: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A6.1 on real ranks: everybody else waits in the collective, and is not blamed."""
    paths = profiled(tmp_path, 2, where)
    read = read_traces(paths)
    assert set(map(int, read.table.rank)) == set(range(RANKS))
    assert (read.table.kinds() == OperationKind.COLLECTIVE).sum() == RANKS * 8
    report = analyze(read.table)
    found = [(one.ranks, one.cause) for one in report.findings]
    assert found == [((2,), cause)], (report.notes, report.roles, report.rank_rows)
    assert report.findings[0].lost_s == pytest.approx(0.15, abs=0.05)
    assert report.findings[0].price_ratio is not None
    assert report.findings[0].price_ratio > 1

    assert main(["stragglers", "analyze", *map(str, paths)]) == 3
    assert capsys.readouterr().out.startswith("rank 2 (")
