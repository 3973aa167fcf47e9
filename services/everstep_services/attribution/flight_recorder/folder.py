"""Finds the dumps in a folder, and has each one read in a process that may take little memory.

A dump comes from a process that is sick, or from somebody else: reading it must not be able to
take the machine down. So readers are processes of their own, with a limit on memory; a file that
ends its reader is left out, with the reason.
"""

import re
import resource
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import msgspec

from everstep.errors import EverstepError
from everstep_services.attribution.flight_recorder.dump import BadDumpError, read_dump
from everstep_services.attribution.flight_recorder.summary import RankSummary, Unreadable

_MOST_BYTES = 1 << 30
_MEMORY_BYTES = 4 << 30
_AHEAD = 4
"""How many files are given to a reader before it asks."""
_RANK = re.compile(r"(?P<prefix>.*?)(?P<rank>\d{1,7})(?P<suffix>(\.(json|pickle|pkl|pt|bin))?)")


class _Answer(msgspec.Struct):
    summary: RankSummary | None = None
    unreadable: Unreadable | None = None


class NoDumpsError(EverstepError):
    """A folder has no dumps, or not of one kind."""


@dataclass(frozen=True, slots=True)
class DumpFile:
    """A file that may be a dump, and the rank that its name gives it."""

    path: Path
    rank: int


def find_dumps(folder: Path, prefix: str | None = None) -> list[DumpFile]:
    """The files whose names end in a rank: `nccl_trace_rank_7`, `_dump_7.json`, `7.json`.

    Without a prefix all of them must have the same one.
    """
    if not folder.is_dir():
        raise NoDumpsError(f"{folder} is not a folder: name the one that holds the dumps")
    found: dict[str, list[DumpFile]] = {}
    for path in sorted(folder.rglob("*")):
        match = _RANK.fullmatch(path.name)
        if match and path.is_file() and (prefix is None or match["prefix"] == prefix):
            found.setdefault(match["prefix"], []).append(DumpFile(path, int(match["rank"])))
    if not found:
        wanted = "ends in a rank" if prefix is None else f"is {prefix!r} and a rank"
        raise NoDumpsError(
            f"no file in {folder} has a name that {wanted}, such as nccl_trace_rank_7 or "
            f"_dump_7.json: pass the folder of the dumps, or --prefix"
        )
    if len(found) > 1:
        names = ", ".join(repr(one) for one in sorted(found)[:8])
        raise NoDumpsError(
            f"the files in {folder} have several prefixes ({names}): choose one by --prefix"
        )
    return next(iter(found.values()))


def read_dumps(
    files: Sequence[DumpFile], *, readers: int = 2, memory_bytes: int = _MEMORY_BYTES
) -> Iterator[RankSummary | Unreadable]:
    """Each file's summary, or why there is none, in no order; a few files are held at a time."""
    todo = list(reversed(files))
    while todo:
        suspects: list[DumpFile] = []
        yield from _read(todo, suspects, readers, memory_bytes)
        for one in suspects:  # one of these has ended its reader: each alone, to see which
            yield from _read_alone(one, memory_bytes)


def _read(
    todo: list[DumpFile], suspects: list[DumpFile], readers: int, memory_bytes: int
) -> Iterator[RankSummary | Unreadable]:
    """Read until nothing is left to do, or a reader has died."""
    running: dict[Future[bytes], DumpFile] = {}
    with _pool(readers, memory_bytes) as pool:
        while todo or running:
            while todo and len(running) < readers * _AHEAD and not suspects:
                file = todo.pop()
                running[pool.submit(_read_file, str(file.path), file.rank)] = file
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                file = running.pop(future)
                try:
                    yield _answer(future.result())
                except BrokenProcessPool:
                    suspects.append(file)
            if suspects and not running:
                return


def _read_alone(file: DumpFile, memory_bytes: int) -> Iterator[RankSummary | Unreadable]:
    with _pool(1, memory_bytes) as pool:
        try:
            yield _answer(pool.submit(_read_file, str(file.path), file.rank).result())
        except BrokenProcessPool:
            yield Unreadable(
                name=file.path.name,
                reason=f"reading it takes more than {memory_bytes >> 20} MiB: no dump is so large",
                rank=file.rank,
            )


def _pool(readers: int, memory_bytes: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(
        readers, mp_context=get_context("spawn"), initializer=_limit, initargs=(memory_bytes,)
    )


def _limit(memory_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _answer(content: bytes) -> RankSummary | Unreadable:
    answer = msgspec.msgpack.decode(content, type=_Answer)
    return answer.summary or answer.unreadable or Unreadable(name="?", reason="no answer")


def _read_file(path: str, rank: int) -> bytes:
    """Runs in a reader."""
    file = Path(path)
    try:
        answer = _Answer(summary=read_file(file, rank))
    except (BadDumpError, OSError, MemoryError) as error:
        reason = str(error) or "it needs more memory than a dump may take"
        answer = _Answer(unreadable=Unreadable(name=file.name, reason=reason, rank=rank))
    return msgspec.msgpack.encode(answer)


def read_file(file: Path, rank: int) -> RankSummary:
    """The summary of one file; its time of change says when it was written."""
    status = file.stat()
    if status.st_size > _MOST_BYTES:
        raise BadDumpError(f"it has {status.st_size} bytes; at most {_MOST_BYTES} are read")
    if not status.st_size:
        raise BadDumpError("it is empty")
    summary = read_dump(file.read_bytes(), rank, status.st_mtime_ns)
    if summary.taken_ns < summary.newest_ns:  # a clock of another host: it says nothing
        return msgspec.structs.replace(summary, taken_ns=0)
    return summary
