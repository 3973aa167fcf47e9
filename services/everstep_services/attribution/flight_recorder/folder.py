"""Finds the dumps in a folder, and has each dump read in a process with little memory."""

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec

from everstep.errors import EverstepError
from everstep_services.attribution.flight_recorder.entries import RankEntries
from everstep_services.attribution.flight_recorder.reader import (
    EntriesAnswer,
    ReaderLimits,
    ReadRequest,
    SummaryAnswer,
    answers,
)
from everstep_services.attribution.flight_recorder.summary import RankSummary, UnreadableDump

_MEMORY_BYTES = 4 << 30
_CPU_S = 30
_SUMMARY = msgspec.msgpack.Decoder(SummaryAnswer)
_ENTRIES = msgspec.msgpack.Decoder(EntriesAnswer)
_RANK = re.compile(r"(?P<prefix>.*?)(?P<rank>\d{1,7})(?P<suffix>(\.(json|pickle|pkl|pt|bin))?)")


_LEAST_COMMON = 4
"""How many characters all names must have alike before the rank, where their prefixes differ."""


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
    """Each file's summary, or why there is none; a few files are held at a time."""
    limits = ReaderLimits(memory_bytes, cpu_s)
    wanted = (ReadRequest(bytes(file.path), file.rank) for file in files)
    for file, octets in zip(files, answers(wanted, readers, limits), strict=True):
        answer = _SUMMARY.decode(octets)
        yield answer.summary or _unreadable(file, answer.reason)


def read_all_entries(
    files: Sequence[DumpFile], *, verbose: bool = False, group_world: int = 0
) -> Iterator[RankEntries | UnreadableDump]:
    """Each file's entries, or why there are none, in the order of the files."""
    limits = ReaderLimits(_MEMORY_BYTES, _CPU_S)
    wanted: Iterable[ReadRequest] = (
        ReadRequest(bytes(file.path), file.rank, "entries", verbose, group_world) for file in files
    )
    for file, octets in zip(files, answers(wanted, 1, limits), strict=True):
        answer = _ENTRIES.decode(octets)
        yield answer.entries or _unreadable(file, answer.reason)


def _unreadable(file: DumpFile, reason: str) -> UnreadableDump:
    return UnreadableDump(name=file.path.name, reason=reason, rank=file.rank)
