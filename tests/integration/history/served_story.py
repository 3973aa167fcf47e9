"""The REST interface on a real port with a story in its record, for commands to ask."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from pathlib import Path

import pytest

from everstep.bus.ports import Bus
from everstep.clock import SystemClock
from everstep.messages import Fact, NodeBeat
from everstep.observe.http import listen, serve_asgi, url_of
from everstep.runtime import Loop, serve
from everstep.store.database import open_database
from everstep.store.log import FactLog
from everstep.store.schema import upgrade
from everstep.store.tokens import Scope
from everstep_services.catalog.replica import CatalogReplica
from everstep_services.catalog.settings import CatalogSettings
from everstep_services.cli.__main__ import main
from everstep_services.history.projections.fold import fold
from tests.integration.conftest import Api
from tests.unit.history.story import JOB, whole

Answers = Callable[[Bus], AbstractAsyncContextManager[None]]
Run = Callable[..., tuple[int, str, str]]
_WITHIN_S = 20
TAILS = {"stderr": "CUDA out of memory — „naïve“\n"}


class ServedStory:
    """In a thread of its own; `arguments` make a command ask it."""

    def __init__(
        self,
        folder: Path,
        more: Sequence[Fact] = (),
        beats: Sequence[NodeBeat] = (),
        *,
        scope: Scope = "read",
        catalog: CatalogSettings | None = None,
        answers: Sequence[Answers] = (),
    ) -> None:
        """Where there are settings for it, a catalog answers, too, and so do `answers`."""
        self._folder = folder
        self._more = more
        self._beats = beats
        self._scope: Scope = scope
        self._catalog = catalog
        self._answers = answers
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self.arguments: list[str] = []

    def __enter__(self) -> "ServedStory":
        self._thread.start()
        assert self._ready.wait(_WITHIN_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(_WITHIN_S)

    def command(self, capsys: pytest.CaptureFixture[str]) -> Run:
        """`everstep` with these words: its exit code, and what it prints."""

        def run(*words: str) -> tuple[int, str, str]:
            code = main([*words, *self.arguments])
            out, err = capsys.readouterr()
            return code, out, err

        return run

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        async with open_database(f"sqlite:///{self._folder / 'history.db'}") as database:
            await upgrade(database)
            api = Api(database, FactLog(database, fold), SystemClock())
            await api.open(failed_logins_per_minute=10**6)
            blob = await api.bus.blobs.put(JOB, TAILS["stderr"].encode())
            await api.add(*whole(blob), *self._more)
            for beat in self._beats:
                api.context.beats.hear(beat)
            token = self._folder / "token"
            token.write_text(await api.token(self._scope))
            token.chmod(0o600)
            listener = listen("127.0.0.1", 0, remedy="")
            self.arguments = ["--api", url_of(listener), "--token-file", str(token)]

            async def serving(stop: asyncio.Event) -> None:
                await serve_asgi(api.app, listener, stop, drain_within_s=0.5)

            loops: tuple[Loop, ...] = ()
            if self._catalog is not None:
                loops = CatalogReplica(self._catalog, api.bus, SystemClock()).loops
                for fact in self._more:
                    await api.bus.record(fact)
            async with AsyncExitStack() as opened:
                for answers in self._answers:
                    await opened.enter_async_context(answers(api.bus))
                self._ready.set()
                await serve(*loops, stop=self._stop, drains=(serving,))
