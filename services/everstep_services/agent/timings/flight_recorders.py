"""Asks the flight recorders of ranks through torch's own threads, and not too often."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from everstep_services.agent.stalls.recorder_traces import read_traces
from everstep_services.agent.stalls.torch_server import TorchServerError, has_server
from everstep_services.agent.timings.collective_entries import Recording, parse_recording
from everstep_services.agent.timings.window import StepRange

_WITHIN_S = 1.0
SPARED = "recorder spared"
_S_PER_BYTE = 75e-9
"""The time that a thread of the rank needs for an answer of a given size: some 70 ms for a full
ring. The time until the answer comes says less: on busy processors most of it is waiting.
"""
_MOST_RATIO = 0.02
"""The largest share of the time that goes into answers."""
_LEAST_OFTEN = 16
"""Windows."""


@dataclass(frozen=True, slots=True)
class RecordedEntries:
    """The contents of the ranks' recorders; for a missing rank, why."""

    recordings: Mapping[int, Recording] = field(default_factory=dict)
    gaps: Mapping[int, str] = field(default_factory=dict)


class FlightRecorders:
    """Asks the ranks of one node."""

    def __init__(self) -> None:
        self._most_bytes = 0
        """The longest of the last answers; about the same on all nodes."""

    async def read(
        self, folders: Mapping[int, Path], window: StepRange, lasted_s: float
    ) -> RecordedEntries:
        """Ask only in every n-th window, if the rings are large and the windows short."""
        if window.last // window.count % self._stride(lasted_s):
            return RecordedEntries(gaps=dict.fromkeys(folders, SPARED))
        served = await asyncio.to_thread(_with_servers, folders)
        async with asyncio.TaskGroup() as asking:
            asked = {rank: asking.create_task(_traces(folder)) for rank, folder in served.items()}
        traces = {rank: of for rank, task in asked.items() if (of := task.result())}
        sizes = [sum(map(len, of)) for of in traces.values()]
        self._most_bytes = max(sizes, default=self._most_bytes)
        parsed = {rank: await asyncio.to_thread(parse_recording, of)
                  for rank, of in traces.items()}  # fmt: skip
        recordings = {
            rank: recording for rank, recording in parsed.items() if recording is not None
        }
        return RecordedEntries(
            recordings, dict.fromkeys(served.keys() - recordings, "recorder silent")
        )

    def _stride(self, lasted_s: float) -> int:
        """A power of two, so that nodes with different ones have many windows in common."""
        stride, costs_s = 1, self._most_bytes * _S_PER_BYTE
        while stride < _LEAST_OFTEN and stride * lasted_s * _MOST_RATIO < costs_s:
            stride *= 2
        return stride


async def _traces(folder: Path) -> tuple[bytes, ...]:
    try:
        return await read_traces(folder, _WITHIN_S, is_whole=True)
    except TorchServerError:
        return ()


def _with_servers(folders: Mapping[int, Path]) -> dict[int, Path]:
    return {rank: folder for rank, folder in folders.items() if has_server(folder)}
