"""A few lines on the stderr of the rank that has started the agent, while it is lent to us."""

import logging
import os
import select
from contextlib import suppress

log = logging.getLogger(__name__)

_LONGEST = select.PIPE_BUF
"""A pipe that is writable takes this much at once."""


class RankStderr:
    """Prints lines there until it is given back, and always in our own log.

    The reader of the ranks' output waits until nobody holds the pipe: so it is given back as
    soon as
    a rank has gone, or has made its first step and no more lines follow.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor: int | None = descriptor
        try:
            os.set_inheritable(descriptor, False)  # noqa: FBT003 - positional only
        except OSError:
            self._descriptor = None  # the rank has none

    def say(self, text: str, *, is_warning: bool = False) -> None:
        """Print a line; one that cannot be written at once is only in the log."""
        log.log(logging.WARNING if is_warning else logging.INFO, "said text=%s", text)
        if self._descriptor is None:
            return
        line = f"everstep: {'warning: ' if is_warning else ''}{text}\n".encode()
        poll = select.poll()
        poll.register(self._descriptor, select.POLLOUT)
        with suppress(OSError):
            if len(line) <= _LONGEST and any(now & select.POLLOUT for _, now in poll.poll(0)):
                os.write(self._descriptor, line)

    def give_back(self) -> None:
        """Give the stderr back."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            with suppress(OSError):
                os.close(descriptor)
