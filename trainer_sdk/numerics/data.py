"""The batches of a training, so that a step can be made again."""

from collections import deque
from collections.abc import Generator, Iterable, Mapping
from typing import Any


class Batches:
    """The batches of this rank; all ranks make the same calls."""

    can_skip = False
    position: tuple[int, int] | None = None

    def __init__(self, batches: Iterable[Any], state: Mapping[str, Any], spans: Any = ()) -> None:
        del state, spans
        self._batches = batches
        self._kept: list[Any] = []
        self._again: deque[Any] = deque()

    def span(self, since: int) -> tuple[int, int] | None:
        """The data since this step."""
        del since
        return None

    def taken(self, step: int) -> None:
        """The present step is decided."""
        del step
        self._kept.clear()

    def again(self) -> None:
        """Give the batches of the present step once more."""
        self._again = deque(self._kept)

    def __iter__(self) -> Generator[Any]:
        """The batches of one pass."""
        source = iter(self._batches)
        while True:
            if self._again:
                yield self._again.popleft()
                continue
            try:
                batch = next(source)
            except StopIteration:
                return
            self._kept.append(batch)
            yield batch
