"""Claims from a node's GPUs, control groups, processes and pages before its ranks were ended."""

import asyncio
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from everstep.messages import Case, EvidencePiece, RankEnd
from everstep.units import size
from everstep_services.agent.probes.gpu.nvml import GpuGoneError
from everstep_services.agent.probes.gpu.snapshot import GpuSnapshot
from everstep_services.agent.probes.gpu.verdicts import verdicts
from everstep_services.agent.probes.settings import ChecksSettings
from everstep_services.attribution.analyzers import refused_memory
from everstep_services.attribution.analyzers.ends import left_early, ranks_told
from everstep_services.attribution.analyzers.rank_ends import (
    first_ends,
    is_consequence,
    worker_ended_by,
)
from everstep_services.attribution.analyzers.stalls import stopped_process
from everstep_services.attribution.domain.claims import Claim
from everstep_services.attribution.incident import Incident

_FULL = 0.95
"""Memory in use of a group, as a part of its limit, from which on it is short of memory."""
_PRESSURE = 10.0
"""Per cent of the last ten seconds in which processes waited for memory: a shortage, too."""
_PLENTY = 0.1
"""The part of a host's memory that must be free where the text tells no size."""
_LOST_BY_ALL = 0.55
_NOT_SHORT = 0.2
_ABSURD = 0.9
_OF_CODE = 0.75
_OF_UNKNOWN_CODE = 0.6
_GROUPS_MOST = 4
_STOPPED = re.compile(r"^State:\s*T\b", re.MULTILINE)


class _Gpus(msgspec.Struct):
    gpus: tuple[GpuSnapshot, ...] = ()


class _Space(msgspec.Struct, frozen=True):
    size_bytes: int = 0
    free_bytes: int = 0


class _Groups(msgspec.Struct):
    groups: dict[str, dict[str, str]] = {}
    host: dict[str, str] = {}
    shared_memory: _Space | None = None


class _Page(msgspec.Struct, frozen=True):
    phase: str = ""
    progress_s: float = 0.0
    exit_code: int | None = None


class _RankPage(msgspec.Struct, frozen=True):
    page: _Page = _Page()


class _Pages(msgspec.Struct):
    ranks: dict[int, _RankPage] = {}


class _Processes(msgspec.Struct):
    ranks: dict[int, dict[str, str]] = {}


for _kind in (_Gpus, _Groups, _Pages, _Processes):
    msgspec.json.Decoder(_kind)  # at import: in two threads at once, the first use crashes


async def analyze(incident: Incident) -> list[Claim]:
    """Return claims from the state of the nodes."""
    claims: list[Claim] = []
    async for piece, _, data in incident.contents(*_READERS):
        try:
            claims += await asyncio.to_thread(_read, incident.case, piece, data)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            incident.missing.append(f"{piece.evidence} of {piece.node} cannot be read: {error}")
    return claims


def _read(case: Case, piece: EvidencePiece, data: bytes) -> list[Claim]:
    return list(_READERS[piece.evidence](case, piece, data))


# --- GPUs ---


def _of_gpus(case: Case, piece: EvidencePiece, data: bytes) -> Iterator[Claim]:
    del case
    readings = msgspec.convert(msgspec.json.decode(data), _Gpus, dec_hook=_gone).gpus
    for reading in readings:
        for result in verdicts(reading, {}, ChecksSettings()):
            if result.state in {"failed", "warning"}:
                # Slow or worn hardware does not end a training by itself; failed hardware does.
                yield Claim(
                    cause="gpu", kind="gpu_state", says=f"{piece.node}: {result.reason}",
                    strength=0.85 if result.state == "failed" else 0.3,
                    nodes=(piece.node,), fact=piece.fact, blob=piece.blob,
                )  # fmt: skip


def _gone(kind: type, value: Any) -> Any:
    """A claim about a GPU that does not answer: the file has only the reason."""
    if kind is GpuGoneError and isinstance(value, str):
        return GpuGoneError(value, "reboot")
    raise NotImplementedError(f"{kind.__name__}: {type(value).__name__}")


# --- control groups ---


