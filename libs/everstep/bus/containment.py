"""A bad input costs itself alone: what its handler raises is logged, counted, and passed over.

Whatever comes from outside (a question, a beat, a fact, a document) is handled inside
`Containment.of`, one input at a time, so that no input ends the service that hears it.
"""

import logging
import traceback
from collections.abc import Generator
from contextlib import contextmanager

log = logging.getLogger(__name__)

_LOGGED_MOST = 200
"""How many different failures are logged with a traceback; the others are only counted."""


class Containment:
    """The failures of one part of a service. `failures` is for its metrics."""

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._logged: set[tuple[str, ...]] = set()
        self.failures = 0

    @contextmanager
    def of(self, what: str) -> Generator[None]:
        """Whatever the block raises ends the block, and nothing else."""
        try:
            yield
        except Exception as error:  # noqa: BLE001  an input must not end the service
            self.note(what, error)

    def note(self, what: str, error: Exception) -> None:
        """Count a failure; log it with its traceback if none like it was logged before."""
        self.failures += 1
        where = traceback.extract_tb(error.__traceback__)[-1:]
        place = [f"{frame.filename}:{frame.lineno}" for frame in where]
        kind = (what.partition(" ")[0], type(error).__name__, *place)
        if kind not in self._logged and len(self._logged) < _LOGGED_MOST:
            self._logged.add(kind)
            log.error(
                "input_failed owner=%s what=%s\n%s",
                self._owner,
                what,
                "".join(traceback.format_exception(error)),
            )
