"""Collects evidence that vanishes with the ranks: all kinds in parallel, within a time limit."""

import asyncio
import itertools
import logging
import os
import stat
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from everstep.clock import Clock
from everstep.errors import EverstepError
from everstep.evidence import archive
from everstep.evidence.archive import ArchiveMember, unanswered
from everstep_services.agent.ranks.protocol import RankSeen

log = logging.getLogger(__name__)

EXITED = "the rank had exited"
NOT_STARTED = "the rank had not been started"

_NAMED_MOST = 8
_REASON_MOST = 400
_AT_ONCE = 16
"""The number of ranks asked at a time."""
_MARGIN = 0.1
"""The share of the time that is kept for handing over the results."""
_HANDED_OVER_S = 0.2
"""How long after its time a collector may hand over what it has: on a busy processor the time of
each rank ends at the same moment as that of all."""


@dataclass(frozen=True, slots=True)
class Scene:
    """The ranks of this node's present round, and how they may be looked at."""

    ranks: Sequence[RankSeen]
    within_s: float
    """Whatever is not there by then is missing."""
    began_s: float = 0.0
    """When the ranks of the round were started."""
    environs: Mapping[int, Mapping[str, str]] = field(default_factory=dict, repr=False)
    """The environment of each rank."""
    may_pause: bool = False
    """The ranks will be stopped: they may stand still while their stacks are read."""
    python: str = ""
    """The interpreter of the ranks; empty if it is not known."""

    @property
    def each_within_s(self) -> float:
        """How long one rank may take, so that the results of the others are not lost with it."""
        return self.within_s * (1 - _MARGIN)


@dataclass(frozen=True, slots=True)
class EvidenceFound:
    """The result of a collector."""

    summary: str
    content: bytes = b""
    """One document about all ranks or the node …"""
    members: tuple[ArchiveMember, ...] = ()
    """… or a piece of each rank; the pieces become an archive."""
    missing: Mapping[int, str] = field(default_factory=dict)
    """The ranks without a result, each with the reason."""


@dataclass(frozen=True, slots=True)
class Piece:
    """The evidence that is stored: one collector's result, or the reason for its absence."""

    evidence: str
    """The name of the kind, as in `evidence_collected`."""
    content: EvidenceFound | None = None
    missing: str = ""
    took_s: float = 0.0
    rank: int | None = None
    """Its rank; None if it belongs to the node, or has a part of each rank."""

    @property
    def ranks(self) -> frozenset[int]:
        """The ranks in its archive."""
        members = () if self.content is None else self.content.members
        return frozenset(it.rank for it in members if it.rank is not None)

    def packed(self) -> bytes:
        """The bytes to store; empty if there is only a reason. Slow."""
        evidence = self.content
        if evidence is None or not evidence.members:
            return b"" if evidence is None else evidence.content
        return archive.pack(evidence.members, evidence.missing)


Collector = Callable[[Scene, Clock], Awaitable[EvidenceFound | None]]
"""A collector changes nothing in the ranks; it returns None where its kind does not apply."""


class NothingFoundError(EverstepError):
    """There is no such evidence here, for this reason."""


async def collect(collectors: Mapping[str, Collector], scene: Scene, clock: Clock) -> list[Piece]:
    """Run all collectors in parallel, and return their pieces; late ones are missing."""
    pieces = await asyncio.gather(
        *(
            _piece(name, collector(scene, clock), scene.within_s, clock)
            for name, collector in collectors.items()
        )
    )
    return [piece for piece in pieces if piece is not None]


async def _piece(
    evidence: str, collecting: Awaitable[EvidenceFound | None], within_s: float, clock: Clock
) -> Piece | None:
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(_result(evidence, collecting, clock))
        for limit_s in (within_s, _HANDED_OVER_S):
            await asyncio.wait({task}, timeout=limit_s)
        task.cancel()
    if task.cancelled():
        return Piece(evidence, missing=f"not there after {within_s:g} s", took_s=within_s)
    return task.result()


