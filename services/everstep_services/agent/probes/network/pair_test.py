"""Check `network`: bandwidth and round trip between two nodes, a listener and its peer.

Both know a token that is made for this one measurement; each proves to the other that it has it
without sending it (HMAC over fresh numbers of both). Then the peer sends small messages that come
back, and then as many bytes as it can within a bound. Any other data is dropped.
"""

import asyncio
import contextlib
import hashlib
import hmac
import os
import socket
import statistics
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass

from everstep.errors import EverstepError
from everstep.messages.facts.health import CheckResult
from everstep_services.agent.probes.settings import ChecksSettings

NAME = "network"
BYTES_MOST = 64 << 20
SENDS_FOR_S = 1.0
_NONCE = 32
_TOKEN_LEAST = 16
_ROUND_TRIPS = 50
_PING = 64
_CHUNK = 1 << 20
_PROVES_WITHIN_S = 2.0
_AT_ONCE = 16
_COUNT = struct.Struct("!Q")


class NetworkCheckError(EverstepError):
    """The measurement could not be made; the text says why. It speaks against no node."""


class PortTakenError(NetworkCheckError):
    """The node cannot listen: the port is taken, or the address is not its own."""


class PeerSilentError(NetworkCheckError):
    """The other node has not answered in time."""


@dataclass(frozen=True, slots=True)
class Address:
    """The address of a listener."""

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Figures:
    """The measured values."""

    round_trip_ms: float
    """The median round trip of small messages."""
    mib_s: float


def read_address(text: str) -> Address:
    """Parse `HOST:PORT` or `[v6]:PORT`. Raises `NetworkCheckError`."""
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 0xFFFF:
        raise NetworkCheckError(f"{text!r} is not an address: write HOST:PORT, as in node-07:7411")
    return Address(host.removeprefix("[").removesuffix("]"), int(port))


def read_token(text: str) -> bytes:
    """The secret of one measurement. Raises `NetworkCheckError`, without the secret."""
    token = text.strip().encode()
    if len(token) < _TOKEN_LEAST:
        raise NetworkCheckError(
            f"the token has {len(token)} characters, and needs {_TOKEN_LEAST}: openssl rand -hex 32"
        )
    return token


async def listen(
    at: Address, token: bytes, *, within_s: float, ready: Callable[[Address], None]
) -> Address:
    """Let one peer measure, and return its address. Others are refused, and wait for nothing.

    `ready` is called with the address once it is open: with port 0 the system chooses one.
    """
    try:
        async with asyncio.timeout(within_s):
            with await _open(at) as door:
                host, port = door.getsockname()[:2]
                ready(Address(host, port))
                return await _serve_one(door, token)
    except TimeoutError as error:
        raise NetworkCheckError(
            f"no peer with the token came to {at} within {within_s:g} s"
        ) from error


async def measure(to: Address, token: bytes, *, within_s: float) -> Figures:
    """Measure the way to a listener. Raises `NetworkCheckError`."""
    try:
        async with asyncio.timeout(within_s):
            with await _reach(to) as link:
                await _prove(link, token, as_peer=True)
                return Figures(await _round_trip_ms(link), await _mib_s(link))
    except TimeoutError as error:
        raise PeerSilentError(f"{to} did not answer within {within_s:g} s") from error
    except ConnectionRefusedError as error:
        raise NetworkCheckError(f"{to}: no process listens there") from error
    except (OSError, EOFError) as error:
        why = (
            getattr(error, "strerror", None)
            or "it closed the connection; do both nodes have the same token?"
        )
        raise NetworkCheckError(f"{to}: {why}") from error


def judge(to: str, figures: Figures, settings: ChecksSettings) -> CheckResult:
    """Judge the figures; without limits they are only reported."""
    measured = f"{figures.round_trip_ms:.3f} ms, {figures.mib_s:.0f} MiB/s"
    past = []
    if figures.mib_s < settings.network_least_mib_s:
        past.append(f"least {settings.network_least_mib_s:g} MiB/s")
    if 0 < settings.network_most_ms < figures.round_trip_ms:
        past.append(f"most {settings.network_most_ms:g} ms")
    if not past:
        return CheckResult(check=NAME, state="ok", subject=to, reason=measured)
    reason = f"{measured} ({', '.join(past)}); measure both nodes with others to tell which it is"
    return CheckResult(check=NAME, state="failed", subject=to, reason=reason, failure_class="watch")


