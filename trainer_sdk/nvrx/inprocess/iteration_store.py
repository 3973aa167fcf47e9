"""The store by which wrapped ranks meet: interruptions, lost ranks, and barriers.

It needs only a torch store with `add`, `set`, `get` and `check`, and imports nothing but the
standard library: the monitor process of a rank uses it as well.
"""

import json
import time
from collections.abc import Callable, Iterable
from typing import Any

_BEATS = "beats"
_FIRST_PAUSE_S = 0.002
_LONGEST_PAUSE_S = 0.1
_PAUSE_S_A_RANK = 2e-5
"""Limits the load of the store: a thousand ranks ask 50 times a second each."""


class BarrierTimeout(Exception):  # noqa: N818 - NVRx's name
    """Some ranks have not come to a barrier."""


class IterationStore:
    """What the ranks of one iteration know of each other; keys are below `prefix`."""

    def __init__(self, store: Any, prefix: str, world_size: int) -> None:
        self._store = store
        self._prefix = prefix
        self.world_size = world_size
        self._longest_pause_s = max(_LONGEST_PAUSE_S, world_size * _PAUSE_S_A_RANK)

    def interrupt(self, rank: int, kind: str) -> None:
        """Record why this iteration must end."""
        self._append("interruptions", json.dumps([rank, kind]))
        self._store.set(self._key("interrupted"), "1")

    def is_interrupted(self) -> bool:
        """Whether a rank has recorded an interruption."""
        return bool(self._store.check([self._key("interrupted")]))

    def interruptions(self) -> list[tuple[int, str]]:
        """Rank and kind of each interruption."""
        return [
            (int(rank), str(kind)) for rank, kind in map(json.loads, self._all("interruptions"))
        ]

    def first_to_interrupt(self) -> int:
        """The rank whose interruption came first; waits until there is one."""
        rank, _ = json.loads(*self.take(["interruptions/1"]))
        return int(rank)

    def lose(self, rank: int) -> None:
        """Record that a rank takes part in no further iteration."""
        self._append("lost", str(rank))

    def lost(self) -> set[int]:
        """The ranks that take part in no further iteration."""
        return {int(rank) for rank in self._all("lost")}

    def complete(self) -> None:
        """Record that a rank has completed the function."""
        self._store.set(self._key("completed"), "1")

    def is_completed(self) -> bool:
        """Whether a rank has completed the function."""
        return bool(self._store.check([self._key("completed")]))

    def arrive(self, barrier: str, rank: int) -> None:
        """Have a rank arrive at a barrier; a second arrival of that rank changes nothing."""
        if self._store.add(self._key(f"{barrier}/{rank}"), 1) == 1:
            self._store.add(self._key(barrier), 1)

    def is_full(self, barrier: str, needed: int | None = None) -> bool:
        """Whether all ranks have arrived."""
        wanted = self.world_size if needed is None else needed
        return int(self._store.add(self._key(barrier), 0)) >= wanted

    def wait(
        self,
        barrier: str,
        within_s: float,
        needed: int | None = None,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        """Wait until all ranks have arrived; `BarrierTimeout` if some have not."""
        deadline, pause_s = time.monotonic() + within_s, _FIRST_PAUSE_S
        while not self.is_full(barrier, needed):
            meanwhile()
            if time.monotonic() >= deadline:
                there = int(self._store.add(self._key(barrier), 0))
                raise BarrierTimeout(
                    f"{there} of {needed or self.world_size} ranks came to the barrier {barrier} "
                    f"within {within_s:g} s"
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, self._longest_pause_s)

    def wait_for_the_living(
        self,
        barrier: str,
        within_s: float,
        needed: int,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        """Wait for ranks that may train on for long; `BarrierTimeout` once none has beaten."""
        while True:
            beats = self.counted(_BEATS)
            try:
                return self.wait(barrier, within_s, needed, meanwhile)
            except BarrierTimeout:
                if self.counted(_BEATS) == beats:
                    raise

    def beat(self) -> None:
        """Show those who wait for the living that a rank lives."""
        self.count(_BEATS)

    def count(self, name: str) -> int:
        """Count one more; returns the sum over all ranks so far."""
        return int(self._store.add(self._key(name), 1))

    def counted(self, name: str) -> int:
        """The sum over all ranks so far."""
        return int(self._store.add(self._key(name), 0))

    def put(self, name: str, text: str) -> None:
        """Set a value that other ranks get."""
        self._store.set(self._key(name), text)

    def take(self, names: Iterable[str]) -> list[str]:
        """These values; waits until they are set."""
        return [self._store.get(self._key(name)).decode() for name in names]

    def _append(self, name: str, text: str) -> None:
        number = self._store.add(self._key(f"{name}/n"), 1)
        self._store.set(self._key(f"{name}/{number}"), text)

    def _all(self, name: str) -> list[str]:
        count = int(self._store.add(self._key(f"{name}/n"), 0))
        return self.take(f"{name}/{number}" for number in range(1, count + 1))

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}"
