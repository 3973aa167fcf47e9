"""How the ranks of the job spread, for a script whose rank 0 passes figures to a tracker."""

import asyncio
import json
import os
from collections.abc import Callable
from pathlib import Path

from everstep.bus.errors import BusError
from everstep.bus.ports import Bus
from everstep.clock import Clock
from everstep.messages import RankScoreTable, ShowScores
from trainer_sdk import layout

_EVERY_S = 10.0
_WITHIN_S = 2.0


class RankSpreads:
    """Asks straggler while rank 0 is here and its tracker wants to know."""

    def __init__(self, job: str, bus: Bus, clock: Clock, folder: Callable[[], Path | None]) -> None:
        self._job = job
        self._bus = bus
        self._clock = clock
        self._folder = folder
        """Rank 0's; None if it is not on this node."""

    async def tell_for_ever(self) -> None:
        """Renew the figures at intervals."""
        while True:
            await self._clock.sleep(_EVERY_S)
            await self.tell()

    async def tell(self) -> None:
        """Write the figures of the newest window into the file of a tracker that waits for them."""
        folder = self._folder()
        if folder is None or not self._bus.connected:
            return
        if not await asyncio.to_thread((folder / layout.SPREADS_FILE).exists):
            return
        question = ShowScores(job=self._job, most=0)
        try:
            table = await self._bus.ask(
                "straggler", "scores", question, RankScoreTable, job=self._job, within_s=_WITHIN_S
            )
        except BusError:
            return  # no window was compared yet, or straggler is away: the figures stay
        await asyncio.to_thread(_write, folder, table)


def _write(folder: Path, table: RankScoreTable) -> None:
    figures = {
        f"{spread.name}/{name}": value
        for spread in table.spreads
        for name, value in zip(("min", "median", "max"), spread.values, strict=False)
    }
    fresh = folder / f"{layout.SPREADS_FILE}.new"
    try:
        fresh.write_text(json.dumps(figures))
        os.replace(fresh, folder / layout.SPREADS_FILE)
    except OSError:
        return  # the rank is gone, and its folder with it
