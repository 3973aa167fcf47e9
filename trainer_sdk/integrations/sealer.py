"""Seals the checkpoints of a framework in the background, once all ranks have written them."""

import atexit
import threading
from collections.abc import Callable
from queue import SimpleQueue

from trainer_sdk.integrations import seals
from trainer_sdk.sdk_log import warn

_WITHIN_S = 600.0
_Order = tuple[Callable[[], bool], str, int]


class Sealer:
    """A thread that seals one checkpoint after another; the end of the script waits for it."""

    def __init__(self) -> None:
        self._waiting: list[tuple[str, int]] = []
        self._queue: SimpleQueue[_Order | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def saved(self, path: str, step: int) -> None:
        """Note a checkpoint that this rank has saved; other ranks may still write parts of it."""
        self._waiting.append((path, step))

    def all_saved(self) -> None:
        """Seal what was noted: a finished step, or a barrier, proves that all ranks have saved."""
        waiting, self._waiting = self._waiting, []
        for path, step in waiting:
            self.seal_once(lambda: True, path, step)

    def seal_once(self, is_durable: Callable[[], bool], path: str, step: int) -> None:
        """Seal a checkpoint when `is_durable` returns; it may wait, and tells whether to seal."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="everstep-seal", daemon=True)
            self._thread.start()
            atexit.register(self.close)
        self._queue.put((is_durable, path, step))

    def close(self) -> None:
        """Wait until all seals are written."""
        thread, self._thread = self._thread, None
        if thread is not None:
            atexit.unregister(self.close)
            self._queue.put(None)
            thread.join(_WITHIN_S)

    def _run(self) -> None:
        while (order := self._queue.get()) is not None:
            is_durable, path, step = order
            try:
                if is_durable():
                    seals.seal(path, step)
            except FileNotFoundError:
                continue  # the framework has removed it, as it keeps only the newest
            except OSError as error:
                warn(f"{path} has no seal, and is not used by a resume: {error}")
