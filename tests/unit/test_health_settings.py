"""Settings of health that cannot work are refused, with the numbers."""

import pytest

from everstep_services.health.settings import HealthSettings


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"silence_limit_s": 2.0}, "at least 2.5, two beats and a half, got 2"),
        ({"all_silent_limit_s": 1.0}, "at least silence_limit_s, got 1 < 3"),
        ({"moving_limit_most_s": 1.0}, "at least silence_limit_s, got 1 < 3"),
        ({"tick_s": 0.0}, "tick_s must be above 0"),
        ({"tick_s": 2.0}, "at most 1, got 2"),
        ({"forget_after_s": 20.0}, "above every limit, got 20"),
        ({"reconnect_grace_s": -1.0}, "must not be negative"),
        ({"inbox_beats": 0}, "at least 1"),
    ],
)
def test_settings_that_cannot_work_are_refused(changes: dict[str, float], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        HealthSettings(**changes)  # type: ignore[arg-type]
