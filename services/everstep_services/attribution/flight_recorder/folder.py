"""Finds the dumps in a folder, and has each dump read in a process with little memory.

A dump comes from a process that is sick, or from somebody else: reading it must not be able to
take the machine down. So readers are processes of their own, with limits on memory and
processor time; a file that ends its reader is left out, with the reason.
"""

import gc
import re
import resource
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import msgspec

from everstep.errors import EverstepError
from everstep_services.attribution.flight_recorder.dump import read_dump
from everstep_services.attribution.flight_recorder.dump_file import BadDumpError
from everstep_services.attribution.flight_recorder.entries import RankEntries, read_entries
from everstep_services.attribution.flight_recorder.summary import RankSummary, UnreadableDump

_REASON_MOST = 300
_MOST_BYTES = 1 << 30
_MEMORY_BYTES = 4 << 30
_CPU_S = 30
_AHEAD = 4
"""How many tasks are given to a reader before it asks."""
_MOST_PER_TASK = 8
"""How many files a task has."""
_RANK = re.compile(r"(?P<prefix>.*?)(?P<rank>\d{1,7})(?P<suffix>(\.(json|pickle|pkl|pt|bin))?)")


_LEAST_COMMON = 4
"""How many characters all names must have alike before the rank, where their prefixes differ."""


class _Answer(msgspec.Struct):
    summary: RankSummary | None = None
    unreadable: UnreadableDump | None = None


class _EntriesAnswer(msgspec.Struct):
    entries: RankEntries | None = None
    reason: str = ""


class _Limits(NamedTuple):
    """The limits of reading one file."""

    memory_bytes: int
    cpu_s: int


class NoDumpsError(EverstepError):
    """A folder has no dumps, or dumps of several kinds."""


@dataclass(frozen=True, slots=True)
class DumpFile:
    """A file that may be a dump, and the rank that its name gives it."""

    path: Path
    rank: int


class FoundDumps(NamedTuple):
    """The dumps of a folder, at most one for a rank, and those that are left out."""

    files: list[DumpFile]
    left_out: list[UnreadableDump]


def find_dumps(folder: Path, prefix: str | None = None) -> FoundDumps:
    """The files whose names end in a rank: `nccl_trace_rank_7`, `_dump_7.json`, `7.json`.

    Something else may stand before the prefix, as the name of a host. Without a prefix all names
    must have the same one, or end alike before the rank, with each rank once. Of two dumps of a
    rank the newer one counts.
    """
    if not folder.is_dir():
        raise NoDumpsError(f"{folder} is not a folder: name the one that holds the dumps")
    files_of: dict[str, list[DumpFile]] = {}
    others_of: dict[str, list[DumpFile]] = {}
    for path in sorted(folder.rglob("*")):
        match = _RANK.fullmatch(path.name)
        if match and (prefix is None or match["prefix"].endswith(prefix)):
            by_prefix = files_of if path.is_file() else others_of
            by_prefix.setdefault(match["prefix"], []).append(DumpFile(path, int(match["rank"])))
    if not files_of:
        wanted = "ends in a rank" if prefix is None else f"is {prefix!r} and a rank"
        raise NoDumpsError(
            f"no file in {folder} has a name that {wanted}, such as nccl_trace_rank_7 or "
            f"_dump_7.json: pass the folder of the dumps, or --prefix"
        )
    every = [file for files in files_of.values() for file in files]
    if len(files_of) > 1 and not (prefix or _differ_by_host(list(files_of), every)):
        names = ", ".join(repr(prefix) for prefix in sorted(files_of)[:8])
        raise NoDumpsError(
            f"the files in {folder} have several prefixes ({names}): choose one by --prefix"
        )
    others = [file for name in files_of for file in others_of.get(name, ())]
    kept, older = _newest_of_each(every)
    return FoundDumps(kept, [*older, *_not_files(others, {file.rank for file in kept})])


