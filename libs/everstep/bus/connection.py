"""One connection that always comes back: opened with a diagnosis, rebuilt when it was closed.

    opening ─▶ connected ⇄ reconnecting          (nats-py, for ever, with our jitter)
                   └────▶ closed ─▶ opening …    (the server closed it: expired credentials,
                                                  protocol error; we read them anew and rebuild)

Subscriptions are restored in both cases.
"""

import asyncio
import contextlib
import logging
import random
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator
from contextlib import asynccontextmanager, contextmanager
from math import inf
from typing import NamedTuple, Protocol

from nats import errors as nats_errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from everstep.backoff import Backoff, jittered_s
from everstep.bus.auth.login import Login, addresses
from everstep.bus.background import in_background
from everstep.bus.diagnosis import (
    check_account,
    check_server,
    credentials_expired,
    explain,
    is_final,
)
from everstep.bus.errors import (
    BusDeniedError,
    BusError,
    BusUnreachableError,
    JetStreamOffError,
    NoLeaderError,
)
from everstep.bus.nats_patches import Hear, PatchedClient, dispose, settle
from everstep.bus.server.choice import Move, ServerChoice
from everstep.bus.settings import BusSettings

log = logging.getLogger(__name__)

_DENIED = re.compile(r'permissions violation for (publish|subscription) to "([^"]+)"', re.I)
_REBUILD_FIRST_S = 0.1
_REBUILD_MAX_S = 30.0
JETSTREAM_WITHIN_S = 5.0
"""A server needs a moment to set JetStream up for a new account, when all its agents come at once.
"""
_ASK_JETSTREAM_S = 0.1

OnMessage = Callable[[Msg], Awaitable[None]]


class _Listener(NamedTuple):
    up: Callable[[], None]
    down: Callable[[], None]
    denied: Callable[[str], None]
    fewer: Callable[[], None]


def _nothing(*_: object) -> None:
    """The callback where the caller gave none."""


class Attachment(Protocol):
    """Something that must be set up anew on each new client."""

    async def attach(self, client: Client) -> None: ...


