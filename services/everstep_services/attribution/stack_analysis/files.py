"""Files, folders and archives of evidence that people name, read one after the other."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from everstep.errors import EverstepError
from everstep.evidence.archive import MAX_BYTES, MISSING, BadArchiveError, is_archive, unpack
from everstep.evidence.files import read_regular
from everstep_services.attribution.stack_analysis.dumps import BadStacksError, read_stacks
from everstep_services.attribution.stack_analysis.stacks import RankStacks, Unreadable

_NAMED = re.compile(r"rank[-_.]?(\d{1,7})(?!\d)")
_LAST = re.compile(r"(?<!\d)(\d{1,7})\.?(?:json|txt|log|stacks|dump)?$")
_MOST_MISSING_BYTES = 1 << 20


class NoStacksError(EverstepError):
    """Nothing that was named has a stack."""


def read_paths(paths: Sequence[Path]) -> Iterator[RankStacks | Unreadable]:
    """All stacks in files and folders, or why there are none; one file is held at a time."""
    files = [file for path in paths for file in _files(path)]
    if not files:
        raise NoStacksError(
            f"no file in {paths[0]} has a name with a rank, such as rank_7.json or py-spy.7.txt"
        )
    taken: set[int] = set()
    for file in files:
        for dump in _read(file, _free_rank(file, taken)):
            if dump.rank is not None:
                taken.add(dump.rank)
            yield dump


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        return sorted(file for file in path.rglob("*") if file.is_file() and _is_ours(file))
    if not path.exists():
        raise NoStacksError(f"{path} does not exist")
    return [path]


def _is_ours(path: Path) -> bool:
    has_rank = _rank_of(path.name) is not None and not path.name.endswith((".py", ".pt"))
    return has_rank or path.name.endswith(".tar.gz") or path.name == MISSING


def _rank_of(name: str) -> int | None:
    numbers = _NAMED.findall(name) or _LAST.findall(name)
    return int(numbers[-1]) if numbers else None


def _free_rank(path: Path, taken: set[int]) -> int:
    """The rank in the name; without one, the first that is free."""
    rank = _rank_of(path.name)
    return next(n for n in range(len(taken) + 1) if n not in taken) if rank is None else rank


def _read(path: Path, rank: int) -> Iterator[RankStacks | Unreadable]:
    try:
        size = path.stat().st_size
        content = b"" if size > MAX_BYTES else read_regular(path)
    except OSError as error:
        yield Unreadable(
            name=str(path), reason=error.strerror or str(error), rank=rank, is_evidence=False
        )
        return
    if size > MAX_BYTES:
        reason = f"it has {size} bytes; at most {MAX_BYTES} are read"
        yield Unreadable(name=str(path), reason=reason, rank=rank, is_evidence=False)
    elif is_archive(content):
        yield from _of_archive(content, path.name)
    elif path.name == MISSING:
        yield from _of_missing(content)
    else:
        yield read_content(content, rank, path.name)


def read_content(content: bytes, rank: int, name: str) -> RankStacks | Unreadable:
    """The stacks in the bytes of a rank, or why there are none."""
    try:
        return read_stacks(content, rank)
    except BadStacksError as error:
        return Unreadable(name=name, reason=str(error), rank=rank, is_evidence=False)


def _of_archive(content: bytes, name: str) -> Iterator[RankStacks | Unreadable]:
    try:
        archive = unpack(content)
    except BadArchiveError as error:
        yield Unreadable(name=name, reason=str(error))
        return
    for member in archive.members:
        if member.rank is not None:
            yield read_content(member.content, member.rank, f"{member.name} of {name}")
    for rank, reason in archive.missing.items():
        yield Unreadable(name=f"rank {rank}", reason=reason, rank=rank)


def _of_missing(content: bytes) -> Iterator[Unreadable]:
    """The reasons of an unpacked archive for ranks without stacks."""
    try:
        if len(content) > _MOST_MISSING_BYTES:
            raise msgspec.DecodeError("it is too large")
        reasons = msgspec.json.decode(content, type=dict[int, str])
    except (ValueError, RecursionError) as error:
        yield Unreadable(name=MISSING, reason=f"it cannot be read: {error}")
        return
    for rank, reason in reasons.items():
        yield Unreadable(name=f"rank {rank}", reason=reason, rank=rank)
