"""Who hangs among 16 ranks in groups of tensor, pipeline and data parallelism, on two nodes."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.parallel_hangs import play
from tests.e2e.control_planes import PATIENT, Up, running_up

pytestmark = [pytest.mark.variant, pytest.mark.timeout(400)]
_MOST_BYTES = 1_000_000


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    with running_up(tmp_path_factory.mktemp("up"), **PATIENT) as up:
        yield up


@pytest.mark.parametrize("fault", ["compiles", "hung_kernel", "frozen"])
def test_the_rank_is_named_and_no_node(up: Up, fault: str, tmp_path: Path) -> None:
    (run,) = play(up, tmp_path, range(7, 8), fault, shape=(4, 2, 2))
    assert (run.last_ranks, run.nodes) == ((run.rank,), ()), run.line
    assert run.evidence_bytes < _MOST_BYTES, run.line
