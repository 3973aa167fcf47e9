"""The messages between agents about states, before and after the bytes themselves.

Both ends first prove that they have the key of the job without sending it: an HMAC over fresh
numbers of both, and over both certificates with TLS. Then the caller sends one question after the
other. A message is preceded by its length, which is bounded; a message that does not decode ends
the connection.
"""

import hashlib
import hmac
import os
import socket
import struct
import time
from typing import Any, Protocol, TypeVar

import msgspec

from everstep.errors import EverstepError
from everstep_services.agent.replicas.transfer.tls import Tls, fingerprint
from trainer_sdk.checkpoint.image_folder import RestoredState

_NONCE = 32
_LENGTH = struct.Struct("!I")
_TIME = struct.Struct("ll")
_LONGEST = 16 << 20
_LABEL = b"everstep-replicas-1"
_PIECE = 512 << 10


class ReplicaError(EverstepError):
    """A copy was not sent, was refused, or differs from its announcement."""

    def __init__(self, text: str, cause: str = "") -> None:
        super().__init__(text)
        self.cause = cause


class ReplicaMessage(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """The base of all messages."""


class Hello(ReplicaMessage, frozen=True, kw_only=True, tag="hello"):
    """Who calls, and in which round."""

    job: str
    node: str
    round: int


class Copy(msgspec.Struct, frozen=True, kw_only=True):
    """A file with the state of one rank, or a part of it."""

    slot: int
    rank: int
    ranks: int
    """The number of ranks of the slot."""
    step: int
    size_bytes: int
    hash: str
    """The hash of these bytes, in hex."""
    index: bytes
    """The `ImageIndex` of the whole state, as the rank wrote it."""
    part: int = 0
    parts: int = 1
    parts_needed: int = 1
    """The number of parts that restore the state; 1 for a whole copy."""


class PutCopy(ReplicaMessage, frozen=True, kw_only=True, tag="put"):
    """Hold this copy; the bytes follow the answer."""

    copy: Copy
    restored: RestoredState | None = None
    """The state from which the training has gone on."""


class AskHolding(ReplicaMessage, frozen=True, kw_only=True, tag="ask"):
    """Ask for the copies of these ranks that the other agent has."""

    ranks: tuple[int, ...]


class GetCopy(ReplicaMessage, frozen=True, kw_only=True, tag="get"):
    """Send this copy, from an offset on."""

    copy: Copy
    offset: int


class SendFrom(ReplicaMessage, frozen=True, kw_only=True, tag="go"):
    """Send the copy from an offset on: the bytes before are here already."""

    offset: int
    is_whole: bool = False
    """All of it is here: send nothing."""


class StoredAnswer(ReplicaMessage, frozen=True, kw_only=True, tag="stored"):
    """The copy is here, whole and verified."""


class HoldingAnswer(ReplicaMessage, frozen=True, kw_only=True, tag="holding"):
    """The copies that are here."""

    copies: tuple[Copy, ...]


class BytesFollow(ReplicaMessage, frozen=True, kw_only=True, tag="coming"):
    """The bytes follow."""

    size_bytes: int


class RefusalAnswer(ReplicaMessage, frozen=True, kw_only=True, tag="no"):
    """The question is refused."""

    reason: str
    cause: str = ""
    """`quota`, `torn`, `round`, `unknown` …"""


Asked = Hello | PutCopy | AskHolding | GetCopy
Answered = SendFrom | StoredAnswer | HoldingAnswer | BytesFollow | RefusalAnswer
S = TypeVar("S", bound=ReplicaMessage)
_ENCODER = msgspec.msgpack.Encoder()
_ASKED = msgspec.msgpack.Decoder(Asked)
_ANSWERED = msgspec.msgpack.Decoder(Answered)


class ByteSink(Protocol):
    """Where received bytes go."""

    def room(self, most: int) -> memoryview:
        """A buffer for the next bytes; empty at the end."""

    def took(self, piece: memoryview) -> None:
        """The buffer is filled, and still in the processor's cache."""


class ReplicaLink:
    """A connection used by one thread, whose every wait is bounded.

    Another thread may `abort` it.
    """

    def __init__(self, wire: socket.socket, *, silent_s: float) -> None:
        self._wire = wire
        self._silent_s = silent_s
        self._until = float("inf")
        self._is_over = False
        self._flags: int = socket.MSG_WAITALL
        self._certificates = b""
        wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # Timeouts by the kernel: Python's own take two calls instead of one, and many for a piece.
        wire.settimeout(None)
        limit = _TIME.pack(int(silent_s), int(silent_s % 1 * 1e6))
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def connect(self, place: Any, within_s: float) -> None:
        """Connect to the listener at this address."""
        self._go_on()
        self._wire.settimeout(within_s)
        self._wire.connect(place)
        self._wire.settimeout(None)

    def within(self, seconds: float) -> None:
        """Bound everything from now on by this many seconds in all."""
        self._until = time.monotonic() + seconds

    def abort(self) -> None:
        """End every wait on it."""
        self._is_over = True
        try:
            # not SSLSocket's own method, after which later data would be sent without encryption
            socket.socket.shutdown(self._wire, socket.SHUT_RDWR)
        except OSError:
            return  # it is closed already, or was never open

    def close(self) -> None:
        """Close the connection."""
        self._wire.close()

    def secure(self, tls: Tls, *, is_caller: bool) -> None:
        """Use TLS from now on. Raises `ssl.SSLError` when both ends have no TLS in common."""
        wire, ours = tls.wrapped(self._wire, is_caller=is_caller)
        self._wire, self._flags = wire, 0
        self._go_on()
        wire.settimeout(max(0.01, min(self._silent_s, self._until - time.monotonic())))
        wire.do_handshake()
        wire.settimeout(self._silent_s)  # OpenSSL ignores the kernel's timeout
        theirs = wire.getpeercert(binary_form=True) or b""
        self._certificates = fingerprint(*((ours, theirs) if is_caller else (theirs, ours)))

    def prove(self, key: bytes, *, is_caller: bool) -> None:
        """Exchange fresh numbers, then proofs. Raises EOFError when the other has no key."""
        own = os.urandom(_NONCE)
        self.send(own)
        theirs = bytes(self._read(_NONCE))
        both = self._certificates
        self.send(_proof(key, own + theirs + both, is_caller=is_caller))
        proof = self._read(hashlib.sha256().digest_size)
        if not hmac.compare_digest(
            proof, _proof(key, theirs + own + both, is_caller=not is_caller)
        ):
            raise EOFError

    def say(self, message: ReplicaMessage) -> None:
        """Send a message."""
        octets = _ENCODER.encode(message)
        if len(octets) > _LONGEST:
            raise ReplicaError(f"a message of {len(octets)} bytes is too long, at most {_LONGEST}")
        self.send(_LENGTH.pack(len(octets)) + octets)

    def hear_question(self) -> Asked:
        """The next question; EOFError when the caller is done."""
        asked: Asked = self._hear(_ASKED)
        return asked

    def hear_answer(self, of: type[S]) -> S:
        """The answer; raises `ReplicaError` for a refusal, or another type."""
        answer = self._hear(_ANSWERED)
        if isinstance(answer, RefusalAnswer):
            raise ReplicaError(answer.reason, answer.cause)
        if not isinstance(answer, of):
            raise ReplicaError(f"it answered {type(answer).__name__}, not {of.__name__}")
        return answer

    def send(self, octets: memoryview | bytes) -> None:
        """Send all of it. Not by sendfile, which takes half as long again for files in memory."""
        at, most = 0, len(octets) if self._flags else _PIECE  # TLS sends each piece at once
        while at < len(octets):
            self._check()
            at += self._wire.send(octets[at : at + most])

    def receive(self, into: ByteSink) -> None:
        """Receive the announced bytes, until the sink has no more room."""
        while piece := into.room(_PIECE):
            self._fill(piece)
            into.took(piece)

    def _fill(self, piece: memoryview) -> None:
        at = 0
        while at < len(piece):
            self._check()
            count = self._wire.recv_into(piece[at:], len(piece) - at, self._flags)
            if not count:
                raise EOFError
            at += count

    def _hear(self, decoder: "msgspec.msgpack.Decoder[Any]") -> Any:
        self._check()
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        if length > _LONGEST:
            raise ReplicaError(f"a message of {length} bytes was announced, at most {_LONGEST}")
        try:
            return decoder.decode(self._read(length))
        except msgspec.MsgspecError as error:
            raise ReplicaError(f"it sent something that is not a message: {error}") from error

    def _read(self, size: int) -> bytearray:
        octets = bytearray(size)
        self._fill(memoryview(octets))
        return octets

    def _go_on(self) -> None:
        if self._is_over:
            raise EOFError

    def _check(self) -> None:
        if time.monotonic() > self._until:
            raise TimeoutError


def _proof(key: bytes, over: bytes, *, is_caller: bool) -> bytes:
    role = b"caller" if is_caller else b"holder"
    return hmac.digest(key, _LABEL + role + over, "sha256")
