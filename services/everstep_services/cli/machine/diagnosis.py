"""What a check of the doctor reports."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntEnum

from everstep_services.cli.invocation import Invocation


class Level(IntEnum):
    """As Nagios numbers them; these are the exit codes."""

    OK = 0
    WARNING = 1
    CRITICAL = 2
    UNKNOWN = 3


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What one check found, and what to do about it."""

    check: str
    level: Level
    text: str
    fix: str = ""


Diagnoses = Iterator[Diagnosis]
Check = Callable[[Invocation], Diagnoses]