def _newest_of_each(files: Sequence[DumpFile]) -> tuple[list[DumpFile], list[UnreadableDump]]:
    """One file for each rank, in the order given, and the older ones with the reason."""
    by_rank: dict[int, list[DumpFile]] = {}
    for file in files:
        by_rank.setdefault(file.rank, []).append(file)
    newest = {rank: max(some, key=_age_key) for rank, some in by_rank.items()}
    older = [
        UnreadableDump(
            name=file.path.name,
            reason=f"{newest[file.rank].path.name} is of rank {file.rank}, too, and is newer",
        )
        for file in files
        if file is not newest[file.rank]
    ]
    return [file for file in files if file is newest[file.rank]], older


def _age_key(file: DumpFile) -> tuple[int, str]:
    try:
        return file.path.stat().st_mtime_ns, str(file.path)
    except OSError:  # it has gone meanwhile
        return 0, str(file.path)


def _not_files(others: Sequence[DumpFile], ranks: Collection[int]) -> Iterator[UnreadableDump]:
    """Folders, pipes and links to nothing that are named as dumps are."""
    for file in others:
        is_link_to_nothing = file.path.is_symlink() and not file.path.exists()
        reason = "it is a link to nothing" if is_link_to_nothing else "it is not a plain file"
        rank = None if file.rank in ranks else file.rank
        yield UnreadableDump(name=file.path.name, reason=reason, rank=rank, is_evidence=False)


def _differ_by_host(prefixes: Sequence[str], files: Sequence[DumpFile]) -> bool:
    """Whether names differ only by what stands before a prefix that all of them have."""
    alike = {prefix[-_LEAST_COMMON:] for prefix in prefixes if len(prefix) >= _LEAST_COMMON}
    return (
        len(alike) == 1
        and min(map(len, prefixes)) >= _LEAST_COMMON
        and len({file.rank for file in files}) == len(files)
    )


