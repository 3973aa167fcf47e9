"""A node remembers on its disk which state it had in memory (E5, A8.7)."""

from collections.abc import Callable
from pathlib import Path

import pytest

from everstep_services.agent.replicas.last_state import LastState
from tests.fakes.clock import FakeClock


def at_once(work: Callable[[], None]) -> None:
    work()


def witness_of(folder: Path, clock: FakeClock, job: str = "j") -> LastState:
    return LastState(folder, job, "n1", clock, in_background=at_once)


def test_what_was_kept_is_known_to_the_next_agent(tmp_path: Path) -> None:
    clock = FakeClock()
    witness = witness_of(tmp_path, clock)
    assert witness.lost() is None, "there has never been one"
    witness.saw(10, 1)
    witness.saw(20, 1)
    killed = witness_of(tmp_path, clock).lost()
    assert killed is not None
    assert killed.step == 10, "it is written seldom"
    witness.close()
    lost = witness_of(tmp_path, clock).lost()
    assert lost is not None
    assert lost.step == 20
    assert lost.reason.startswith("it was in the memory of n1, saved in round 1, and is gone: ")
    assert witness_of(tmp_path, clock, "other").lost() is None


def test_what_is_still_to_be_written_when_the_job_ends_well_is_not(tmp_path: Path) -> None:
    written: list[Callable[[], None]] = []
    witness = LastState(tmp_path, "j", "n1", FakeClock(), in_background=written.append)
    witness.saw(10, 1)
    witness.forget()
    for work in written:
        work()
    assert written
    assert witness_of(tmp_path, FakeClock()).lost() is None


def test_after_a_good_end_nothing_is_lost(tmp_path: Path) -> None:
    clock = FakeClock()
    witness = witness_of(tmp_path, clock)
    witness.saw(10, 1)
    witness.forget()
    witness.close()
    assert witness_of(tmp_path, clock).lost() is None


@pytest.mark.parametrize("octets", [b"{", b"[]", b'{"step":"x"}'])
def test_what_cannot_be_read_is_no_witness(tmp_path: Path, octets: bytes) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "j@n1.json").write_bytes(octets)
    assert witness_of(tmp_path, FakeClock()).lost() is None


def test_a_disk_that_takes_nothing_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("in the way")
    witness = witness_of(tmp_path, FakeClock())
    witness.saw(10, 1)
    witness.forget()
