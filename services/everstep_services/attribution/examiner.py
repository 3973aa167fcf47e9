"""Analyzes one case: asks all analyzers, and combines what they claim."""

import asyncio
import logging

from msgspec.structs import replace

from everstep.bus.ports import Bus
from everstep.messages import BlobRef, Case
from everstep_services.attribution.analyzers.ends import fingerprints
from everstep_services.attribution.analyzers.panel import Panel
from everstep_services.attribution.domain.combiner import Judged, combine
from everstep_services.attribution.domain.past import History

log = logging.getLogger(__name__)

_FETCH_S = 10.0


class Examiner:
    """Knows the analyzers, and where evidence is."""

    def __init__(self, bus: Bus, panel: Panel) -> None:
        self._bus = bus
        self.panel = panel

    async def examine(self, case: Case, history: History, within_s: float) -> tuple[Judged, bool]:
        """What is to be said of it, and whether an analyzer was not done in time."""
        names = await asyncio.to_thread(fingerprints, case)
        whole = replace(
            case,
            nodes=(*case.nodes, *history.signs_of(case)),
            past=history.before(case, names),
        )
        heard = await self.panel.hear(whole, self._fetch, within_s)
        judged = await asyncio.to_thread(combine, whole, heard.claims, heard.missing)
        return judged, heard.is_partial

    async def _fetch(self, ref: BlobRef) -> bytes:
        async with asyncio.timeout(_FETCH_S):
            return await self._bus.blobs.get(ref)