class Connection:
    """Use `open_connection`."""

    def __init__(self, settings: BusSettings, name: str) -> None:
        self._settings = settings
        self._name = name
        self.login = Login(settings)
        self._client: PatchedClient | None = None
        self._attachments: list[Attachment] = []
        self._closed = asyncio.Event()
        self._up = asyncio.Event()
        self._opened = asyncio.Event()
        """No client is being opened on which attachments hear messages already."""
        self._opened.set()
        self._listeners: list[_Listener] = []
        self._denied_subscriptions: set[str] = set()
        self.counters = {"reconnects": 0, "rebuilds": 0, "errors": 0, "slow": 0, "denied": 0}
        self.trouble: str | None = None
        self._is_up = False
        self._has_been_lost = False
        self._reconnects_by_choice = False
        self._came_back_at: float | None = None
        writes_within_s, jitter_s = 2 * settings.request_within_s, settings.reconnect_jitter_s
        self._choice = ServerChoice(len(addresses(settings.url)), writes_within_s, jitter_s)
        self._move: Move | None = None
        self._has_move = asyncio.Event()

    # -- for the rest of the bus -------------------------------------------------------------

    @property
    def settings(self) -> BusSettings:
        return self._settings

    @property
    def name(self) -> str:
        return self._name

    @property
    def connected(self) -> bool:
        # Only once `returns` counts the loss: nats-py reports a connection a moment earlier.
        return self._is_up and self._client is not None and bool(self._client.is_connected)

    @property
    def client(self) -> PatchedClient:
        if self._client is None:
            raise BusUnreachableError(f"not connected yet to {self._settings.url}")
        return self._client

    @property
    def back_for_s(self) -> float:
        """Seconds since the connection came back after a loss; infinite if it was never lost."""
        if self._came_back_at is None:
            return inf
        return asyncio.get_running_loop().time() - self._came_back_at

    @property
    def inbox_prefix(self) -> str:
        """Only our user may subscribe below this prefix, if the server restricts it."""
        if self._settings.inbox_prefix is not None:
            return self._settings.inbox_prefix
        return "_INBOX" if self._settings.user is None else f"_INBOX.{self._settings.user}"

    @contextmanager
    def noticing(
        self,
        *,
        up: Callable[[], None] = _nothing,
        down: Callable[[], None] = _nothing,
        denied: Callable[[str], None] = _nothing,
        fewer: Callable[[], None] = _nothing,
    ) -> Iterator[None]:
        """While the block runs, call back at each (re)connect, loss, and refused subject.

        `fewer`: a server of the cluster has gone, but not ours.
        """
        listener = _Listener(up, down, denied, fewer)
        self._listeners.append(listener)
        try:
            yield
        finally:
            self._listeners.remove(listener)

    async def wait_connected(self) -> None:
        while not self.connected:
            self._up.clear()
            await self._up.wait()

    async def wait_opened(self) -> None:
        """Wait while a new client has attachments, but is not in use yet: it cannot send."""
        await self._opened.wait()

    @asynccontextmanager
    async def attached(self, attachment: Attachment) -> AsyncIterator[None]:
        """Attach it now, if we are connected, and again on each new client."""
        self._attachments.append(attachment)
        try:
            if self._client is not None and not self._client.is_closed:
                await attachment.attach(self._client)
            yield
        finally:
            self._attachments.remove(attachment)

    @asynccontextmanager
    async def subscribed(
        self, subject: str, on_message: OnMessage, hear: Hear | None = None
    ) -> AsyncIterator[None]:
        """Subscribe to a subject while the block runs; `BusDeniedError` when we may not.

        With `hear`, messages without headers are passed to it at once instead.
        """
        wanted = _Wanted(self, subject, on_message, hear)
        async with self.attached(wanted):
            try:
                yield
            finally:
                await wanted.detach()

    async def refuse_if_denied(self, client: Client, subject: str) -> None:
        """Wait until the server has seen a subscription; raise if it refused it."""
        self._denied_subscriptions.discard(subject.lower())
        if client.is_connected:
            try:
                await settle(client, self._settings.request_within_s)
            except (nats_errors.Error, TimeoutError):
                return  # lost meanwhile: nats-py subscribes again when it is back
        if subject.lower() in self._denied_subscriptions:
            raise BusDeniedError(f"user {self.login.name} may not subscribe to {subject}")

    # -- opening and rebuilding ------------------------------------------------------------

    async def open(self) -> None:
        """Connect once, or raise the error that says why not, within `connect_within_s`."""
        try:
            await self._open()
        finally:
            self._opened.set()

    async def _open(self) -> None:
        client = PatchedClient(self._settings.reconnect_jitter_s, self._servers_reported)
        try:
            await self._connect(client)
            await self._check(client)
            self._opened.clear()
            await self._attach(client)
        except (nats_errors.Error, OSError) as error:  # it was lost again
            await dispose(client)
            raise await asyncio.to_thread(explain, error, self._settings) from error
        except BaseException:
            await dispose(client)
            raise
        self._closed.clear()
        self._client = client
        self.trouble = None
        self._came_up()

    async def _check(self, client: Client) -> None:
        check_server(client, self._settings)
        loop = asyncio.get_running_loop()
        began, most_s = loop.time(), self._settings.connect_within_s
        while True:
            inbox = f"{self.inbox_prefix}.{client.new_inbox().rpartition('.')[2]}"
            answers = await client.subscribe(inbox, max_msgs=1)
            await self.refuse_if_denied(client, inbox)
            try:
                return await check_account(client, self._settings, answers, self.noticing)
            except (JetStreamOffError, NoLeaderError) as error:
                is_off = isinstance(error, JetStreamOffError)
                if loop.time() - began >= (min(JETSTREAM_WITHIN_S, most_s) if is_off else most_s):
                    raise
                log.info("bus_waits_for_jetstream name=%s reason=%r", self._name, str(error))
            await asyncio.sleep(_ASK_JETSTREAM_S)

    async def _attach(self, client: Client) -> None:
        """Attach all, also those that are added meanwhile, and skip none when others leave."""
        seen: list[Attachment] = []
        while (
            next_ := next(
                (attachment for attachment in self._attachments if attachment not in seen), None
            )
        ) is not None:
            seen.append(next_)
            await next_.attach(client)

    async def _connect(self, client: Client) -> None:
        options = await asyncio.to_thread(self.login.options)
        errors: list[Exception] = []
        opened = False
        try:
            async with asyncio.timeout(self._settings.connect_within_s) as limit:

                async def on_error(error: Exception) -> None:
                    if opened:
                        await self._note(error)
                        return
                    errors.append(error)
                    if is_final(errors):
                        limit.reschedule(asyncio.get_running_loop().time())

                await client.connect(
                    **options,
                    name=f"everstep-{self._name}",
                    error_cb=on_error,
                    disconnected_cb=self._disconnected,
                    reconnected_cb=self._reconnected,
                    closed_cb=self._was_closed,
                    inbox_prefix=self.inbox_prefix,
                )
                opened = True
        except TimeoutError:
            cause = errors[-1] if errors else None
            raise await self._explained(cause) from cause
        except (nats_errors.Error, OSError, ValueError) as error:
            raise await self._explained(error) from error

    async def _explained(self, error: Exception | None) -> BusError:
        explanation = await asyncio.to_thread(explain, error, self._settings)
        if isinstance(explanation, BusDeniedError):
            self.login.forget()  # from now on the operator's file counts, however old its login
        return explanation

    async def keep_open(self, *, first: bool) -> None:
        """Rebuild the client whenever it was closed; with `first`, open it first."""
        if first:
            await self._open_at_last(waits_first=False)
        while True:
            await self._closed.wait()
            self.counters["rebuilds"] += 1
            await self._open_at_last(waits_first=True)

    async def _open_at_last(self, *, waits_first: bool) -> None:
        """Try until a client is open."""
        backoff = Backoff(_REBUILD_FIRST_S, _REBUILD_MAX_S)
        wait_s = backoff.failed() if waits_first else 0.0
        while True:
            await asyncio.sleep(jittered_s(wait_s))
            try:
                await self.open()
            except BusError as error:
                if self.trouble != str(error):
                    log.warning("bus_not_open error=%s", error)
                self.trouble = str(error)
                wait_s = backoff.failed()
            else:
                return

    async def log_in_anew(self) -> None:
        """Reconnect with the renewed login, because the server ends a connection with its login."""
        await self._reconnect(None)

    async def _reconnect(self, to: str | None) -> None:
        client = self._client
        if client is None or not client.is_connected:
            return  # it reconnects anyway
        with contextlib.suppress(nats_errors.Error, TimeoutError):
            # Else a question that comes just now is lost, and its asker waits in vain.
            await client.leave_queues()
            await settle(client, self._settings.request_within_s)
        if client.is_connected:
            self._reconnects_by_choice = True
            await client.move(to)

    # -- which server ----------------------------------------------------------------------

    def acknowledged(self) -> None:
        """A stream has acknowledged a message."""
        self._choice.acknowledged()

    @property
    def choice(self) -> ServerChoice:
        """The servers of the bus."""
        return self._choice

    @property
    def silent_s(self) -> float:
        """For how long streams have not acknowledged what this process writes."""
        return self._choice.silent_s(time.monotonic())  # as the loop's clock

    def unanswered(self, sent_at: float) -> None:
        """A message for a stream was not acknowledged since that time of the loop's clock."""
        self._consider(self._choice.unanswered(sent_at, asyncio.get_running_loop().time()))

    def _servers_reported(self, servers: Collection[str], is_first: bool) -> None:
        now, before = asyncio.get_running_loop().time(), self._choice.servers
        self._consider(self._choice.reported(servers, now, is_first=is_first))
        if not is_first and before - self._choice.servers:
            for listener in list(self._listeners):
                listener.fewer()

    def _consider(self, move: Move | None) -> None:
        if move is not None:
            self._move = move
            self._has_move.set()

    async def move_for_ever(self) -> None:
        """Move to another server whenever this one is cut off, or another one has come back."""
        while True:
            await self._has_move.wait()
            self._has_move.clear()
            move = self._move
            assert move is not None
            try:
                async with asyncio.timeout(move.after_s):
                    await self._has_move.wait()  # a newer reason counts
            except TimeoutError:
                log.warning("bus_moves to=%s reason=%r", move.to or "another", move.reason)
                await self._reconnect(move.to)

    async def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await dispose(client)

    # -- what nats-py tells us -------------------------------------------------------------

    async def _disconnected(self) -> None:
        if self._client is None:
            return
        self._went_down()
        if self._reconnects_by_choice:  # only this client reconnects, and when it chose to
            self._reconnects_by_choice = False
            return
        log.warning("bus_disconnected url=%s", self._settings.url)
        # A fleet that lost the server at the same moment must not reconnect at the same moment.
        await asyncio.sleep(random.uniform(0, self._settings.reconnect_jitter_s))  # noqa: S311

    async def _reconnected(self) -> None:
        self.counters["reconnects"] += 1
        self.trouble = None
        log.info("bus_reconnected url=%s", self._settings.url)
        self._came_up()

    async def _was_closed(self) -> None:
        if self._client is not None:
            self._went_down()
            log.warning("bus_closed_by_server error=%s", self.trouble or "unknown")
            self._closed.set()

    async def _note(self, error: Exception) -> None:
        denied = _DENIED.search(str(error))
        if denied is not None:
            self._note_denied(
                denied[1].lower(), denied[2].lower()
            )  # nats-py lower-cases most of it
        elif isinstance(error, nats_errors.SlowConsumerError):
            self.counters["slow"] += 1
        else:
            self.counters["errors"] += 1
            expired = await asyncio.to_thread(credentials_expired, error, self._settings)
            self.trouble = str(expired or error)

    def _note_denied(self, act: str, subject: str) -> None:
        self.counters["denied"] += 1
        if act == "subscription":
            self._denied_subscriptions.add(subject)
        else:
            for listener in list(self._listeners):
                listener.denied(subject)
        log.error("bus_denied user=%s act=%s subject=%s", self.login.name, act, subject)

    def _came_up(self) -> None:
        self._is_up = True
        if self._has_been_lost:
            self._came_back_at = asyncio.get_running_loop().time()
        for listener in list(self._listeners):
            listener.up()
        self._up.set()

    def _went_down(self) -> None:
        self._is_up = False
        self._has_been_lost = True
        for listener in list(self._listeners):
            listener.down()


