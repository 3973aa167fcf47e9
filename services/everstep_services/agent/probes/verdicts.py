"""What many results come to: their order, their worst, and the code that says so. Pure."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from everstep.messages import CheckResult

STATES = ("ok", "unsupported", "unknown", "warning", "failed")
"""From the best to the worst: not to know is less than to know that it is bad."""

_CODES = {"ok": 0, "unsupported": 0, "warning": 1, "failed": 2, "unknown": 3}


@dataclass(frozen=True, slots=True)
class NodeExamination:
    """What was found at one examination of a node."""

    occasion: str
    """`join`, `periodic`, `prolog`, `incident` or `operator`."""
    checks: tuple[str, ...]
    """The names of all checks that were asked for."""
    results: tuple[CheckResult, ...]
    """All that they said, the worst first."""
    took_s: float

    @property
    def state(self) -> str:
        """The worst state of any part; `ok` when nothing was found."""
        return state_of(self.results)

    @property
    def is_healthy(self) -> bool:
        """No check failed. What a check could not tell is not a failure."""
        return self.state != "failed"

    @property
    def worth_telling(self) -> tuple[CheckResult, ...]:
        """What the fact about it holds: everything if it is unhealthy, else what is not ok."""
        if not self.is_healthy:
            return self.results
        return tuple(result for result in self.results if result.state != "ok")


def gravity_of(state: str) -> int:
    """How bad a state is; one that a newer release has invented is as bad as not knowing."""
    return STATES.index(state if state in STATES else "unknown")


def gravity(result: CheckResult) -> int:
    """How bad a result is."""
    return gravity_of(result.state)


def state_of(results: Iterable[CheckResult]) -> str:
    """The worst state; `unsupported` counts as ok."""
    worst = STATES[max(map(gravity, results), default=0)]
    return "ok" if worst == "unsupported" else worst


def is_amiss(result: CheckResult) -> bool:
    """Whether somebody may want to read it."""
    return gravity(result) > gravity_of("unsupported")


def code_of(state: str) -> int:
    """As Nagios numbers states: 0 ok, 1 warning, 2 critical, 3 unknown."""
    return _CODES.get(state, _CODES["unknown"])


def worst_first(results: Iterable[CheckResult]) -> tuple[CheckResult, ...]:
    """The worst first; within a state by check and subject."""
    return tuple(sorted(results, key=lambda one: (-gravity(one), one.check, one.subject)))


def counted(results: Sequence[CheckResult]) -> str:
    """How many are in which state, the worst first: `1 failed, 12 ok`."""
    counts = Counter(STATES[gravity(result)] for result in results)
    return ", ".join(f"{counts[state]} {state}" for state in reversed(STATES) if counts[state])