def _of_groups(case: Case, piece: EvidencePiece, data: bytes) -> Iterator[Claim]:
    """Claims about killed ranks, refused memory, and shared memory that is full."""
    state = msgspec.json.decode(data, type=_Groups)
    ends = [end for end in first_ends(case) if end.node == piece.node]
    yield from _of_killed(piece, ends, state)
    yield from (claim for end in ends for claim in _of_refused(piece, end, state))
    yield from _of_shared_memory(piece, ends, state.shared_memory)


def _of_killed(piece: EvidencePiece, ends: Sequence[RankEnd], state: _Groups) -> Iterator[Claim]:
    """The kernel's count of kills for memory, where a rank or its worker was killed.

    The count begins with the group, so it may be old: only a shortage at this moment makes it
    certain. A rank that was counted at its end is reported as such already.
    """
    workers = [end for end in ends if worker_ended_by(end) == "SIGKILL"]
    killed = [end for end in ends if end.how == "signal" and end.signal == "SIGKILL"]
    ranks = tuple(sorted(end.rank for end in (*workers, *killed)))
    told = [text for path, files in state.groups.items() if (text := _kills(path, files))]
    if not ranks or not told:
        return
    is_short = any(map(_is_short, state.groups.values()))
    yield Claim(
        cause="host", kind="host_oom", ranks=ranks, fact=piece.fact, blob=piece.blob,
        says=f"{piece.node}: {'; '.join(told[:_GROUPS_MOST])}",
        strength=0.9 if is_short else 0.75 if workers else 0.5,
    )  # fmt: skip
    if workers:
        yield Claim(
            cause="data", kind="data_loader", is_against=True, strength=0.8, fact=piece.fact,
            says=f"{piece.node}: its kernel kills for memory, and a worker of the loader was "
            f"killed",
            ranks=tuple(end.rank for end in workers),
        )  # fmt: skip


def _of_refused(piece: EvidencePiece, end: RankEnd, state: _Groups) -> Iterator[Claim]:
    """A rank that was refused memory although its node had some: it asked for too much."""
    text = refused_memory.text_of(end)
    if not end.error_name or not refused_memory.is_refusal(text):
        return
    total, free = (_kibibytes(state.host, name) << 10 for name in ("MemTotal", "MemAvailable"))
    asked = refused_memory.asked_bytes(text)
    if total and asked > total:
        yield Claim(
            cause="user_code", kind="absurd_size", strength=0.85, ranks=(end.rank,),
            says=f"rank {end.rank} asked for {size(asked)}: {piece.node} has {size(total)} in all",
            fact=piece.fact, blob=piece.blob,
        )  # fmt: skip
    is_short = any(_is_short(files) or _kills("", files) for files in state.groups.values())
    if free > max(asked, _PLENTY * total) and not is_short:
        yield Claim(
            cause="host", kind="host_oom", is_against=True, ranks=(end.rank,),
            strength=_NOT_SHORT if asked <= total else _ABSURD,
            says=f"{piece.node} had {size(free)} of memory free, and no process was killed for "
            "memory: a limit of the process itself, or the size that it asked for",
            fact=piece.fact, blob=piece.blob,
        )  # fmt: skip


def _of_shared_memory(
    piece: EvidencePiece, ends: Sequence[RankEnd], space: _Space | None
) -> Iterator[Claim]:
    """A rank that lost the memory behind a mapping while `/dev/shm` was full."""
    ranks = tuple(sorted(end.rank for end in ends if end.signal == "SIGBUS"))
    if ranks and space is not None and space.free_bytes <= (1 - _FULL) * space.size_bytes:
        yield Claim(
            cause="host", kind="bus_error", strength=0.85, ranks=ranks, fact=piece.fact,
            says=f"{piece.node}: /dev/shm is full: {size(space.free_bytes)} of "
            f"{size(space.size_bytes)} are free", blob=piece.blob,
        )  # fmt: skip


def _kibibytes(host: Mapping[str, str], name: str) -> int:
    return _number(host.get("meminfo", "").replace(":", " ").replace(" kB", ""), name)


def _kills(path: str, files: Mapping[str, str]) -> str:
    events = files.get("memory.events") or files.get("memory.oom_control") or ""
    count = _number(events, "oom_kill")
    return (
        f"the kernel has killed {count} processes because memory was short in {path}"
        if count
        else ""
    )


