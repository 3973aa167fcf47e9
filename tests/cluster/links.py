"""TCP links that a test cuts, delays or hangs, in a loop and a thread of their own."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Literal, TypeVar

T = TypeVar("T")
State = Literal["open", "cut", "hung"]


class Link:
    """Passes connections to an address on.

    A cut link resets connections and refuses new ones, as a process that has ended does. A hung
    one passes nothing and closes nothing, as after a power cut: nobody hears an RST.
    """

    def __init__(self, loop: "LinkLoop", target: int) -> None:
        self._loop = loop
        self._target = target
        self._state: State = "open"
        self._passes = asyncio.Event()
        self._passes.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._delay_s = 0.0
        self.address = ""

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    def cut(self) -> None:
        self._loop.call(lambda: self._become("cut"))

    def hang(self) -> None:
        self._loop.call(lambda: self._become("hung"))

    def delay(self, delay_s: float) -> None:
        """Pass everything later by this, in both directions."""

        def change() -> None:
            self._delay_s = delay_s

        self._loop.call(change)

    def mend(self) -> None:
        """Pass everything on; after a hang also what came meanwhile."""
        self._loop.call(lambda: self._become("open"))

    def _become(self, state: State) -> None:
        self._state = state
        if state == "hung":
            self._passes.clear()
        else:
            self._passes.set()
        if state == "cut":
            for writer in self._writers:
                writer.transport.abort()
        if state == "open":
            self._delay_s = 0.0

    async def open(self, port: int) -> asyncio.Server:
        server = await asyncio.start_server(self._serve, "127.0.0.1", port)
        self.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        return server

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            await self._passes.wait()
            if self._state == "cut":
                return
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target)
            self._writers.add(far_writer)
            try:
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(self._pass(reader, far_writer))
                    tasks.create_task(self._pass(far_reader, writer))
            finally:
                far_writer.transport.abort()
                self._writers.discard(far_writer)
        except* (OSError, asyncio.CancelledError):
            pass  # either end is gone, or the loop ends
        finally:
            writer.transport.abort()
            self._writers.discard(writer)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Read ahead by a bounded queue: what is delayed does not wait for what was before."""
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(1024)

        async def read() -> None:
            data = b"-"
            while data:
                data = await reader.read(1 << 16)
                await queue.put((loop.time() + self._delay_s, data))

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(read())
            while True:
                due, data = await queue.get()
                await asyncio.sleep(max(due - loop.time(), 0))
                await self._passes.wait()
                if not data:
                    raise ConnectionResetError
                writer.write(data)
                await writer.drain()


class LinkLoop:
    """Runs links while their users kill, wait and measure."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._listeners: list[asyncio.Server] = []
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def link(self, target: int, port: int = 0) -> Link:
        link = Link(self, target)
        self._listeners.append(self.run(link.open(port)))
        return link

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    def call(self, act: Callable[[], None]) -> None:
        async def acting() -> None:
            act()

        self.run(acting())

    def close(self) -> None:
        async def end() -> None:
            for listener in self._listeners:
                listener.close()
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(5):
                    await asyncio.gather(*others, return_exceptions=True)

        self.run(end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