class _Wanted:
    """A subscription that is made again on each new client."""

    def __init__(
        self, connection: Connection, subject: str, on_message: OnMessage, hear: Hear | None
    ) -> None:
        self._connection = connection
        self._subject = subject
        self._on_message = on_message
        self._hear = hear
        self._subscription: Subscription | None = None

    async def attach(self, client: Client) -> None:
        self._subscription = await client.subscribe(
            self._subject, cb=self._on_message, pending_msgs_limit=0, pending_bytes_limit=0
        )
        if self._hear is not None and isinstance(client, PatchedClient):
            client.hear_at_once(self._subscription, self._hear)
        await self._connection.refuse_if_denied(client, self._subject)

    async def detach(self) -> None:
        if self._subscription is None:
            return
        try:
            await self._subscription.unsubscribe()
        except nats_errors.Error:
            return  # closed or closing: the server forgets it with the connection


@asynccontextmanager
async def open_connection(
    settings: BusSettings, name: str, *, wait: bool
) -> AsyncIterator[Connection]:
    """Keep a connection open while the block runs.

    With `wait` the block starts connected, or the reason why not is raised. Without, the connection
    opens as soon as it can: a training job must start while the bus is away.
    """
    connection = Connection(settings, name)
    if wait:
        await connection.open()
    try:
        async with in_background(connection.keep_open(first=not wait), connection.move_for_ever()):
            yield connection
    finally:
        await connection.close()
