"""Times sections on the accelerator by CUDA events; the training never waits for them.

A pair of events is recorded on the current stream when a section begins and ends. At the end of
later steps, the timer asks whether both are done. While a CUDA graph is captured, it neither asks
nor records.
"""

import sys
from collections import deque

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from trainer_sdk.sections import Section

PAIRS_MOST = 512
"""Pairs of events for each device. A pair is in use until the accelerator has passed both."""
EACH_STEP = 4
"""How often a section is measured in one step: the page keeps the latest 8 times."""
RESOLVED_MOST = 256
"""Pairs that are checked at the end of one step: enough for 64 sections in each step."""
_MS = 1e-3


class EventPair:
    """Two events of one device, and the stream on which the first was recorded."""

    __slots__ = ("begin", "device", "end", "stream")

    def __init__(self, cuda: "Any", device: int) -> None:
        self.begin = cuda.Event(enable_timing=True)
        self.end = cuda.Event(enable_timing=True)
        self.device = device
        self.stream: Any = None


class DeviceTimer:
    """The events of one process. Any call may raise the errors of torch."""

    def __init__(self, cuda: "Any") -> None:
        self.dropped = 0
        """Lost times: no pair was free, the stream had changed, or it was being captured."""
        self._cuda = cuda
        self._free: dict[int, list[EventPair]] = {}
        self._made: dict[int, int] = {}
        self._begun: dict[int, int] = {}
        self._pending: deque[tuple[Section, EventPair]] = deque()

    def begin(self, number: int) -> EventPair | None:
        """Record that this section begins; None if it is not measured this time."""
        begun = self._begun.get(number, 0)
        if begun >= EACH_STEP or self._cuda.is_current_stream_capturing():
            return None
        self._begun[number] = begun + 1
        stream = self._cuda.current_stream()
        pair = self._pair(stream.device_index)
        if pair is None:
            self.dropped += 1
            return None
        pair.begin.record(stream)
        pair.stream = stream
        return pair

    def end(self, section: "Section", pair: EventPair) -> None:
        """Record that the section of this pair ends."""
        is_lost = self._cuda.is_current_stream_capturing()
        stream = None if is_lost else self._cuda.current_stream()
        if stream is None or stream != pair.stream:
            self.dropped += 1
            self._release(pair)
            return
        pair.end.record(stream)
        self._pending.append((section, pair))

    def resolve(self) -> None:
        """At the end of a step: report the times of pairs that the accelerator has passed."""
        self._begun.clear()
        pending = self._pending
        if not pending or self._cuda.is_current_stream_capturing():
            return
        for _ in range(min(RESOLVED_MOST, len(pending))):
            section, pair = pending[0]
            if not pair.end.query():
                return
            pending.popleft()
            section.take_device(pair.begin.elapsed_time(pair.end) * _MS)
            self._release(pair)

    def _pair(self, device: int) -> EventPair | None:
        free = self._free.setdefault(device, [])
        if free:
            return free.pop()
        made = self._made.get(device, 0)
        if made >= PAIRS_MOST:
            return None
        self._made[device] = made + 1
        return EventPair(self._cuda, device)

    def _release(self, pair: EventPair) -> None:
        pair.stream = None
        self._free[pair.device].append(pair)


def device_timer() -> DeviceTimer | None:
    """A timer if the script has initialised CUDA; None if not."""
    torch = sys.modules.get("torch")  # a script without it has no accelerator
    if torch is None or not torch.cuda.is_initialized():
        return None
    return DeviceTimer(torch.cuda)