def _is_short(files: Mapping[str, str]) -> bool:
    used = files.get("memory.current") or files.get("memory.usage_in_bytes") or ""
    limit = files.get("memory.max") or files.get("memory.limit_in_bytes") or ""
    if used.isdecimal() and limit.isdecimal() and int(used) >= _FULL * int(limit):
        return True
    pressure = files.get("memory.pressure", "").partition("avg10=")[2].partition(" ")[0]
    try:
        return float(pressure) >= _PRESSURE
    except ValueError:
        return False


# --- processes ---


def _of_processes(case: Case, piece: EvidencePiece, data: bytes) -> Iterator[Claim]:
    """Ranks that somebody has stopped; a debugger that only reads leaves another letter."""
    del case
    for rank, files in msgspec.json.decode(data, type=_Processes).ranks.items():
        if _STOPPED.search(files.get("status", "")):
            yield stopped_process(rank, piece.node, piece.fact)


# --- pages ---


def _of_pages(case: Case, piece: EvidencePiece, data: bytes) -> Iterator[Claim]:
    """Ranks whose scripts had ended while others went on, or still wait for them.

    A script that raises is reported at once. A script that ends well is known only once its process
    is gone, and then the round may be over, as the others have lost that rank.
    """
    ends = first_ends(case)
    if not all(map(is_consequence, ends)) or not (ends or case.stalls):
        return
    pages = {
        rank: rank_state.page
        for rank, rank_state in msgspec.json.decode(data, type=_Pages).ranks.items()
    }
    told = {end.rank for end in (*ends, *case.done)}
    if ends:
        yield from _alone(case, piece, pages, told)
    over = (pages[rank] for rank in told & pages.keys() if pages[rank].phase == "ended")
    first_s = min((page.progress_s for page in over), default=math.inf)
    left: dict[int | None, list[int]] = defaultdict(list)
    for rank, page in sorted(pages.items()):
        if rank not in told and page.phase == "ended" and page.progress_s <= first_s:
            left[page.exit_code].append(rank)
    if 2 * sum(map(len, left.values())) <= case.world_size:
        yield from (_of_left(piece, code, ranks) for code, ranks in left.items())


def _of_left(piece: EvidencePiece, code: int | None, ranks: Sequence[int]) -> Claim:
    """Ranks whose scripts ended with one code. Their processes may not have exited yet."""
    script = f"the script of {ranks_told(ranks)} had ended"
    if code is None:
        return left_early(ranks, f"{script}, with an unknown code,", piece.fact, _OF_UNKNOWN_CODE)
    if not code:
        return left_early(ranks, f"{script} with code 0", piece.fact)
    return Claim(
        cause="user_code", kind="exit_code", strength=_OF_CODE, ranks=tuple(ranks),
        says=f"{script} with code {code} while others continued", fingerprint=f"error:{code}",
        fact=piece.fact, blob=piece.blob,
    )  # fmt: skip


def _alone(
    case: Case, piece: EvidencePiece, pages: Mapping[int, _Page], told: set[int]
) -> Iterator[Claim]:
    """The only rank that has not ended, where all others ended because they lost one."""
    if len(told) != case.world_size - 1 or len(told) < 2:
        return
    rank = next(rank for rank in range(case.world_size) if rank not in told)
    if rank in pages and pages[rank].phase != "ended":
        yield Claim(
            cause="unknown", kind="lost_by_all", strength=_LOST_BY_ALL, ranks=(rank,),
            says=f"rank {rank} alone has not ended: all {len(told)} others ended as ranks do "
            "that lost another",
            fact=piece.fact, blob=piece.blob,
        )  # fmt: skip


def _number(text: str, name: str) -> int:
    pairs = (line.split() for line in text.splitlines())
    number = next((pair[1] for pair in pairs if len(pair) == 2 and pair[0] == name), "")
    return int(number) if number.isdecimal() and len(number) < 20 else 0


_Reader = Callable[[Case, EvidencePiece, bytes], Iterator[Claim]]
_READERS: Mapping[str, _Reader] = {
    "gpu": _of_gpus,
    "cgroup": _of_groups,
    "process": _of_processes,
    "page": _of_pages,
}
