"""Analyzes one case: asks all analyzers, and combines their claims."""

import asyncio
import logging

from msgspec.structs import replace

from everstep.bus.facts.trusted_facts import RoundDocuments
from everstep.bus.ports import Bus
from everstep.messages import BlobRef, Case
from everstep_services.attribution.analyzers.rank_ends import fingerprints
from everstep_services.attribution.analyzers.runner import AnalyzerRunner
from everstep_services.attribution.domain.combiner import CaseJudgement, combine
from everstep_services.attribution.domain.event_order import in_time
from everstep_services.attribution.domain.past import PastIncidents
from everstep_services.attribution.domain.seated import left_out, naming_only, seated

log = logging.getLogger(__name__)

_FETCH_S = 10.0


class Examiner:
    """Has the analyzers, fetches evidence, and knows which nodes it may be about."""

    def __init__(self, bus: Bus, runner: AnalyzerRunner) -> None:
        self._bus = bus
        self._rounds = RoundDocuments(bus)
        self.runner = runner
        self.left_out = 0
        """Parts of cases that were left out: they are about nodes without a seat in the job."""

    async def examine(
        self, case: Case, history: PastIncidents, within_s: float
    ) -> tuple[CaseJudgement, bool]:
        """Return the judgement of a case, and whether an analyzer was too slow."""
        document = await self._rounds.read(case.job)
        ours = seated(case, document)
        names = await asyncio.to_thread(fingerprints, ours)
        signs = (*ours.nodes, *history.signs_of(ours))
        whole = in_time(replace(ours, nodes=signs, past=history.before(ours, names)))
        heard = await self.runner.run(whole, self._fetch, within_s)
        claims = list(naming_only(heard.claims, document))
        missing = (*heard.missing, *self._not_weighed(left_out(case, ours)))
        judged = await asyncio.to_thread(combine, whole, claims, missing)
        return judged, heard.is_partial

    def _not_weighed(self, parts: int) -> tuple[str, ...]:
        self.left_out += parts
        if not parts:
            return ()
        return (f"{parts} parts are of nodes that never had a seat in this job: left out",)

    async def _fetch(self, ref: BlobRef) -> bytes:
        async with asyncio.timeout(_FETCH_S):
            return await self._bus.blobs.get(ref)
