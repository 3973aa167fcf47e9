"""All ranks agree on each step: nothing that a single rank has seen ever acts by itself."""

import os
import socket
import struct
from array import array
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from trainer_sdk.bootstrap.group_timeout import group_timeout_ns
from trainer_sdk.bootstrap.torch_exit import wait_at_exit
from trainer_sdk.checkpoint.rank_group import RankGroup
from trainer_sdk.environment import environ
from trainer_sdk.numerics.judgement import StepResult
from trainer_sdk.numerics.rank_links import ByteLink, RankAlarm, linked


class RankPlace(msgspec.Struct, frozen=True):
    """Where a rank computes, and the ranks with the same part of the model."""

    node: str
    device: str
    peers: tuple[int, ...]


class LocalView(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank has seen of a step, for all others."""

    case: str
    """The id of the case, if this is rank 0."""
    step: int
    """The step that is looked at: an earlier one if its values have arrived late."""
    signal: str = ""
    """Empty if the rank's result is as expected."""
    value: int = 0
    low: int | None = None
    high: int | None = None
    moved_at: int = 0
    calls: int = 0
    """How many calls can be made again; 0 if none can."""
    usual_loss: int = 0
    """The bits of how large losses are."""
    is_exact: bool = False
    """Whether algorithms are deterministic, so that each bit counts."""


class SentResults(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank has computed in a step, by itself and for another rank."""

    first: "SentResult"
    again: tuple["SentResult", ...]
    deviation: int
    """The bits of how far the reduced gradients of the first run are from those of the second."""
    elsewhere: "SentResult | None"
    elsewhere_of: int
    """The rank whose step that was."""
    inputs: str = ""
    """As of `RankResults`."""


class SentResult(msgspec.Struct, frozen=True):
    """A result of a step, bit for bit: JSON has no NaN."""

    loss: int
    norm: int | None
    hashes: tuple[int, ...]
    passes: tuple[int, ...] = ()

    @classmethod
    def of(cls, result: StepResult) -> "SentResult":
        """The same, ready to send."""
        norm = None if result.norm is None else bits(result.norm)
        return cls(bits(result.loss), norm, result.hashes, result.passes)

    def read(self) -> StepResult:
        """The result."""
        norm = None if self.norm is None else number(self.norm)
        return StepResult(number(self.loss), norm, self.hashes, self.passes)


class RankAgreement:
    """A gloo group of all ranks, made once; all ranks make each call of it together.

    A rank that is gone ends the calls of the others as it ends any collective.
    """

    def __init__(self) -> None:
        self._group: Any = None
        if dist.is_available() and dist.is_initialized():
            if dist.get_world_size() > 1:
                self._group = _host_group()
        elif int(environ.get("WORLD_SIZE") or 1) > 1:
            raise RuntimeError(
                f"WORLD_SIZE is {environ['WORLD_SIZE']}, and this rank has no process group to "
                "agree with the others: call torch.distributed.init_process_group before "
                "run.numerics(…)"
            )
        self.ranks = RankGroup(self._group)
        self._links: list[ByteLink] = []
        self._hops: Sequence[ByteLink | _Hop] = []
        self._backend: Any = None if self._group is None else _backend_of(self._group)

    def joined(self, own: int) -> int:
        """The bits that are set on any rank.

        Each rank passes on what it has heard, twice as far each time: with N ranks it waits for
        log2(N) messages, where gloo's own collectives wait for 2 N.
        """
        if self._backend is None:
            return own
        if not self._hops:
            self._connect()
        for hop in self._hops:
            own |= hop.passed_on(own)
        return own

    def alarm(self) -> RankAlarm | None:
        """What calls all ranks together; None for a rank alone, or if a rank cannot be reached.

        With it they do not call `joined` any more.
        """
        if self._backend is not None and not self._hops:
            self._connect()
        return RankAlarm(self._links, _limit_s()) if self._links else None

    def _connect(self) -> None:
        far = [1 << hop for hop in range((self.ranks.size - 1).bit_length())]
        self._links = linked(self.ranks, far, _limit_s())
        self._hops = self._links or [_Hop(self._backend, self.ranks, each) for each in far]

    def leave(self) -> None:
        """Take no part in later calls; the others get an error once nothing holds the group."""
        self._hops = self._links = []
        if self._group is not None:
            dist.destroy_process_group(self._group)

    def swap(self, octets: bytes, to: int, source: int) -> bytes | None:
        """Send these octets to a rank, and return those of another one; None if any rank has none.

        All ranks call it, each of them with its own two partners.
        """
        lengths = self.ranks.gather(len(octets), int)
        if not all(lengths):
            return None
        received = torch.empty(lengths[source], dtype=torch.uint8)
        sent = torch.frombuffer(bytearray(octets), dtype=torch.uint8)
        works = [
            self._group.recv([received], source, 0),
            self._group.send([sent], to, 0),
        ]
        for work in works:
            work.wait()
        return received.numpy().tobytes()


class _Word:
    """An integer, and the same as a tensor of gloo's: nothing is allocated in a step."""

    def __init__(self) -> None:
        self.value = array("q", [0])
        self.tensors = [torch.frombuffer(self.value, dtype=torch.int64)]


class _Hop:
    """A link by gloo's messages, for ranks that no connection of ours reaches."""

    def __init__(self, backend: Any, ranks: RankGroup, far: int) -> None:
        self._backend = backend
        self._to, self._source = (ranks.rank + far) % ranks.size, (ranks.rank - far) % ranks.size
        self._tag = far  # `swap` has 0
        self._own, self._other = _Word(), _Word()
        self._sent: Any = None
        self._coming = self._receive()

    def passed_on(self, own: int) -> int:
        """Send the bits; return those of the other rank."""
        if self._sent is not None:
            self._sent.wait()
        self._own.value[0] = own
        self._sent = self._backend.send(self._own.tensors, self._to, self._tag)
        self._coming.wait()
        other = self._other.value[0]
        self._coming = self._receive()  # for the next time: nobody waits until it is asked for
        return other

    def _receive(self) -> Any:
        return self._backend.recv(self._other.tensors, self._source, self._tag)


def _host_group() -> Any:
    """Make a gloo group of all ranks, with the time limit of the training's own group."""
    wait_at_exit()
    return dist.new_group(backend="gloo", timeout=timedelta(seconds=_limit_s()))


def _limit_s() -> float:
    limit_ns = group_timeout_ns()
    return default_pg_timeout.total_seconds() if limit_ns is None else limit_ns / 1e9


def _backend_of(group: Any) -> Any:
    """Gloo itself: the group passes each call through torch's dispatcher, which takes longer."""
    return group._get_backend(torch.device("cpu"))  # noqa: SLF001 - there is no other way


def own_place(peers: Sequence[int]) -> RankPlace:
    """Where this rank computes."""
    device = ""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        uuid = getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "uuid", "")
        device = f"GPU-{uuid}" if uuid else ""
    node = environ.get("EVERSTEP_NODE", "")
    if not node:
        number = environ.get("GROUP_RANK") or environ.get("SLURM_NODEID")
        node = f"{socket.gethostname()}/{number}" if number else socket.gethostname()
    return RankPlace(node, device, tuple(peers))


def new_case() -> str:
    """The id of an unexpected result: 16 hex digits."""
    return os.urandom(8).hex()


def bits(value: float) -> int:
    """The bits of a number."""
    (word,) = struct.unpack("q", struct.pack("d", value))
    return int(word)


def number(word: int) -> float:
    """The number of these bits."""
    (value,) = struct.unpack("d", struct.pack("q", word))
    return float(value)
