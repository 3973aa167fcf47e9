"""A throttle allows a number of bytes a second, until it is lifted."""

import threading
import time

import pytest

from trainer_sdk.checkpoint.schedule.write_rate import Throttle


def test_bytes_wait_for_the_limited_rate() -> None:
    throttle, began = Throttle(1000), time.monotonic()
    assert throttle.let(0)
    assert throttle.let(100)
    assert throttle.let(300)
    assert time.monotonic() - began >= 0.3


def test_the_throttle_starts_with_the_first_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A save that has waited for the one before it has the same limit."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    throttle, waits = Throttle(1000), list[float]()
    monkeypatch.setattr(throttle._lifted, "wait", waits.append)
    now[0] += 3600
    throttle.let(0)
    now[0] += 0.2
    throttle.let(1000)
    throttle.let(100)
    assert waits == [0.0, pytest.approx(0.8), 0.0]


def test_a_lifted_throttle_does_not_wait() -> None:
    throttle = Throttle(1)
    throttle.let(0)
    waiting = threading.Thread(target=throttle.let, args=(1 << 30,), daemon=True)
    waiting.start()
    throttle.lift()
    waiting.join(30)
    assert not waiting.is_alive()
    assert not throttle.let(1 << 30)
    assert not Throttle(0).let(1 << 30)