async def _open(at: Address) -> socket.socket:
    try:
        addresses = await asyncio.get_running_loop().getaddrinfo(
            at.host, at.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except OSError as error:
        raise PortTakenError(f"{at} cannot be listened on: {error.strerror}") from error
    family, kind, protocol, _, place = addresses[0]
    door = socket.socket(family, kind, protocol)
    try:
        door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        door.bind(place)
        door.listen(_AT_ONCE)
    except OSError as error:
        door.close()
        raise PortTakenError(f"{at} cannot be listened on: {error.strerror}") from error
    door.settimeout(0)
    return door


async def _reach(to: Address) -> socket.socket:
    loop = asyncio.get_running_loop()
    addresses = await loop.getaddrinfo(to.host, to.port, type=socket.SOCK_STREAM)
    family, kind, protocol, _, place = addresses[0]
    link = socket.socket(family, kind, protocol)
    try:
        link.settimeout(0)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await loop.sock_connect(link, place)
    except BaseException:
        link.close()
        raise
    return link


async def _serve_one(door: socket.socket, token: bytes) -> Address:
    served: asyncio.Future[Address] = asyncio.get_running_loop().create_future()
    async with asyncio.TaskGroup() as tasks:
        guests: set[asyncio.Task[None]] = set()
        welcoming = tasks.create_task(_welcome(door, token, tasks, guests, served))
        await asyncio.wait([served])
        for task in (welcoming, *guests):
            task.cancel()
    return served.result()


async def _welcome(
    door: socket.socket,
    token: bytes,
    tasks: asyncio.TaskGroup,
    guests: "set[asyncio.Task[None]]",
    served: "asyncio.Future[Address]",
) -> None:
    """Accept callers, a few at once, each for moments unless it has the token."""
    free = asyncio.Semaphore(_AT_ONCE)
    while True:
        await free.acquire()
        try:
            link, place = await asyncio.get_running_loop().sock_accept(door)
        except OSError as error:
            why = f"connections cannot be accepted: {error.strerror}"
            served.set_exception(NetworkCheckError(why))
            return
        link.settimeout(0)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        guest = tasks.create_task(_attend(link, token, Address(*place[:2]), served))
        guests.add(guest)
        guest.add_done_callback(guests.discard)
        guest.add_done_callback(lambda _: free.release())


async def _attend(
    link: socket.socket, token: bytes, place: Address, served: "asyncio.Future[Address]"
) -> None:
    with link, contextlib.suppress(OSError, EOFError, TimeoutError):  # it may try again
        async with asyncio.timeout(_PROVES_WITHIN_S):
            await _prove(link, token, as_peer=False)
        await _echo(link)
        await _swallow(link)
        if not served.done():
            served.set_result(place)


async def _prove(link: socket.socket, token: bytes, *, as_peer: bool) -> None:
    """Exchange fresh numbers, then proofs. Raises EOFError if the other has no token."""
    loop, own = asyncio.get_running_loop(), os.urandom(_NONCE)
    await loop.sock_sendall(link, own)
    theirs = await _read(link, _NONCE)
    await loop.sock_sendall(link, _proof(token, own, theirs, as_peer=as_peer))
    proof = await _read(link, hashlib.sha256().digest_size)
    if not hmac.compare_digest(proof, _proof(token, theirs, own, as_peer=not as_peer)):
        raise EOFError


def _proof(token: bytes, own: bytes, theirs: bytes, *, as_peer: bool) -> bytes:
    role = b"peer" if as_peer else b"listener"
    return hmac.digest(token, b"everstep-network-1" + role + own + theirs, "sha256")


async def _round_trip_ms(link: socket.socket) -> float:
    loop, took_s = asyncio.get_running_loop(), []
    for _ in range(_ROUND_TRIPS):
        began = time.perf_counter()
        await loop.sock_sendall(link, bytes(_PING))
        await _read(link, _PING)
        took_s.append(time.perf_counter() - began)
    return 1e3 * statistics.median(took_s)


async def _echo(link: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    for _ in range(_ROUND_TRIPS):
        await loop.sock_sendall(link, await _read(link, _PING))


async def _mib_s(link: socket.socket) -> float:
    """Send for a second or 64 MiB; at the end the listener reports how much has arrived."""
    loop, chunk, sent = asyncio.get_running_loop(), bytes(_CHUNK), 0
    began = time.perf_counter()
    while sent < BYTES_MOST and time.perf_counter() - began < SENDS_FOR_S:
        await loop.sock_sendall(link, chunk)
        sent += len(chunk)
    link.shutdown(socket.SHUT_WR)
    (arrived,) = _COUNT.unpack(await _read(link, _COUNT.size))
    return float(min(arrived, sent) / (time.perf_counter() - began) / (1 << 20))


async def _swallow(link: socket.socket) -> None:
    loop, buffer, count = asyncio.get_running_loop(), bytearray(_CHUNK), 0
    while count <= BYTES_MOST and (more := await loop.sock_recv_into(link, buffer)):
        count += more
    await loop.sock_sendall(link, _COUNT.pack(count))


async def _read(link: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = await asyncio.get_running_loop().sock_recv(link, size - len(data))
        if not more:
            raise EOFError
        data += more
    return data