def read_dumps(
    files: Sequence[DumpFile],
    *,
    readers: int = 2,
    memory_bytes: int = _MEMORY_BYTES,
    cpu_s: int = _CPU_S,
) -> Iterator[RankSummary | UnreadableDump]:
    """Each file's summary, or why there is none, in any order; a few files are held at a time."""
    limits = _Limits(memory_bytes, cpu_s)
    size = max(1, min(_MOST_PER_TASK, len(files) // (readers * _AHEAD)))
    todo = [files[at : at + size] for at in range(0, len(files), size)]
    todo.reverse()
    while todo:
        suspects: list[DumpFile] = []
        yield from _read(todo, suspects, readers, limits)
        yield from _read_alone(suspects, limits)  # one of these has ended its reader


def read_all_entries(
    files: Sequence[DumpFile], *, verbose: bool = False, group_world: int = 0
) -> Iterator[RankEntries | UnreadableDump]:
    """Each file's entries, or why there are none, in the order of the files."""
    limits = _Limits(_MEMORY_BYTES, _CPU_S)
    todo = list(reversed(files))
    while todo:
        with _pool(1, limits) as pool:
            while todo:
                file = todo.pop()
                answer = pool.submit(
                    _read_entries, str(file.path), file.rank, limits.cpu_s, verbose, group_world
                )
                try:
                    entries = msgspec.msgpack.decode(answer.result(), type=_EntriesAnswer)
                except BrokenProcessPool:
                    yield _too_large(file, limits)
                    break
                yield entries.entries or UnreadableDump(
                    name=file.path.name, reason=entries.reason, rank=file.rank
                )


def _read(
    todo: list[Sequence[DumpFile]], suspects: list[DumpFile], readers: int, limits: _Limits
) -> Iterator[RankSummary | UnreadableDump]:
    """Read until no file is left, or a reader has died."""
    running: dict[Future[list[bytes]], Sequence[DumpFile]] = {}
    with _pool(readers, limits) as pool:
        while todo or running:
            while todo and len(running) < readers * _AHEAD and not suspects:
                files = todo.pop()
                running[_submit(pool, files, limits)] = files
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                files = running.pop(future)
                try:
                    yield from map(_answer, future.result())
                except BrokenProcessPool:
                    suspects.extend(files)
            if suspects and not running:
                return


def _read_alone(
    suspects: Sequence[DumpFile], limits: _Limits
) -> Iterator[RankSummary | UnreadableDump]:
    """Read each file alone, to see which file ends its reader."""
    todo = list(reversed(suspects))
    while todo:
        with _pool(1, limits) as pool:
            while todo:
                file = todo.pop()
                try:
                    yield from map(_answer, _submit(pool, [file], limits).result())
                except BrokenProcessPool:
                    yield _too_large(file, limits)
                    break


def _too_large(file: DumpFile, limits: _Limits) -> UnreadableDump:
    return UnreadableDump(
        name=file.path.name,
        reason=f"it ended its reader, which may take {limits.memory_bytes >> 20} MiB and "
        f"{limits.cpu_s} s of a processor: no dump needs as much",
        rank=file.rank,
    )


def _pool(readers: int, limits: _Limits) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(
        readers,
        mp_context=get_context("spawn"),
        initializer=_limit,
        initargs=(limits.memory_bytes,),
    )


def _submit(
    pool: ProcessPoolExecutor, files: Sequence[DumpFile], limits: _Limits
) -> "Future[list[bytes]]":
    return pool.submit(_read_files, [(str(file.path), file.rank) for file in files], limits.cpu_s)


def _limit(memory_bytes: int) -> None:
    gc.disable()  # dumps have no cycles: looking for them takes as long as reading
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _limit_cpu(cpu_s: int) -> None:
    """Have the kernel end this process if the next file takes longer."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(
        resource.RLIMIT_CPU, (int(usage.ru_utime + usage.ru_stime) + 1 + cpu_s, hard)
    )


def _answer(content: bytes) -> RankSummary | UnreadableDump:
    answer = msgspec.msgpack.decode(content, type=_Answer)
    return answer.summary or answer.unreadable or UnreadableDump(name="?", reason="no answer")


def _read_files(files: Sequence[tuple[str, int]], cpu_s: int) -> list[bytes]:
    """Runs in a reader."""
    answers = []
    for path, rank in files:
        _limit_cpu(cpu_s)
        answers.append(_read_file(path, rank))
    return answers


def _read_file(path: str, rank: int) -> bytes:
    file = Path(path)
    try:
        answer = _Answer(summary=read_file(file, rank))
    except (BadDumpError, OSError, MemoryError) as error:
        reason = str(error) or "it needs more memory than a dump may take"
        answer = _Answer(unreadable=UnreadableDump(name=file.name, reason=reason, rank=rank))
    except Exception as error:  # noqa: BLE001  a file may hold anything: it costs its own rank only
        reason = f"it cannot be read: {type(error).__name__}: {error}"[:_REASON_MOST]
        answer = _Answer(unreadable=UnreadableDump(name=file.name, reason=reason, rank=rank))
    return msgspec.msgpack.encode(answer)


def _read_entries(path: str, rank: int, cpu_s: int, verbose: bool, group_world: int) -> bytes:
    """Runs in a reader."""
    _limit_cpu(cpu_s)
    try:
        content = _checked_content(Path(path))
        entries = read_entries(content, rank, verbose=verbose, group_world=group_world)
        answer = _EntriesAnswer(entries=entries)
    except (BadDumpError, OSError, MemoryError) as error:
        answer = _EntriesAnswer(reason=str(error) or "it needs more memory than a dump may take")
    except Exception as error:  # noqa: BLE001  a file may hold anything: it costs its own rank only
        text = f"it cannot be read: {type(error).__name__}: {error}"
        answer = _EntriesAnswer(reason=text[:_REASON_MOST])
    return msgspec.msgpack.encode(answer)


def _checked_content(file: Path) -> bytes:
    size = file.stat().st_size
    if size > _MOST_BYTES:
        raise BadDumpError(f"it has {size} bytes; at most {_MOST_BYTES} are read")
    if not size:
        raise BadDumpError("it is empty")
    return file.read_bytes()


def read_file(file: Path, rank: int) -> RankSummary:
    """The summary of one file; its time of change says when it was written."""
    status = file.stat()
    summary = read_dump(_checked_content(file), rank, status.st_mtime_ns)
    if summary.taken_ns < summary.newest_ns:  # the clock of another host is useless here
        return msgspec.structs.replace(summary, taken_ns=0)
    return summary
