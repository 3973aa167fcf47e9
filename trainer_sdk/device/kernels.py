"""Traces how long the kernels of this rank's GPU take, if `cupti-python` is installed.

CUPTI collects the times itself and delivers them in large buffers; the training thread does nothing
for it. If CUPTI cannot be used (no driver, another profiler, an older release), nothing is traced,
and `reason` has the cause.
"""

import json
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from threading import Event, Lock, Thread
from typing import Any

from trainer_sdk import layout

BUFFER_BYTES = 8 << 20
DURATIONS_MOST = 8192
"""The number of the latest durations that are kept for each kernel."""
KERNELS_MOST = 512
REPORTED_MOST = 32
"""The number of kernels in a report: those that take the most time."""
NAME_MOST = 128
_NS = 1e-9
_JOINED_WITHIN_S = 2.0


@dataclass(slots=True)
class _Kernel:
    durations_s: "deque[float]" = field(default_factory=lambda: deque(maxlen=DURATIONS_MOST))
    count: int = 0


class KernelTrace:
    """Collects the durations of kernels, and writes them to a file for the agent at intervals.

    The figures of each interval replace those of the interval before.
    """

    def __init__(self, folder: str, *, every_s: float = 10.0) -> None:
        self.reason = "not started"
        """Why kernels are not traced; empty while they are."""
        self.dropped = 0
        """The number of records with a name beyond the first 512, or with impossible values."""
        self._folder = folder
        self._every_s = every_s
        self._kernels: dict[str, _Kernel] = {}
        self._lock = Lock()
        self._over = Event()
        self._thread: Thread | None = None
        self._cupti: Any = None

    def start(self) -> bool:
        """Begin tracing; False if CUPTI cannot be used, and then nothing has changed."""
        if self._cupti is not None:
            return True
        try:
            from cupti import cupti
        except Exception as error:  # noqa: BLE001 - a broken installation counts as missing
            self.reason = f"cupti-python is not installed: {error}"
            return False
        try:
            cupti.activity_register_callbacks(lambda: (BUFFER_BYTES, 0), self.take)
            cupti.activity_enable(cupti.ActivityKind.CONCURRENT_KERNEL)
        except Exception as error:  # noqa: BLE001 - no error of CUPTI may reach the training
            self.reason = f"CUPTI cannot be used: {error}"
            return False
        self._cupti, self.reason = cupti, ""
        self._thread = Thread(target=self._write_for_ever, name="everstep-kernels", daemon=True)
        self._thread.start()
        return True

    def stop(self) -> None:
        """Stop tracing."""
        self._over.set()
        if self._thread is not None:
            self._thread.join(_JOINED_WITHIN_S)
        cupti, self._cupti = self._cupti, None
        if cupti is not None:
            self.reason = "stopped"
            _unharmed(lambda: cupti.activity_disable(cupti.ActivityKind.CONCURRENT_KERNEL))
        self._thread = None
        self._over = Event()

    def take(self, activities: Iterable[Any]) -> None:
        """Receive records from CUPTI, on a thread of CUPTI."""
        with self._lock:
            for activity in activities:
                try:
                    self._take(activity)
                except Exception:  # noqa: BLE001 - no error may be raised into CUPTI
                    self.dropped += 1

    def statistics(self) -> list[dict[str, Any]]:
        """The kernels with the most time since the last call, at most 32; resets all counts."""
        with self._lock:
            kernels, self._kernels = self._kernels, {}
        figures = [_figures(name, kernel) for name, kernel in kernels.items()]
        figures.sort(key=lambda entry: -entry["count"] * entry["average_s"])
        return figures[:REPORTED_MOST]

    def _take(self, activity: Any) -> None:
        took_s = (activity.end - activity.start) * _NS
        if not 0 < took_s < 1e6:
            self.dropped += 1
            return
        name = (
            f"{str(activity.name)[: NAME_MOST - 48]} "
            f"<{activity.block_x},{activity.block_y},{activity.block_z}> "
            f"[{activity.grid_x},{activity.grid_y},{activity.grid_z}]"
        )[:NAME_MOST]
        kernel = self._kernels.get(name)
        if kernel is None:
            if len(self._kernels) >= KERNELS_MOST:
                self.dropped += 1
                return
            kernel = self._kernels[name] = _Kernel()
        kernel.durations_s.append(took_s)
        kernel.count += 1

    def _write_for_ever(self) -> None:
        over, cupti = self._over, self._cupti
        while not over.wait(self._every_s):
            _unharmed(lambda: cupti.activity_flush_all(0))
            _unharmed(self.write)

    def write(self) -> None:
        """Write the figures to the file that the agent reads."""
        if not self._folder:
            return
        path = Path(self._folder) / layout.KERNELS_FILE
        fresh = path.with_suffix(".new")
        fresh.write_text(json.dumps(self.statistics()), encoding="utf-8")
        fresh.replace(path)


def _figures(name: str, kernel: _Kernel) -> dict[str, Any]:
    durations = kernel.durations_s
    return {
        "kernel": name,
        "count": kernel.count,
        "median_s": median(durations),
        "average_s": sum(durations) / len(durations),
    }


def _unharmed(call: Any) -> None:
    """Call it and ignore its errors: the training goes on without these figures."""
    try:
        call()
    except Exception:  # noqa: BLE001
        return
