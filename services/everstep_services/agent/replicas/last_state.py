"""The last state that this node had in memory, noted on disk: lost memory is not a fresh start.

<state_dir>/kept/<job>@<node>.json    until the job has ended well, or may begin from scratch
"""

import asyncio
import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from everstep.clock import Clock
from everstep.evidence.files import read_regular
from trainer_sdk.checkpoint.image_folder import put_durably

log = logging.getLogger(__name__)

_SELDOM_S = 10.0


class RememberedState(msgspec.Struct, frozen=True, kw_only=True):
    """A whole state of a rank of this node."""

    job: str
    node: str
    step: int
    round: int


class LostState(msgspec.Struct, frozen=True, kw_only=True):
    """There was a state in memory, and it is gone; ranks read this in the offer."""

    step: int
    reason: str


def run_in_thread(work: Callable[[], None]) -> None:
    """Run in a thread: a disk may be slow."""
    asyncio.get_running_loop().run_in_executor(None, work)


class LastState:
    """Notes the last state of one agent in the background; failures are only logged."""

    def __init__(
        self,
        state_dir: Path,
        job: str,
        node: str,
        clock: Clock,
        place: str = "memory_dir",
        in_background: Callable[[Callable[[], None]], None] = run_in_thread,
    ) -> None:
        self._in_background = in_background
        self._writing = threading.Lock()
        self._where, self._what = (
            ("in the memory", "memory") if place == "memory_dir" else ("on the disk", "disk")
        )
        self._path = state_dir / "kept" / f"{job}@{node}.json"
        self._job, self._node = job, node
        self._clock = clock
        self._written_at: float | None = None
        self._last = self._read()

    def saw(self, step: int, round_: int) -> None:
        """A rank's state has become whole."""
        kept = RememberedState(job=self._job, node=self._node, step=step, round=round_)
        if kept == self._last:
            return
        is_first = self._last is None or self._last.round != round_
        self._last, now = kept, self._clock.now()
        if is_first or self._written_at is None or now - self._written_at >= _SELDOM_S:
            self._written_at = now
            self._in_background(self._write)

    def lost(self) -> LostState | None:
        """The lost state, for ranks that find nothing; None if there never was one."""
        if self._last is None:
            return None
        step, round_ = self._last.step, self._last.round
        return LostState(
            step=step,
            reason=f"it was {self._where} of {self._node}, saved in round {round_}, and is gone: "
            f"the node or its {self._what} was cleared since, or the job came back too late "
            "(left_for_s)",
        )

    def forget(self) -> None:
        """The job has ended well, or a person wants it to begin from scratch."""
        with self._writing, suppress(OSError):
            self._last = None
            self._path.unlink(missing_ok=True)

    def close(self) -> None:
        """Write one note after the other; the last one counts."""
        self._write()

    def _write(self) -> None:
        with self._writing:
            if self._last is None:
                return
            try:
                self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                put_durably(self._path, msgspec.json.encode(self._last))
            except OSError as error:
                log.warning("kept_state_not_noted path=%s error=%s", self._path, error)

    def _read(self) -> RememberedState | None:
        try:
            return msgspec.json.decode(read_regular(self._path), type=RememberedState)
        except (OSError, msgspec.DecodeError):
            return None
