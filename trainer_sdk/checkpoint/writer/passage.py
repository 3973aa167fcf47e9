"""When a piece of a state may be written: once it is in its buffer, and no faster than allowed."""

import threading

from trainer_sdk.checkpoint.schedule.throttle import Throttle


class GivenUpByRankError(Exception):
    """What is missing of a state will not come."""


class Passage:
    """Of one state, for all threads that work on it."""

    def __init__(self, there: int, stall_s: float = 0.0, bytes_per_s: int = 0) -> None:
        self._there = there
        """So much of it has come."""
        self.stall_s = stall_s
        """What the training has waited; known when all of it has come."""
        self._is_given_up = False
        self._news = threading.Condition()
        self._throttle = Throttle(bytes_per_s)

    def come(self, end: int, stall_s: float) -> None:
        """All before `end` is in the buffer, or was."""
        with self._news:
            self._there, self.stall_s = max(self._there, end), stall_s
            self._news.notify_all()

    def give_up(self) -> None:
        """Nothing more comes."""
        with self._news:
            self._is_given_up = True
            self._news.notify_all()

    def wait_for(self, end: int) -> None:
        """Until all before it has come."""
        with self._news:
            self._news.wait_for(lambda: self._is_given_up or self._there >= end)
            if self._there < end:
                raise GivenUpByRankError

    def let(self, begin: int, end: int) -> None:
        """Wait until this piece may be written, or sent."""
        self.wait_for(end)
        self._throttle.let(begin)

    @property
    def is_throttled(self) -> bool:
        """It may not go as fast as it comes."""
        return not self._throttle.is_lifted

    def hurry(self) -> None:
        """As fast as it comes from now on."""
        self._throttle.lift()
