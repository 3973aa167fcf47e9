"""Answers of the API without a service: from the record on disk, in this process, read-only."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import httpx2

from everstep.bus.errors import BusUnreachableError, NobodyAnswersError
from everstep.bus.facts.spool import unsent_bytes
from everstep.clock import SystemClock
from everstep.store.errors import StoreError
from everstep.store.queries import log_head
from everstep.store.record_file import RecordFile, has_log
from everstep.store.tokens import Token
from everstep_services.cli.api.client import Api
from everstep_services.cli.errors import CliError, Exit
from everstep_services.history.api.app import create_api, make_context
from everstep_services.history.api.context import Connectedness
from everstep_services.history.notifier import LogNotifier
from everstep_services.history.settings import ApiSettings

URL = "http://record"
_READER = Token(id="record", name="record", scope="read", created_us=0)
_AWAY = "no service runs here, and only the record on disk answers"
_ATTEMPTS = 3


@dataclass(frozen=True, slots=True)
class RecordStatus:
    """How old the record is, and which facts are not in it."""

    path: Path
    age_s: float
    unprojected: int
    """Facts that are in the log, and not in the tables yet."""
    unsent_bytes: int
    """Bytes of facts that wait in spools for the bus."""


def record_api(path: Path, *, timeout_s: float) -> tuple[Api, RecordStatus]:
    """A client that answers from this database, and what its answers lack."""
    transport = RecordTransport(path)
    try:
        unprojected = transport.check()
    except StoreError as error:
        transport.close()
        raise CliError(str(error)) from error
    spools = path.parent / "spool"
    status = RecordStatus(
        path=path,
        age_s=max(0.0, SystemClock().wall().timestamp() - written_at(path)),
        unprojected=unprojected,
        unsent_bytes=sum(map(_unsent_bytes, spools.glob("*/"))),
    )
    return Api(URL, None, timeout_s=timeout_s, transport=transport, is_record=True), status


def newest_record(state: Path) -> Path | None:
    """The record that was written last, of a state directory and of the jobs below it."""
    paths = [state / "history.db", *state.glob("jobs/*/history.db")]
    return max(filter(_is_readable, paths), key=written_at, default=None)


def written_at(path: Path) -> float:
    """When the database was last written, in seconds since 1970."""
    log = path.with_name(f"{path.name}-wal")
    return max(file.stat().st_mtime for file in (path, log) if file.exists())


class RecordTransport(httpx2.BaseTransport):
    """Hands requests to history's API in this process. Nothing is sent, written or created."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._runner = asyncio.Runner()
        self._record: RecordFile | None = None
        self._client: httpx2.AsyncClient | None = None

    def check(self) -> int:
        """Return how many facts are not projected; raise the `StoreError` of a bad file."""
        return self._runner.run(self._check())

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        """Answer a request, or refuse it where only a service can do it."""
        if request.method != "GET" or request.url.path.endswith("/stream"):
            raise CliError(
                "only a running service can do that: start one with `everstep up`, or name it "
                "with --api URL or url in [client]",
                Exit.UNREACHABLE,
            )
        return self._runner.run(self._answer(request))

    def close(self) -> None:
        """Close the database."""
        self._runner.run(self._close())
        self._runner.close()

    async def _check(self) -> int:
        for attempt in range(_ATTEMPTS):
            try:
                record = await self._opened()
                await record.check()
                now = await log_head(record)
            except StoreError:
                # A writer that starts or stops just now changes what the file is.
                if attempt == _ATTEMPTS - 1 or not self._has_changed():
                    raise
            else:
                if not self._has_changed():
                    return now.last_n - now.projected_n
        return 0

    async def _answer(self, request: httpx2.Request) -> httpx2.Response:
        answer = await self._ask(request)
        if self._has_changed():
            answer = await self._ask(request)
        return httpx2.Response(
            answer.status_code, headers=_plain(answer.headers), content=answer.content
        )

    async def _ask(self, request: httpx2.Request) -> httpx2.Response:
        await self._opened()
        assert self._client is not None
        return await self._client.get(request.url, headers={"Accept": "application/json"})

    def _has_changed(self) -> bool:
        """Whether a writer has come, so that the file is no longer complete by itself."""
        return self._record is not None and self._record.is_immutable and has_log(self._path)

    async def _opened(self) -> RecordFile:
        if self._record is not None and not self._has_changed():
            return self._record
        await self._close()
        record = self._record = RecordFile(self._path)
        now = await log_head(record)
        del now  # raises what is wrong with the file
        never = Connectedness(lambda: False, lambda: False)
        bus: Any = AbsentBus()
        context = await make_context(
            ApiSettings(), record, LogNotifier(), never, clock=SystemClock(), bus=bus
        )
        self._client = httpx2.AsyncClient(
            transport=httpx2.ASGITransport(_admitted(create_api(context)))
        )
        return record

    async def _close(self) -> None:
        if self._client is not None:
            await self._client.aclose()
        if self._record is not None:
            await self._record.close()
        self._client = self._record = None


class AbsentBus:
    """In place of the bus, where no service runs: every question fails at once."""

    connected = False
    returns = 0

    def __init__(self, reason: str = _AWAY) -> None:
        self._reason = reason

    @property
    def blobs(self) -> "AbsentBus":
        """Contents of evidence: only copies in the database can be read."""
        return self

    @property
    def rank_logs(self) -> "AbsentBus":
        """The log store: nothing of it can be read."""
        return self

    def documents(self, _bucket: str) -> "AbsentBus":
        """Documents: none can be read."""
        return self

    async def ask(self, *_: object, **__: object) -> NoReturn:
        """No service can be asked."""
        raise NobodyAnswersError(self._reason)

    async def get(self, *_: object) -> NoReturn:
        """No document and no blob can be read."""
        raise BusUnreachableError(self._reason)

    async def put(self, *_: object) -> NoReturn:
        """No document and no blob can be written."""
        raise BusUnreachableError(self._reason)

    async def keys(self, *_: object) -> NoReturn:
        """No document can be listed."""
        raise BusUnreachableError(self._reason)

    async def read(self, *_: object, **__: object) -> NoReturn:
        """No output of ranks can be read."""
        raise BusUnreachableError(self._reason)

    async def rounds(self, *_: object) -> NoReturn:
        """No round with output can be listed."""
        raise BusUnreachableError(self._reason)

    async def indexes(self, *_: object) -> NoReturn:
        """No index of output can be read."""
        raise BusUnreachableError(self._reason)

    async def keeps_s(self) -> NoReturn:
        """How long the server keeps blobs is not known."""
        raise BusUnreachableError(self._reason)


def _admitted(app: Any) -> Any:
    """The endpoints, for a reader: who may read the file may read its answers."""

    async def call(scope: dict[str, Any], receive: object, send: object) -> None:
        scope.setdefault("state", {})["token"] = _READER
        await app(scope, receive, send)

    return call


def _plain(headers: Mapping[str, str]) -> list[tuple[str, str]]:
    return [(name, value) for name, value in headers.items() if name != "content-length"]


def _unsent_bytes(folder: Path) -> int:
    try:
        return unsent_bytes(folder)
    except (OSError, ValueError):
        return 0


def _is_readable(path: Path) -> bool:
    try:
        return path.stat().st_size > 0
    except OSError:
        return False
