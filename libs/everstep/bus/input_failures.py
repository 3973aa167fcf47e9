"""Catches, logs and counts the errors that single inputs cause in a service.

Every input from outside (a question, a beat, a fact, a document) is handled inside
`InputFailures.caught`, one at a time, so that no input ends the service that receives it.
"""

import logging
import traceback
from collections.abc import Generator
from contextlib import contextmanager

from everstep.errors import EverstepError

log = logging.getLogger(__name__)

_LOGGED_MOST = 200
"""The number of different failures that are logged with a traceback; the rest is counted only."""


class InputFailures:
    """The failures of one part of a service. `failures` is for its metrics."""

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._logged: set[tuple[str, ...]] = set()
        self.failures = 0

    @contextmanager
    def caught(self, subject: str, expected: str = "") -> Generator[None]:
        """Catch, count and log whatever the block raises.

        With `expected`, an error of ours and a timeout are only logged, as this event.
        """
        try:
            yield
        except Exception as error:  # noqa: BLE001  an input must not end the service
            if expected and isinstance(error, EverstepError | TimeoutError):
                log.warning("%s error=%s", expected, error)
            else:
                self.note(subject, error)

    def note(self, subject: str, error: Exception) -> None:
        """Count a failure, and log its traceback unless a similar failure was logged before."""
        self.failures += 1
        where = traceback.extract_tb(error.__traceback__)[-1:]
        place = [f"{frame.filename}:{frame.lineno}" for frame in where]
        kind = (subject.partition(" ")[0], type(error).__name__, *place)
        if kind not in self._logged and len(self._logged) < _LOGGED_MOST:
            self._logged.add(kind)
            log.error(
                "input_failed owner=%s what=%s\n%s",
                self._owner,
                subject,
                "".join(traceback.format_exception(error)),
            )
