"""States that change on their way to the global tier: saved as they were, or refused (A8.3)."""

import pytest

from tests.changed import save_in_small_pieces, save_in_waves

SAVES = 40


@pytest.mark.parametrize("is_lazy", [True, False])
def test_what_the_writer_begins_early_is_the_state_at_the_call(
    monkeypatch: pytest.MonkeyPatch, is_lazy: bool
) -> None:
    seen = save_in_small_pieces(monkeypatch, SAVES, is_lazy=is_lazy)
    assert seen.killed
    assert bool(seen.refused) is is_lazy


def test_what_comes_in_waves_is_the_state_at_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = save_in_waves(monkeypatch, SAVES)
    assert seen.killed == seen.refused > 0
