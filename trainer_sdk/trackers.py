"""Writes the figures of a rank to TensorBoard or Weights & Biases, next to those of the script.

A separate thread reads the rank's page at intervals, so the training thread spends nothing on it.
The figures are the metrics that the script reports, the medians of steps and sections since the
last time, and of rank 0 also how all ranks spread: its agent asks straggler for that. A tracker
that fails prints one warning, and the training goes on.
"""

import atexit
import json
import mmap
import os
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from threading import Event, Thread
from typing import Any, Protocol

from trainer_sdk import layout
from trainer_sdk.page import PageView
from trainer_sdk.sdk_log import warn_once

PREFIX = "everstep"
_JOINED_WITHIN_S = 5.0
_SHORTEST_S = 0.1
_MARKS_MOST = 1000


class FigureSink(Protocol):
    """A destination of figures."""

    def write(self, figures: Mapping[str, float], step: int) -> None:
        """Receive the figures of a step."""

    def close(self) -> None:
        """Write the figures that are still buffered."""


class TensorBoard:
    """Scalars in a folder of event files, by TensorBoard's own writer."""

    def __init__(self, folder: str) -> None:
        from tensorboard.summary import Writer

        self._writer = Writer(folder)

    def write(self, figures: Mapping[str, float], step: int) -> None:
        """Receive the figures of a step."""
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Write the figures that are still buffered."""
        self._writer.close()


class WandbRun:
    """A run of Weights & Biases that the script has begun.

    Figures join the row that the script logs next: separate rows would advance the run's step, and
    later rows of the script with a smaller step would be dropped.
    """

    def __init__(self, run: Any) -> None:
        self._run = run
        run.define_metric(f"{PREFIX}/step", hidden=True)
        run.define_metric(f"{PREFIX}/*", step_metric=f"{PREFIX}/step")

    def write(self, figures: Mapping[str, float], step: int) -> None:
        """Receive the figures of a step."""
        self._run.log({**figures, f"{PREFIX}/step": step}, commit=False)

    def close(self) -> None:
        """Leave the run open: it is the script's."""


class Tracker:
    """Passes the figures of this rank to a sink at intervals, until it is closed."""

    def __init__(
        self,
        sink: FigureSink,
        words: "Callable[[], memoryview[int]]",
        step: Callable[[], int],
        spreads: str = "",
        *,
        every_s: float = 10.0,
    ) -> None:
        self._sink = sink
        self._spreads = spreads
        """The file into which the agent writes how all ranks spread; empty for none."""
        self._spread_of: tuple[int, int] | None = None
        self._words = words
        self._step = step
        self._every_s = max(float(every_s), _SHORTEST_S)
        self._copy = _memory()
        self._page = PageView(self._copy)
        self._ended: dict[int, int] = {}
        """For each section, the number of its ends that were read."""
        self._marks: deque[tuple[str, int]] = deque(maxlen=_MARKS_MOST)
        self._steps = 0
        self._reported_ns = -1
        self._pid = os.getpid()
        self._over = Event()
        self._thread = Thread(target=self._write_for_ever, name="everstep-tracker", daemon=True)

    def start(self) -> None:
        """Begin; the last figures are written when the process ends."""
        if self._spreads:
            Path(self._spreads).touch()  # now the agent asks for them
        atexit.register(self.close)
        self._thread.start()

    def close(self) -> None:
        """Write the last figures and stop, within seconds even if the storage hangs."""
        atexit.unregister(self.close)
        self._over.set()
        if os.getpid() == self._pid:  # a fork of the rank does not have the thread
            self._thread.join(_JOINED_WITHIN_S)

    def mark(self, name: str, step: int) -> None:
        """Have a moment written with the next figures, as `numerics/rollback`.

        Its value is the step: W&B may show it in the row of a later step.
        """
        self._marks.append((name, step))

    def write(self) -> None:
        """Pass on the figures and marks since the last time, if there are any."""
        while self._marks:
            name, step = self._marks.popleft()
            self._sink.write({f"{PREFIX}/{name}": float(step)}, step)
        figures = self._figures()
        if figures:
            self._sink.write(figures, self._step())

    def _figures(self) -> dict[str, float]:
        self._copy[:] = self._words().cast("B").tobytes()
        page, words = self._page, memoryview(self._copy).cast("q")
        reported = page.values(after_ns=self._reported_ns)
        self._reported_ns = page.reported_ns(self._reported_ns)
        figures = {f"{PREFIX}/{name}": value for name, value in reported.items()}
        new = min(words[layout.STEPS] - self._steps, layout.STEPS_ENTRIES)
        self._steps = words[layout.STEPS]
        durations_s = page.step_durations()[-new:] if new > 0 else ()
        if durations_s:
            figures[f"{PREFIX}/step_s"] = median(durations_s)
        for number, section in enumerate(page.sections()):
            durations_s = page.durations(number, self._ended.get(number, 0))
            self._ended[number] = section.count
            if section.name and durations_s:
                figures[f"{PREFIX}/section/{section.name}_s"] = median(durations_s)
        return figures | self._spread()

    def _spread(self) -> dict[str, float]:
        """How all ranks spread, if that is news."""
        try:
            about = os.stat(self._spreads)
        except FileNotFoundError:
            return {}
        file = about.st_ino, about.st_mtime_ns
        if file == self._spread_of or not about.st_size:
            return {}
        self._spread_of = file
        read = json.loads(Path(self._spreads).read_text())
        return {f"{PREFIX}/ranks/{name}": value for name, value in read.items()}

    def _write_for_ever(self) -> None:
        is_over = False
        while not is_over:
            is_over = self._over.wait(self._every_s)
            _unharmed(self.write)
        _unharmed(self._sink.close)


def _memory() -> mmap.mmap:
    """Private memory as a mapping, as the page's reader needs it."""
    descriptor = os.memfd_create("everstep-tracker", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, layout.PAGE_BYTES)
        return mmap.mmap(descriptor, layout.PAGE_BYTES)
    finally:
        os.close(descriptor)


def tracker_of(
    sink: Callable[[], FigureSink],
    words: "Callable[[], memoryview[int]]",
    step: Callable[[], int],
    spreads: str,
    every_s: float,
) -> Tracker | None:
    """A running tracker; None, after a warning, if its sink cannot be opened."""
    try:
        tracker = Tracker(sink(), words, step, spreads, every_s=every_s)
        tracker.start()
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        warn_once(
            f"{module} is not installed, so no figures are written to it: pip install {module}"
        )
        return None
    except Exception as error:  # noqa: BLE001 - an error of a tracker must not fail the training
        warn_once(f"no figures are written: {_one_line(error)}")
        return None
    return tracker


def _unharmed(call: Callable[[], None]) -> None:
    """Call it; an error becomes a warning."""
    try:
        call()
    except Exception as error:  # noqa: BLE001 - the training goes on without these figures
        warn_once(f"figures cannot be written: {_one_line(error)}")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
