"""Notifies tasks that wait for the log to grow."""

import asyncio


class LogNotifier:
    """The newest place in the log that this process knows of."""

    def __init__(self) -> None:
        self._last_n = 0
        self._changed = asyncio.Event()
        self._interrupts = 0
        self.is_closed = False
        self.waiting = 0
        """How many tasks wait now: while it is 0, no poll is needed."""

    @property
    def last_n(self) -> int:
        """The log reaches at least to here."""
        return self._last_n

    def announce(self, last_n: int) -> None:
        """The log reaches to here now. Going back is ignored."""
        if last_n > self._last_n:
            self._last_n = last_n
            self._wake()

    def interrupt(self) -> None:
        """All waits end, because there is news that is not a fact."""
        self._interrupts += 1
        self._wake()

    def close(self) -> None:
        """There will be no more facts: all waits end."""
        self.is_closed = True
        self._wake()

    async def wait_beyond(self, n: int, within_s: float) -> None:
        """Wait until the log is longer than `n`, it is closed, interrupted, or time is up."""
        self.waiting += 1
        try:
            async with asyncio.timeout(within_s):
                before = self._interrupts
                while self._last_n <= n and self._interrupts == before and not self.is_closed:
                    await self._changed.wait()
        except TimeoutError:
            return
        finally:
            self.waiting -= 1

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
