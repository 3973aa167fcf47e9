"""The agent's side of a page: what a rank said of itself, read without asking it."""

import mmap
import os
from dataclasses import dataclass
from enum import StrEnum

from trainer_sdk import layout


class Phase(StrEnum):
    """How far a rank is in its own life."""

    STARTING = "starting"
    SCRIPT = "script"
    ENDED = "ended"
    """The script has returned or raised; the process may still be leaving."""


class CountedBy(StrEnum):
    """Who counts the steps."""

    NOBODY = "nobody"
    OPTIMIZER = "optimizer"
    SDK = "sdk"


@dataclass(frozen=True, slots=True)
class PageReading:
    """What a page said at one moment. Instants are of this host's monotonic clock."""

    pid: int
    round: int
    rank: int
    step: int
    """Steps finished in this round."""
    progress_s: float
    """When it last made progress."""
    phase: Phase
    script_s: float
    """When the script began; 0 before."""
    first_step_s: float
    """When its first step was made; 0 before."""
    counted_by: CountedBy
    dropped: int
    """Datagrams that the agent had no room for."""


class PageView:
    """A mapped page. Reading it makes no system call, and works when its rank is dead."""

    def __init__(self, mapped: mmap.mmap) -> None:
        self._mapped = mapped

    def read(self) -> PageReading | None:
        """What it says now; None as long as the rank has not opened it."""
        with memoryview(self._mapped) as octets, octets.cast("q") as words:
            return _reading(words) if words[layout.MAGIC_AT] == layout.MAGIC else None

    def close(self) -> None:
        """Unmap it."""
        self._mapped.close()


def make_page(path: str) -> PageView:
    """Make an empty page for a rank that is about to start; only its owner may read it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(descriptor, layout.PAGE_BYTES)
        return PageView(mmap.mmap(descriptor, layout.PAGE_BYTES))
    finally:
        os.close(descriptor)


_PHASES = {layout.PHASE_SCRIPT: Phase.SCRIPT, layout.PHASE_ENDED: Phase.ENDED}
_COUNTERS = {layout.BY_OPTIMIZER: CountedBy.OPTIMIZER, layout.BY_SDK: CountedBy.SDK}


def _reading(words: "memoryview[int]") -> PageReading:
    return PageReading(
        pid=words[layout.PID],
        round=words[layout.ROUND],
        rank=words[layout.RANK],
        step=words[layout.STEP],
        progress_s=words[layout.PROGRESS_NS] / 1e9,
        phase=_PHASES.get(words[layout.PHASE], Phase.STARTING),
        script_s=words[layout.SCRIPT_NS] / 1e9,
        first_step_s=words[layout.FIRST_STEP_NS] / 1e9,
        counted_by=_COUNTERS.get(words[layout.COUNTED_BY], CountedBy.NOBODY),
        dropped=words[layout.DROPPED],
    )
