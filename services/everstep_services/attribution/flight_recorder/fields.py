"""Reads the fields of entries, which may hold anything: a wrong type reads as nothing."""

import re
from array import array
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from everstep.observe.printable import printable

LARGEST = 2**62
_HIGHEST_RANK = 10_000_000


def mapping_of(value: Any) -> Mapping[Any, Any]:
    return value if isinstance(value, dict) else {}


def text_of(value: Any) -> str:
    """A text as one line that no terminal obeys: with a line break a dump could forge findings."""
    if isinstance(value, str):
        text = value[:512]
        return text if text.isprintable() else printable(text).replace("\n", "\\u000a")
    return str(value) if isinstance(value, int) and abs(value) < LARGEST else ""


def number_of(value: Any, default: int = 0) -> int:
    """A whole number of a sane size; some releases write numbers as strings."""
    if type(value) is int and -LARGEST < value < LARGEST:
        return value
    if isinstance(value, str) and len(value) < 20 and value.lstrip("-").isdecimal():
        value = int(value)
    if isinstance(value, float) and abs(value) < LARGEST:
        value = int(value)
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return value if is_number and abs(value) < LARGEST else default


def where(frames: Any) -> str:
    """The innermost line that is not torch's own."""
    if not isinstance(frames, list | tuple):
        return ""
    for frame in frames[:64]:
        name = mapping_of(frame)
        file = text_of(name.get("filename"))
        if file and "/torch/" not in file and "torch/csrc" not in file:
            return (
                f"{file[-120:]}:{number_of(name.get('line'))} in {text_of(name.get('name'))[:80]}"
            )
    return ""


def dtypes_of(dtypes: Any) -> str:
    if not isinstance(dtypes, list | tuple):
        return ""
    if len(dtypes) == 1:
        return text_of(dtypes[0])[:24]
    return "+".join(sorted({text_of(dtype)[:24] for dtype in dtypes[:256]}))


def is_over(entry: Mapping[str, Any], created: int, over: int) -> bool:
    """Whether an entry is over. gloo's never leave `scheduled`, and are then only retired."""
    if entry.get("state") == "completed":
        began = number_of(entry.get("time_discovered_started_ns")) or created
        # Some releases record a collective as completed when it was given up.
        timeout_ns = number_of(entry.get("timeout_ms")) * 1_000_000
        return not (timeout_ns and over and began and over - began >= timeout_ns)
    is_retired = entry.get("retired") is True
    return is_retired and text_of(entry.get("profiling_name")).startswith("gloo")


def readable(text: str) -> str:
    """An operation as people read it: `all_reduce of 4x3 Float`."""
    name, sizes, outputs, dtypes = [*text.split("|"), "", "", ""][:4]
    kind = (name.partition(":")[2] or name).strip("_")
    tensors = sizes if len(sizes) <= 60 else f"{sizes[:57]}..."
    to = f" to {outputs if len(outputs) <= 60 else outputs[:57] + '...'}" if outputs else ""
    return f"{kind} of {tensors}{to} {dtypes}".rstrip() if tensors else kind


@lru_cache(maxsize=64)
def listed_ranks(text: str) -> bytes:
    """The ranks of `[0, 1, 2]`; each rank of a group writes the same."""
    if not re.fullmatch(r"[\[\]0-9, ]*", text):
        return b""
    return packed_ranks([int(rank) for rank in re.findall(r"\d{1,9}", text)])


def packed_ranks(ranks: Sequence[int]) -> bytes:
    is_sane = all(0 <= rank <= _HIGHEST_RANK for rank in ranks)
    return array("I", ranks).tobytes() if is_sane else b""
