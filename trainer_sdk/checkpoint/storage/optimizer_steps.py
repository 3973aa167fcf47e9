"""Step counts of optimizers in a checkpoint, compared without torch.

Earlier releases restored no optimizer state of a parameter on ranks without rows of it, from the
global tier. Such a rank counted from 1 again, and a later save may have stored its count for all.
"""

import pickletools
import struct
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from trainer_sdk.checkpoint.storage.pickled_values import descriptions_in
from trainer_sdk.checkpoint.storage.port import ByteRange, Storage, read_metadata, read_ranges
from trainer_sdk.checkpoint.storage.value_archive import ValueArchive

_STEP = ".step"
_STATES = ".state."
_NUMBERS = {"FloatStorage": "<f", "DoubleStorage": "<d", "LongStorage": "<q", "IntStorage": "<i"}


class _StepCount(NamedTuple):
    key: str
    place: ByteRange
    is_rowless: bool
    """Whether a rank that saved had no rows of the parameter."""


def doubt_about_steps(storage: Storage, folder: str, described: str) -> str:
    """Why step counts may be wrong; empty if they look right. `described` is torch's metadata."""
    inside = f"{folder}/{described}".rpartition("/")[0]
    counts = list(_step_counts(read_metadata(storage, f"{folder}/{described}"), inside))
    if not any(count.is_rowless for count in counts):
        return ""
    steps: dict[str, list[tuple[float, _StepCount]]] = defaultdict(list)
    for number, octets in read_ranges(storage, [count.place for count in counts]):
        value = _number(bytes(octets))
        if value is not None:
            count = counts[number]
            steps[count.key.partition(_STATES)[0]].append((value, count))
    for counted in steps.values():
        most = max((value for value, count in counted if not count.is_rowless), default=0.0)
        low = [(value, count.key) for value, count in counted if count.is_rowless and value < most]
        if low:
            value, key = min(low)
            return (
                f"{key} is {value:g}, and other parameters have {most:g}: an earlier release "
                "may have lost the count of a parameter that some rank has no rows of; unless it "
                "was frozen for a while, restore a checkpoint from before the first restart"
            )
    return ""


def _step_counts(metadata: bytes, inside: str) -> Iterator[_StepCount]:
    kinds, places = descriptions_in(metadata)
    rowless = {
        key.rpartition(".")[0]
        for key, kind in kinds.items()
        if all(kind.size or (0,)) and any(0 in sizes for sizes in kind.parts)
    }
    for place in places:
        is_number = place.key not in kinds or not kinds[place.key].size
        if place.key.endswith(_STEP) and is_number:
            where = ByteRange(f"{inside}/{place.file}", place.offset, place.length)
            yield _StepCount(place.key, where, place.key.removesuffix(_STEP) in rowless)


def _number(octets: bytes) -> float | None:
    """The number in the output of `torch.save`, for a number or for a tensor of one."""
    archive = ValueArchive(octets)
    for opcode, argument, _ in pickletools.genops(archive.pickled):
        if opcode.name == "GLOBAL" and (form := _NUMBERS.get(str(argument).split(" ")[-1])):
            return float(struct.unpack_from(form, archive.file("data/0"))[0])
        if opcode.name in ("BININT", "BININT1", "BININT2", "BINFLOAT"):
            return float(str(argument))
    return None
