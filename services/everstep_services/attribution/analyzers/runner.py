"""Runs all analyzers at once. An analyzer that fails or is slow is named, and delays no other."""

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points

from msgspec.structs import replace

from everstep.messages import Case
from everstep.observe.printable import beginning
from everstep_services.attribution.analyzers import (
    ends,
    flight_recorder,
    health,
    history,
    logs,
    nccl_ras,
    node_state,
    numerics,
    stacks,
    stalls,
    stragglers,
)
from everstep_services.attribution.domain.claims import MOST_SAID, Claim
from everstep_services.attribution.incident import Analyzer, Fetch, Incident

log = logging.getLogger(__name__)

GROUP = "everstep.analyzers"
"""The group of entry points that plug-ins register their analyzers in."""
BUILT_IN: Mapping[str, Analyzer] = {
    "ends": ends.analyze,
    "stalls": stalls.analyze,
    "flight_recorder": flight_recorder.analyze,
    "nccl_ras": nccl_ras.analyze,
    "stacks": stacks.analyze,
    "numerics": numerics.analyze,
    "logs": logs.analyze,
    "health": health.analyze,
    "node_state": node_state.analyze,
    "stragglers": stragglers.analyze,
    "history": history.analyze,
}
_CLAIMS_MOST = 256


def installed() -> dict[str, Analyzer]:
    """The built-in analyzers and those of plug-ins; a plug-in that cannot be loaded is logged."""
    analyzers = dict(BUILT_IN)
    for point in entry_points(group=GROUP):
        if point.name in BUILT_IN:
            log.error("analyzer_refused name=%s reason='a built-in one has this name'", point.name)
            continue
        try:
            analyzers[point.name] = point.load()
        except Exception as error:  # noqa: BLE001  a plug-in is anybody's code
            log.error("analyzer_not_loaded name=%s error=%r", point.name, error)
    return analyzers


@dataclass(frozen=True, slots=True)
class AnalyzerAnswer:
    """The claims of all analyzers about an incident."""

    claims: list[Claim]
    missing: list[str]
    """Evidence that could not be read, and analyzers that gave no answer."""
    is_partial: bool
    """An analyzer was not done in time."""


class AnalyzerRunner:
    """All analyzers of this process."""

    def __init__(self, analyzers: Mapping[str, Analyzer]) -> None:
        self._analyzers = analyzers
        self.failures = 0
        """Analyses that raised or were late."""

    async def run(self, case: Case, fetch: Fetch, within_s: float) -> AnalyzerAnswer:
        """Ask all of them at once."""
        answers = await asyncio.gather(
            *(self._ask(name, Incident(case, fetch), within_s) for name in self._analyzers)
        )
        missing = dict.fromkeys(text for answer in answers for text in answer.missing)
        return AnalyzerAnswer(
            claims=[claim for answer in answers for claim in answer.claims],
            missing=list(missing),
            is_partial=any(answer.is_partial for answer in answers),
        )

    async def _ask(self, name: str, incident: Incident, within_s: float) -> AnalyzerAnswer:
        is_late = False
        try:
            async with asyncio.timeout(within_s):
                answer = await self._analyzers[name](incident)
            claims = [_named(name, claim) for claim in answer[:_CLAIMS_MOST]]
        except TimeoutError:
            is_late, why = True, f"analyzer {name} was not done after {within_s:g} s"
        except Exception as error:
            log.warning("analyzer_failed name=%s error=%r", name, error, exc_info=True)
            why = f"analyzer {name} failed: {type(error).__name__}: {error}"[:MOST_SAID]
        else:
            return AnalyzerAnswer(claims, incident.missing, is_partial=False)
        self.failures += 1
        return AnalyzerAnswer([], [*incident.missing, why], is_partial=is_late)


def _named(name: str, claim: Claim) -> Claim:
    if not isinstance(claim, Claim):
        raise TypeError(f"it returned {type(claim).__name__}, not a Claim")
    return replace(claim, analyzer=name, says=beginning(claim.says, MOST_SAID))
