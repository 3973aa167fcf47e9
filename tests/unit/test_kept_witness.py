"""A node remembers on its disk which state it had in memory (E5, A8.7)."""

from pathlib import Path

import pytest

from everstep_services.agent.checkpoints.witness import Witness
from tests.fakes.clock import FakeClock


def test_what_was_kept_is_known_to_the_next_agent(tmp_path: Path) -> None:
    clock = FakeClock()
    witness = Witness(tmp_path, "j", "n1", clock)
    assert witness.lost() is None, "there has never been one"
    witness.saw(10, 1)
    witness.saw(20, 1)
    killed = Witness(tmp_path, "j", "n1", clock).lost()
    assert killed is not None
    assert killed.step == 10, "it is written seldom"
    witness.close()
    lost = Witness(tmp_path, "j", "n1", clock).lost()
    assert lost is not None
    assert lost.step == 20
    assert lost.reason.startswith("it was in the memory of n1, saved in round 1, and is gone: ")
    assert Witness(tmp_path, "other", "n1", clock).lost() is None


def test_after_a_good_end_nothing_is_lost(tmp_path: Path) -> None:
    clock = FakeClock()
    witness = Witness(tmp_path, "j", "n1", clock)
    witness.saw(10, 1)
    witness.forget()
    witness.close()
    assert Witness(tmp_path, "j", "n1", clock).lost() is None


@pytest.mark.parametrize("octets", [b"{", b"[]", b'{"step":"x"}'])
def test_what_cannot_be_read_is_no_witness(tmp_path: Path, octets: bytes) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "j@n1.json").write_bytes(octets)
    assert Witness(tmp_path, "j", "n1", FakeClock()).lost() is None


def test_a_disk_that_takes_nothing_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("in the way")
    witness = Witness(tmp_path, "j", "n1", FakeClock())
    witness.saw(10, 1)
    witness.forget()
