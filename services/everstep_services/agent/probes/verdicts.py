"""The outcome of many results: their order, their worst state, and its exit code. Pure."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import get_args

from everstep.messages import CheckResult
from everstep_services.agent.probes.base import CheckState

STATES: tuple[CheckState, ...] = get_args(CheckState)
"""From the best to the worst."""


@dataclass(frozen=True, slots=True)
class NodeExamination:
    """The results of one examination of a node."""

    occasion: str
    """As in `node_check_finished`: `join`, `periodic`, `prolog`, `incident` or `operator`."""
    checks: tuple[str, ...]
    """The names of all checks that were asked for."""
    results: tuple[CheckResult, ...]
    """All results, the worst first."""
    took_s: float

    @property
    def state(self) -> CheckState:
        """The worst state of any part; `ok` when nothing was found."""
        return state_of(self.results)

    @property
    def is_healthy(self) -> bool:
        """No check failed. A result that could not be had is not a failure."""
        return self.state != "failed"

    @property
    def nvlink_domain(self) -> str:
        """The NVLink domain of the GPUs; empty if they are in none, or in several."""
        domains = {result.nvlink_domain for result in self.results} - {""}
        return domains.pop() if len(domains) == 1 else ""

    @property
    def worth_telling(self) -> tuple[CheckResult, ...]:
        """The results for the fact: all if the node is unhealthy, otherwise those not ok."""
        if not self.is_healthy:
            return self.results
        return tuple(result for result in self.results if result.state != "ok")


def known_state(state: str) -> CheckState:
    """The state that a word names; `unknown` for a word of a newer release."""
    return next((member for member in STATES if member == state), "unknown")


def gravity_of(state: str) -> int:
    """The rank of a state."""
    return STATES.index(known_state(state))


def gravity(result: CheckResult) -> int:
    """The rank of a result."""
    return gravity_of(result.state)


def state_of(results: Iterable[CheckResult]) -> CheckState:
    """The worst state; `unsupported` counts as ok."""
    worst = STATES[max(map(gravity, results), default=0)]
    return "ok" if worst == "unsupported" else worst


def is_amiss(result: CheckResult) -> bool:
    """Whether somebody may want to read the result."""
    return gravity(result) > gravity_of("unsupported")


def code_of(state: str) -> int:
    """The state's number in Nagios: 0 ok, 1 warning, 2 critical, 3 unknown."""
    match known_state(state):
        case "ok" | "unsupported":
            return 0
        case "warning":
            return 1
        case "failed":
            return 2
        case "unknown":
            return 3


def worst_first(results: Iterable[CheckResult]) -> tuple[CheckResult, ...]:
    """The worst first; within a state by check and subject."""
    return tuple(
        sorted(results, key=lambda result: (-gravity(result), result.check, result.subject))
    )


def counted(results: Sequence[CheckResult]) -> str:
    """The number of results in each state, the worst first: `1 failed, 12 ok`."""
    counts = Counter(STATES[gravity(result)] for result in results)
    return ", ".join(f"{counts[state]} {state}" for state in reversed(STATES) if counts[state])
