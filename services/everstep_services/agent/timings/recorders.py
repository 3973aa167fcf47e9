"""Asks the flight recorders of ranks, by torch's own threads, and not too often."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from everstep.clock import Clock
from everstep_services.agent.stalls.worker import ask, has_server
from everstep_services.agent.timings.entries import Recording, parse_recording
from everstep_services.agent.timings.window import Steps

_WHOLE = "fr_trace_json?onlyactive=false&includestacktraces=false"
_WITHIN_S = 1.0
_MOST_RATIO = 0.02
"""To tell of a full ring takes a thread of the rank some 70 ms: no more of the time than this."""
_LEAST_OFTEN = 16
"""Windows."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """What the recorders of ranks hold; of a rank that is missing, why."""

    recordings: Mapping[int, Recording] = field(default_factory=dict)
    gaps: Mapping[int, str] = field(default_factory=dict)


class Recorders:
    """Those of one node's ranks."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.took_s = 0.0
        """How long the quickest rank took to tell, the last time."""

    async def read(self, folders: Mapping[int, Path], window: Steps, lasted_s: float) -> Recorded:
        """Every so many windows only, where the rings are large and the windows short."""
        if window.last // window.count % self._stride(lasted_s):
            return Recorded(gaps=dict.fromkeys(folders, "recorder spared"))
        served = await asyncio.to_thread(_with_servers, folders)
        async with asyncio.TaskGroup() as asking:
            asked = {
                rank: asking.create_task(self._read(folder)) for rank, folder in served.items()
            }
        took = {rank: task.result() for rank, task in asked.items()}
        # All at once they wait for each other's processors: the quickest tells what it costs.
        self.took_s = min((took_s for _, took_s in took.values()), default=0.0)
        recordings = {rank: one for rank, (one, _) in took.items() if one is not None}
        return Recorded(recordings, dict.fromkeys(served.keys() - recordings, "recorder silent"))

    def _stride(self, lasted_s: float) -> int:
        """A power of two, so that nodes that differ have many windows in common."""
        stride = 1
        while stride < _LEAST_OFTEN and stride * lasted_s * _MOST_RATIO < self.took_s:
            stride *= 2
        return stride

    async def _read(self, folder: Path) -> tuple[Recording | None, float]:
        began = self._clock.now()
        body = await ask(folder, _WHOLE, _WITHIN_S)
        took_s = self._clock.now() - began
        if body is None:
            return None, took_s
        return await asyncio.to_thread(parse_recording, body), took_s


def _with_servers(folders: Mapping[int, Path]) -> dict[int, Path]:
    return {rank: folder for rank, folder in folders.items() if has_server(folder)}
