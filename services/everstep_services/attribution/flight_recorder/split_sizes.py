"""Whose sizes in an all_to_all fit nobody's, by what ranks wrote down as a lost call ended them.

Recorders have the size of the whole tensor, which is equal. What a rank sends to another one must
be what that one expects of it. Only ranks in the same call of a group can be compared.
"""

import re
from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import TypeAlias

import msgspec

_NAME = re.compile("all_?to_?all")
_LEAST_RANKS = 3
"""Of two, nobody knows which one differs."""
_LEAST_AGREED = 2
_ITEM_BYTES = (1, 2, 4, 8, 16)


class SplitSizes(msgspec.Struct, frozen=True):
    """What a rank gave to `all_to_all_single`, in the order of the ranks of its group."""

    ranks: tuple[int, ...]
    sends: tuple[int, ...]
    receives: tuple[int, ...]


SplitCalls: TypeAlias = Mapping[tuple[tuple[int, ...], int], Mapping[int, SplitSizes]]


class _Entry(msgspec.Struct):
    profiling_name: str = ""
    collective_seq_id: int = -1
    record_id: int = -1


class _Dump(msgspec.Struct):
    entries: list[_Entry] = []
    all_to_all: SplitSizes | None = None


_DUMP = msgspec.json.Decoder(_Dump, strict=False)


def split_calls(dumps: Mapping[int, bytes]) -> SplitCalls:
    """The calls that lost ranks have left, by the ranks of the group and the number in it."""
    calls: dict[tuple[tuple[int, ...], int], dict[int, SplitSizes]] = {}
    for rank, dump in dumps.items():
        if (call := _call(rank, dump)) is not None:
            sizes, number = call
            calls.setdefault((sizes.ranks, number), {})[rank] = sizes
    return calls


def odd_split(
    calls: SplitCalls, refused: Mapping[int | None, tuple[bytes, bytes]]
) -> tuple[int, str] | None:
    """The rank whose sizes differ, and how; None if nobody knows.

    `refused` are the ranks that gloo ended because they were sent more than they expect, each with
    both numbers of bytes.
    """
    for (ranks, _), sizes in calls.items():
        if len(ranks) < _LEAST_RANKS:
            continue
        misfits = list(_misfits(sizes))
        odd = [rank for rank in sizes if misfits and all(rank in pair for pair in misfits)]
        if len(odd) == 1:
            return odd[0], _told(odd[0], misfits[0], sizes)
        unknown = {*ranks} - sizes.keys()
        refusers = [rank for rank in unknown if rank in refused]
        guilty = [rank for rank in refusers if _expects_less(rank, sizes, *refused[rank])]
        if not misfits and (len(unknown) == 1 == len(refusers) or len(guilty) == 1):
            named = (guilty or refusers)[0]
            return named, f"what the other {len(sizes)} ranks send and expect fits"
    return None


def _expects_less(
    rank: int, sizes: Mapping[int, SplitSizes], sent: bytes | None, expects: bytes | None
) -> bool:
    """Whether it was sent what all known ranks send it, and expects another size."""
    counts = {_sent(sizes, other, rank) for other in sizes}
    if len(sizes) < _LEAST_AGREED or len(counts) != 1 or sent is None or expects is None:
        return False
    count = counts.pop()
    return _is_multiple(int(sent), count) and not _is_multiple(int(expects), count)


def _is_multiple(octets: int, count: int) -> bool:
    """Whether these bytes are this count of numbers of a usual size."""
    return count > 0 and octets % count == 0 and octets // count in _ITEM_BYTES


def _call(rank: int, dump: bytes) -> tuple[SplitSizes, int] | None:
    """The sizes, and the number of the call in its group."""
    try:
        read = _DUMP.decode(dump)
    except (msgspec.MsgspecError, RecursionError):
        return None
    sizes = read.all_to_all
    calls = [it for it in read.entries if _NAME.search(it.profiling_name)]
    if sizes is None or rank not in sizes.ranks or not calls:
        return None
    count = len({*sizes.ranks})
    if not count == len(sizes.ranks) == len(sizes.sends) == len(sizes.receives):
        return None
    return sizes, max(calls, key=lambda it: it.record_id).collective_seq_id


def _misfits(sizes: Mapping[int, SplitSizes]) -> Iterator[tuple[int, int]]:
    """The pairs of ranks that do not expect what the other one sends."""
    for pair in combinations(sizes, 2):
        if any(_sent(sizes, *way) != _expected(sizes, *way) for way in (pair, pair[::-1])):
            yield pair


def _sent(sizes: Mapping[int, SplitSizes], sender: int, receiver: int) -> int:
    return sizes[sender].sends[sizes[sender].ranks.index(receiver)]


def _expected(sizes: Mapping[int, SplitSizes], sender: int, receiver: int) -> int:
    return sizes[receiver].receives[sizes[receiver].ranks.index(sender)]


def _told(odd: int, pair: tuple[int, int], sizes: Mapping[int, SplitSizes]) -> str:
    other = pair[pair[0] == odd]
    return (
        f"it sends {_sent(sizes, odd, other)} to rank {other}, which expects "
        f"{_expected(sizes, odd, other)}, and expects {_expected(sizes, other, odd)} of it, which "
        f"sends {_sent(sizes, other, odd)}; what the others send and expect fits"
    )
