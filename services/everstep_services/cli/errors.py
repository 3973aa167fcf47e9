"""The exit codes of commands. They are an API: scripts depend on them."""

import sys
from enum import IntEnum

from everstep.errors import EverstepError


class Exit(IntEnum):
    OK = 0
    ERROR = 1
    USAGE = 2
    NOT_FOUND = 3
    UNREACHABLE = 4
    TIMED_OUT = 5
    FORBIDDEN = 6


class CliError(EverstepError):
    """A command has failed; the text is the line that people read."""

    def __init__(self, text: str, code: Exit = Exit.ERROR) -> None:
        super().__init__(text)
        self.code = code


def exit_code(error: EverstepError) -> int:
    """The code for an error, wherever it came from. Settings and all else: 2."""
    if isinstance(error, CliError):
        return error.code
    bus = sys.modules.get("everstep.bus.errors")  # not imported: then it is not one of its errors
    if bus is not None and isinstance(error, bus.BusDeniedError):
        return Exit.FORBIDDEN
    if bus is not None and isinstance(
        error, bus.BusUnreachableError | bus.BusTimeoutError | bus.NoLeaderError
    ):
        return Exit.UNREACHABLE
    if bus is not None and isinstance(error, bus.NoStreamError):
        return Exit.NOT_FOUND
    return Exit.USAGE
