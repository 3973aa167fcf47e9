"""Settings of health that cannot work are refused, with the numbers."""

import pytest

from everstep.settings import Settings
from everstep_services.health.settings import HealthSettings, LimitSettings, NodeSettings


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"silence_limit_s": 2.0}, "at least 2.5, two beats and a half, got 2"),
        ({"all_silent_limit_s": 1.0}, "at least silence_limit_s, got 1 < 3"),
        ({"all_cut_off_limit_s": 2.0}, "at least all_silent_limit_s, got 2 < 15"),
        ({"moving_limit_most_s": 1.0}, "at least silence_limit_s, got 1 < 3"),
        ({"tick_s": 0.0}, "tick_s must be above 0"),
        ({"tick_s": 2.0}, "at most 1, got 2"),
        ({"hail_after_s": 1.1, "hailed_limit_s": 1.2}, "at least 1.5 and at most silence_limit_s"),
        ({"pause_most_s": 0.1}, "at least two ticks, 0.125, got 0.1"),
        ({"forget_after_s": 20.0}, "above every limit, got 20"),
        ({"reconnect_grace_s": -1.0}, "must not be negative"),
    ],
)
def test_settings_that_cannot_work_are_refused(changes: dict[str, float], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        HealthSettings(**changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("of", "changes", "said"),
    [
        (LimitSettings, {"factor": 1.0}, "factor must be at least 2, got 1"),
        (LimitSettings, {"floor_s": 2000.0}, "floor_s must be .* at most cap_s, got 2000 and 1800"),
        (LimitSettings, {"long_cap_s": 1.0}, "long_floor_s must be .* got 900 and 1"),
        (LimitSettings, {"first_step_floor_s": 0.0}, "first_step_floor_s must be above 0"),
        (LimitSettings, {"observations": 0}, "observations must be at least 1"),
        (NodeSettings, {"strikes_limit": 0}, "strikes_limit must be at least 1, got 0"),
        (NodeSettings, {"breaker_ratio": 1.5}, "breaker_ratio must be above 0 and at most 1"),
        (NodeSettings, {"exclude_ttl_s": 0.0}, "exclude_ttl_s must be above 0, got 0"),
    ],
)
def test_sections_inside_refuse_them_too(
    of: type[Settings], changes: dict[str, float], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        of(**changes)
