"""A stand-in for `cupti.cupti` (cupti-python 13.4), as its manual and its samples describe it.

A buffer is asked for with a function that returns its bytes and its most records (0 for no limit);
records come as a list, on a thread of CUPTI's own. Each call raises an exception where there is no
driver.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from threading import Thread


class ActivityKind(IntEnum):
    KERNEL = 3
    CONCURRENT_KERNEL = 10


class NotSupportedError(RuntimeError):
    """Raised where there is no driver."""


@dataclass(frozen=True)
class Kernel:
    """One record, of the fields that are read."""

    name: str
    start: int
    end: int
    kind: int = ActivityKind.CONCURRENT_KERNEL
    block_x: int = 128
    block_y: int = 1
    block_z: int = 1
    grid_x: int = 4
    grid_y: int = 1
    grid_z: int = 1


class Cupti:
    """The module."""

    ActivityKind = ActivityKind

    def __init__(self, *, has_driver: bool = True) -> None:
        self._has_driver = has_driver
        self._completed: Callable[[Sequence[object]], None] | None = None
        self._pending: list[object] = []
        self.buffer: tuple[int, int] = (0, 0)
        self.enabled: set[int] = set()

    def activity_register_callbacks(
        self,
        func_buffer_requested: Callable[[], tuple[int, int]],
        func_buffer_completed: Callable[[Sequence[object]], None],
    ) -> None:
        self._check()
        self.buffer = func_buffer_requested()
        self._completed = func_buffer_completed

    def activity_enable(self, kind: int) -> None:
        self._check()
        self.enabled.add(kind)

    def activity_disable(self, kind: int) -> None:
        self.enabled.discard(kind)

    def activity_flush_all(self, flag: int) -> None:
        assert flag in {0, 1}
        pending, self._pending = self._pending, []
        if self._completed is not None and pending:
            thread = Thread(target=self._completed, args=(pending,))
            thread.start()
            thread.join()

    def ran(self, *records: object) -> None:
        """A kernel has run on the device."""
        if self.enabled:
            self._pending += records

    def _check(self) -> None:
        if not self._has_driver:
            raise NotSupportedError("CUDA driver is not found")
