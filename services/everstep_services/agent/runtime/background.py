"""Background work of an agent: a failure of it is reported, and never ends the training."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager

from everstep.backoff import Backoff

log = logging.getLogger(__name__)

_AGAIN_FIRST_S = 0.1
_AGAIN_LAST_S = 30.0


@contextmanager
def unharmed(work: str) -> Generator[None]:
    """Log whatever is raised inside, and go on."""
    try:
        yield
    except Exception:
        log.exception("failed what=%s", work)


class BackgroundLoops:
    """Runs loops that may fail, and restarts each that does."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._said: set[str] = set()

    async def run(self, loop: Callable[[], Awaitable[object]]) -> None:
        """Run the loop until it returns or is cancelled."""
        backoff = Backoff(_AGAIN_FIRST_S, _AGAIN_LAST_S, failures=1)
        while True:
            began = asyncio.get_running_loop().time()
            try:
                await loop()
            except Exception as error:
                log.exception("failed what=%s", loop.__qualname__)
                self._tell(loop.__qualname__, error)
            else:
                return
            lasted_s = asyncio.get_running_loop().time() - began
            if lasted_s > _AGAIN_LAST_S:
                backoff.reset()
            await asyncio.sleep(backoff.failed())

    def _tell(self, loop: str, error: Exception) -> None:
        text = f"{type(error).__name__}: {error}"
        if text not in self._said:
            self._said.add(text)
            self._say(f"{loop} has failed and begins again; the ranks run on ({text})")
