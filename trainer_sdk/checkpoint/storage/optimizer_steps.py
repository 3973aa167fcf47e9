"""Step counts of optimizers in a checkpoint, compared without torch.

Earlier releases restored no optimizer state of a parameter on ranks without rows of it, from the
global tier. Such a rank counted from 1 again, and a later save may have stored its count for all.
"""

import io
import pickletools
import struct
import zipfile
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from trainer_sdk.checkpoint.storage.pickled_values import descriptions_in
from trainer_sdk.checkpoint.storage.port import ByteRange, Storage, read_ranges

_STEP = ".step"
_STATES = ".state."
_NUMBERS = {"FloatStorage": "<f", "DoubleStorage": "<d", "LongStorage": "<q", "IntStorage": "<i"}
_LOCAL_HEADER = 30
"""The size of a local header in a zip file, without names."""


class _StepCount(NamedTuple):
    key: str
    place: ByteRange
    is_rowless: bool
    """Whether a rank that saved had no rows of the parameter."""


def doubt_about_steps(storage: Storage, folder: str, described: str) -> str:
    """Why step counts may be wrong; empty if they look right. `described` is torch's metadata."""
    inside = f"{folder}/{described}".rpartition("/")[0]
    counts = list(_step_counts(storage.read(f"{folder}/{described}"), inside))
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
        if all(getattr(kind, "size", (0,))) and any(0 in chunk.sizes for chunk in kind.chunks)
    }
    for index, place in places.items():
        if index.fqn.endswith(_STEP) and not getattr(kinds.get(index.fqn), "size", ()):
            where = ByteRange(f"{inside}/{place.relative_path}", place.offset, place.length)
            yield _StepCount(index.fqn, where, index.fqn.removesuffix(_STEP) in rowless)


def _number(octets: bytes) -> float | None:
    """The number in the output of `torch.save`, for a number or for a tensor of one."""
    with zipfile.ZipFile(io.BytesIO(octets)) as archive:
        by_name = {member.filename.partition("/")[2]: member for member in archive.infolist()}
        pickled = archive.read(by_name["data.pkl"])
        for opcode, argument, _ in pickletools.genops(pickled):
            if opcode.name == "GLOBAL" and (form := _NUMBERS.get(str(argument).split(" ")[-1])):
                # The checksums of tensors are not set, so this cannot be read by `archive`.
                begin = by_name["data/0"].header_offset
                names = sum(struct.unpack_from("<HH", octets, begin + _LOCAL_HEADER - 4))
                return float(struct.unpack_from(form, octets, begin + _LOCAL_HEADER + names)[0])
            if opcode.name in ("BININT", "BININT1", "BININT2", "BINFLOAT"):
                return float(str(argument))
    return None