async def _result(
    evidence: str, collecting: Awaitable[EvidenceFound | None], clock: Clock
) -> Piece | None:
    began = clock.now()
    try:
        piece = await collecting
    except NothingFoundError as error:
        return Piece(evidence, missing=short(str(error)), took_s=clock.now() - began)
    except Exception as error:  # noqa: BLE001  whatever a collector does, the ranks are stopped
        log.warning("collector_failed evidence=%s error=%r", evidence, error)
        why = short(f"{type(error).__name__}: {error}")
        return Piece(evidence, missing=why, took_s=clock.now() - began)
    if piece is None:
        return None
    if piece.missing and not piece.members and not piece.content:
        return Piece(evidence, missing=reasons(piece.missing), took_s=clock.now() - began)
    return Piece(evidence, piece, took_s=clock.now() - began)


@dataclass(frozen=True, slots=True)
class RankPiece:
    """The result for one rank."""

    summary: str
    member: ArchiveMember


async def from_each(
    scene: Scene,
    fetch: Callable[[RankSeen], Awaitable[RankPiece]],
    *,
    gone: Callable[[RankSeen], Awaitable[RankPiece | None]] | None = None,
) -> EvidenceFound:
    """A piece of each rank that gives one in time; `gone` reads what ended ranks have left.

    `fetch` raises `NothingFoundError` with the reason if there is none.
    """
    turns = asyncio.Semaphore(_AT_ONCE)

    async def answer_of(rank: RankSeen) -> RankPiece | str:
        try:
            async with asyncio.timeout(scene.each_within_s), turns:
                if rank.pid:
                    return await fetch(rank)
                left = None if gone is None else await gone(rank)
                return left or (EXITED if rank.is_gone else NOT_STARTED)
        except TimeoutError:
            return unanswered(scene.each_within_s)
        except NothingFoundError as error:
            return short(str(error))
        except Exception as error:  # noqa: BLE001  one rank takes nothing from the others
            return short(f"{type(error).__name__}: {error}")

    answers = await asyncio.gather(*(answer_of(rank) for rank in scene.ranks))
    contents, missing = {}, {}
    for rank, answer in zip(scene.ranks, answers, strict=True):
        if isinstance(answer, RankPiece):
            contents[rank.rank] = answer
        else:
            missing[rank.rank] = answer
    lines = [f"rank {rank}: {piece.summary}" for rank, piece in contents.items()]
    lines += [f"none of {ranks}" for ranks in ([reasons(missing)] if missing else [])]
    members = tuple(piece.member for piece in contents.values())
    return EvidenceFound(brief(lines), members=members, missing=missing)


def left_file(path: str | Path, most_bytes: int, since_s: float = 0.0) -> bytes | None:
    """What a rank has left in a file; older and empty files, links and pipes are left alone."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        about = os.fstat(descriptor)
        is_left = stat.S_ISREG(about.st_mode) and about.st_mtime >= since_s
        if not is_left or not 0 < about.st_size <= most_bytes:
            return None
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            return file.read(most_bytes)
    except OSError:
        return None
    finally:
        os.close(descriptor)


def reasons(missing: Mapping[int, str]) -> str:
    """Why ranks have no result, each reason once: `ranks 1, 3 (the rank had exited)`."""
    by_reason: dict[str, list[int]] = {}
    for rank, reason in sorted(missing.items()):
        by_reason.setdefault(reason, []).append(rank)
    return brief(f"{_ranks(ranks)} ({reason})" for reason, ranks in by_reason.items())


def brief(texts: Iterable[str]) -> str:
    """The first few of these, and the number of the others."""
    parts: Iterator[str] = iter(texts)
    named = list(itertools.islice(parts, _NAMED_MOST))
    more = sum(1 for _ in parts)
    return "; ".join(named) + (f"; and {more} more" if more else "")


def short(reason: str) -> str:
    """The text on one line, of bounded length."""
    return " ".join(reason.split())[:_REASON_MOST]


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    more = f" and {len(ranks) - _NAMED_MOST} more" if len(ranks) > _NAMED_MOST else ""
    return f"ranks {', '.join(map(str, ranks[:_NAMED_MOST]))}{more}"
