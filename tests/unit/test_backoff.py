"""Waits between attempts: doubled with each failure, up to a limit, and spread."""

from everstep.backoff import Backoff, backoff_s, jittered_s


def test_each_failure_doubles_the_wait_up_to_the_limit() -> None:
    backoff = Backoff(0.1, 1.0)
    assert [backoff.failed() for _ in range(6)] == [0.1, 0.2, 0.4, 0.8, 1.0, 1.0]


def test_a_success_brings_the_first_wait_back() -> None:
    backoff = Backoff(0.1, 1.0)
    assert backoff.failed() < backoff.failed()
    backoff.reset()
    assert backoff.failed() == 0.1


def test_however_many_failures_there_were_the_wait_is_the_limit() -> None:
    assert backoff_s(10**9, 0.05, 5.0) == 5.0


def test_jitter_leaves_at_least_half_of_a_wait() -> None:
    waits = [jittered_s(2.0) for _ in range(100)]
    assert 1.0 <= min(waits) < max(waits) <= 2.0
