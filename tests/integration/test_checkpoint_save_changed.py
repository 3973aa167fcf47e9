"""States that change on their way to the global tier: saved as they were, or refused."""

import tempfile
from pathlib import Path

import pytest

from tests.changed import save_and_change, small_pieces

SAVES = 40


@pytest.mark.parametrize("is_lazy", [True, False])
def test_what_the_writer_begins_early_is_the_state_at_the_call(
    monkeypatch: pytest.MonkeyPatch, is_lazy: bool
) -> None:
    small_pieces(monkeypatch)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        seen = save_and_change(
            Path(folder), monkeypatch, saves=SAVES, values=12 << 10, is_lazy=is_lazy
        )
    assert seen.ahead == SAVES
    assert seen.killed
    assert bool(seen.refused) is is_lazy
