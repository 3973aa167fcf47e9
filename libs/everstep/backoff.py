"""How long to wait before the next attempt: twice as long after each failure, up to a limit."""

import random
from dataclasses import dataclass

_DOUBLINGS_MOST = 64


def backoff_s(failures: int, first_s: float, most_s: float) -> float:
    """The wait after a number of failures in a row: `first_s` after the first failure."""
    return min(first_s * 2.0 ** min(failures - 1, _DOUBLINGS_MOST), most_s)


def jittered_s(wait_s: float) -> float:
    """A random half to the whole of a wait, so that a fleet does not come back in step."""
    return wait_s * random.uniform(0.5, 1.0)  # noqa: S311  not a secret


@dataclass(slots=True)
class Backoff:
    """The waits of one caller between its attempts."""

    first_s: float
    most_s: float
    failures: int = 0
    """How many attempts have failed in a row."""

    def failed(self) -> float:
        """Count a failure; how long to wait after it."""
        self.failures += 1
        return backoff_s(self.failures, self.first_s, self.most_s)

    def reset(self) -> None:
        """Begin with the first wait again: an attempt has succeeded."""
        self.failures = 0
