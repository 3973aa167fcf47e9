"""Leases: at most one holder at a time, by the server's clock; the token fences late holders."""

import asyncio
import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from everstep import subjects
from everstep.bus.errors import LeaseLostError
from everstep.bus.jetstream import JetStream, Stored
from everstep.bus.ports import Held

BUCKET = "LEASES"
_STREAM = f"KV_{BUCKET}"
_PROC = Path("/proc")


class NatsLeases:
    """See `everstep.bus.ports.Leases`.

    A lease is a message with a time to live, written without the key-value client: an update
    without a TTL would make the lease immortal, and an expired lease leaves a marker that
    `create` mistakes for a holder (ADR-0006).

    A lease names its holder and the identity of the holder's process. A replica that finds it
    held by a process that has certainly ended takes it over at once, as if it had expired.
    """

    def __init__(self, jetstream: JetStream) -> None:
        self._jetstream = jetstream

    async def acquire(self, name: str, holder: str, ttl_s: int) -> Held | None:
        if ttl_s < 1:
            raise ValueError(f"a lease lives for whole seconds, at least 1, not {ttl_s}")
        subject = subjects.document(BUCKET, name)
        data = await asyncio.to_thread(_signed, holder)
        token = await self._write(subject, data, 0, ttl_s)
        if token is None:
            last = await self._jetstream.last(_STREAM, subject)
            if last is not None and not await asyncio.to_thread(_is_free, last):
                return None
            token = await self._write(subject, data, 0 if last is None else last.sequence, ttl_s)
        if token is None:
            return None  # another process was quicker
        return Held(name, holder, ttl_s, token)

    async def renew(self, held: Held) -> Held:
        # This fails for an expired lease: its last message is a marker, or there is none.
        subject = subjects.document(BUCKET, held.name)
        data = await asyncio.to_thread(_signed, held.holder)
        token = await self._write(subject, data, held.token, held.ttl_s)
        if token is None:
            raise LeaseLostError(held.name, held.token)
        return Held(held.name, held.holder, held.ttl_s, token)

    async def release(self, held: Held) -> None:
        """Release the lease at once; do nothing when it is no longer ours."""
        subject = subjects.document(BUCKET, held.name)
        await self._jetstream.publish_if(subject, b"", held.token, {"KV-Operation": "DEL"})

    async def _write(self, subject: str, data: bytes, expected: int, ttl_s: int) -> int | None:
        return await self._jetstream.publish_if(subject, data, expected, {"Nats-TTL": f"{ttl_s}s"})


def _signed(holder: str) -> bytes:
    return f"{holder} {own_identity()}".encode()


def _is_free(last: Stored) -> bool:
    """Whether the lease was released or has expired, or its holder is dead."""
    identity = last.data.decode(errors="replace").rpartition(" ")[2]
    return _is_gone(last.headers) or is_dead(identity)


def _is_gone(headers: Mapping[str, str]) -> bool:
    return "Nats-Marker-Reason" in headers or headers.get("KV-Operation") in {"DEL", "PURGE"}


# Whether a holder is certainly dead. Only a process of the same boot and the same PID namespace
# can know that of another; for all others the holder counts as alive until its lease expires.


def own_identity() -> str:
    """Return an identity that no other process ever has: boot, namespace, PID and start time."""
    return _identity(os.getpid())


@cache
def _identity(pid: int) -> str:
    return f"{_place()}/{pid}/{_started(pid)}"


def is_dead(identity: str) -> bool:
    """Whether that process has certainly ended; False when that cannot be known from here."""
    place, _, process = identity.rpartition("/")
    place, _, pid = place.rpartition("/")
    if not place or place != _place() or not pid.isdecimal() or not process.isdecimal():
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except (PermissionError, OverflowError):
        return False
    started = _started(int(pid))
    return started.isdecimal() and started != process


def _place() -> str:
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{(_PROC / 'self/ns/pid').readlink()}"
    except OSError:
        return ""


def _started(pid: int) -> str:
    """Return the start time in ticks since boot; empty when it cannot be read."""
    try:
        return (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""
