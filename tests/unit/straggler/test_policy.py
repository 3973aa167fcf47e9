"""When the policy asks for the end of a job or for another node, with plain numbers."""

from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime

import msgspec
import pytest

from everstep.messages import KnownStraggler
from everstep_services.straggler.domain.policy import Policy, StragglerDecision, score
from everstep_services.straggler.domain.switches import StragglerSwitches

NOW = datetime(2026, 3, 1, tzinfo=UTC)
SWITCHES = StragglerSwitches(stop_below=0.7, stop_reports=3, exclude_after_s=60.0)
HALF = 1.0
"""Takes twice as long: a score of 0.5."""


def known(
    rank: int = 3, cause: str = "host", acted: tuple[str, ...] = (), confidence: float | None = 0.9
) -> KnownStraggler:
    return KnownStraggler(
        finding=f"f{rank}",
        round=1,
        rank=rank,
        node=f"n{rank}",
        slot=rank,
        found_at=NOW,
        cause=cause,
        reason="20 % above the median",
        confidence=confidence,
        acted=acted,
    )


def course(
    policy: Policy,
    one: KnownStraggler,
    *slower: float,
    switches: StragglerSwitches = SWITCHES,
    every_s: float = 1.0,
    missing: bool = False,
) -> list[StragglerDecision]:
    """What is due after these windows."""
    for number, ratio in enumerate(slower, start=1):
        ratios: Mapping[int, float] = {} if missing else {one.rank: ratio}
        policy.report([one], ratios, number, switches, number * every_s)
    return policy.due([one], switches, len(slower) * every_s)


def test_a_score_is_what_nvrx_users_know() -> None:
    assert [score(ratio) for ratio in (0.0, 0.25, 1.0, -0.2)] == [1.0, 0.8, 0.5, 1.0]


def test_a_job_is_to_be_stopped_after_so_many_windows_below_the_limit() -> None:
    (decision,) = course(Policy(), known(), HALF, HALF, HALF)
    assert (decision.action, decision.mode, decision.finding) == ("stop", "observe", "f3")
    assert decision.reason == (
        "rank 3 scores below 0.7 in 3 windows in a row, limit 3: 20 % above the median"
    )


@pytest.mark.parametrize(
    "slower", [(HALF, HALF), (HALF, HALF, 0.4), (HALF, HALF, 0.4, HALF, HALF), (0.42,) * 20]
)
def test_a_window_above_the_limit_begins_anew(slower: tuple[float, ...]) -> None:
    assert course(Policy(), known(), *slower) == []


def test_a_rank_that_was_not_compared_counts_as_fast() -> None:
    assert course(Policy(), known(), *(HALF,) * 9, missing=True) == []


def test_the_same_window_counts_once() -> None:
    policy, one = Policy(), known()
    for _ in range(9):
        policy.report([one], {3: HALF}, 7, SWITCHES, 1.0)
    assert policy.due([one], SWITCHES, 1.0) == []


def test_a_node_is_to_be_excluded_after_so_long() -> None:
    assert course(Policy(), known(), 0.1, 0.1, every_s=59.0) == []
    (decision,) = course(Policy(), known(), 0.1, 0.1, 0.1, every_s=30.0)
    assert decision.action == "exclude"
    assert decision.reason == (
        "rank 3 is slow (host, confidence 0.90, limit 0.7) for 60 s, limit 60 s: "
        "20 % above the median"
    )


@pytest.mark.parametrize("cause", ["input", "design", "astrology"])
def test_what_another_node_would_not_mend_is_only_said(cause: str) -> None:
    """Neither the data, nor uneven work, nor what a newer release may name ends anything."""
    assert course(Policy(), known(cause=cause), *(9.0,) * 50, every_s=60.0) == []


@pytest.mark.parametrize("cause", ["host", "network", "device"])
def test_a_node_is_excluded_for_what_another_node_would_mend(cause: str) -> None:
    (decision,) = course(Policy(), known(cause=cause), 0.1, 0.1, 0.1, every_s=30.0)
    assert decision.action == "exclude"


@pytest.mark.parametrize("cause", ["compute", "unknown"])
def test_what_may_be_the_scripts_own_work_stops_a_job_and_excludes_no_node(cause: str) -> None:
    assert course(Policy(), known(cause=cause), *(0.1,) * 50, every_s=60.0) == []
    (decision,) = course(Policy(), known(cause=cause), *(HALF,) * 50, every_s=60.0)
    assert decision.action == "stop"


def test_whoever_wants_a_node_excluded_for_slow_computing_says_so() -> None:
    switches = replace(SWITCHES, exclude_causes=("host", "compute"))
    for cause, asked in (("compute", ["exclude"]), ("network", [])):
        due = course(Policy(), known(cause=cause), *(0.1,) * 9, every_s=60.0, switches=switches)
        assert [one.action for one in due] == asked


@pytest.mark.parametrize("confidence", [0.0, 0.69, None])
def test_a_doubtful_finding_excludes_no_node(confidence: float | None) -> None:
    """None: an older release has found it."""
    doubtful = known(confidence=confidence)
    assert course(Policy(), doubtful, *(0.1,) * 50, every_s=60.0) == []
    assert course(Policy(), known(confidence=0.7), *(0.1,) * 50, every_s=60.0) != []


def test_each_action_is_decided_once_for_a_finding() -> None:
    both = known(acted=("stop", "exclude"))
    assert course(Policy(), both, *(HALF,) * 9, every_s=60.0) == []
    stopped = known(acted=("stop",))
    (decision,) = course(Policy(), stopped, *(HALF,) * 9, every_s=60.0)
    assert decision.action == "exclude"


def test_modes_say_what_may_be_done() -> None:
    switches = replace(SWITCHES, stop_mode="enforce")
    (decision,) = course(Policy(), known(), HALF, HALF, HALF, switches=switches)
    assert decision.mode == "enforce"
    (decision,) = course(Policy(), known(), *(0.1,) * 3, switches=switches, every_s=30.0)
    assert decision.mode == "observe"


def test_a_finding_that_is_over_is_forgotten() -> None:
    policy, one = Policy(), known()
    course(policy, one, HALF, HALF)
    policy.report([], {}, 3, SWITCHES, 3.0)
    policy.report([one], {3: HALF}, 4, SWITCHES, 4.0)
    assert policy.due([one], SWITCHES, 60.0) == []
    assert policy.due([msgspec.structs.replace(one, finding="other")], SWITCHES, 1e9) == []
