"""Whether the files of a checkpoint have what torch's metadata describes, as a restore reads it."""

from collections.abc import Mapping, Sequence

from trainer_sdk.checkpoint.manifest import METADATA
from trainer_sdk.checkpoint.storage.pickle_data import UnreadableBytesError
from trainer_sdk.checkpoint.storage.pickled_values import StoredPlace, descriptions_in, why_unread
from trainer_sdk.checkpoint.storage.port import (
    ByteRange,
    Storage,
    StorageError,
    read_metadata,
    read_ranges,
)

ADOPTED = "adopted"
"""The layout of a checkpoint whose bytes torch alone has written."""
_ZIP, _ZIP_END, _ZIP_TAIL = b"PK\3\4", b"PK\5\6", 22
"""How a saved tensor begins, how its last record begins, and the size of that."""


def content_flaw(
    storage: Storage, described: str, sizes: Mapping[str, int], *, is_adopted: bool
) -> str:
    """What a restore would not find, or would refuse; empty if all is there.

    `described` names torch's metadata, and `sizes` are those of all files.
    """
    inside, place = described.removesuffix(METADATA), f"{storage.url}/{described}"
    try:
        kinds, places = descriptions_in(read_metadata(storage, described))
        places = [part._replace(file=inside + part.file) for part in places]
        for key, file, begin, length in places:
            if begin + length > sizes.get(file, 0):
                there = f"has {sizes[file]} bytes" if file in sizes else "is missing"
                return (
                    f"{storage.url}/{file} {there}, and {key} in it ends at {begin + length} by "
                    f"{METADATA}: the checkpoint is not whole"
                )
        values = [at for at in places if at.key in kinds and not kinds[at.key].is_tensor]
        for number, octets in read_ranges(storage, [ByteRange(*at[1:]) for at in values]):
            if why := why_unread(bytes(octets)):
                return f"{values[number].key} of {place} cannot be restored: {why}"
        tensors = [at for at in places if at.key not in kinds or kinds[at.key].is_tensor]
        return _tensor_flaw(storage, tensors) if is_adopted else ""
    except UnreadableBytesError as error:
        return f"{place} cannot be read by a restore: {error}"
    except StorageError as error:
        return str(error)


def _tensor_flaw(storage: Storage, places: Sequence[StoredPlace]) -> str:
    """The tensor whose begin or end was not written, though the file has its full length."""
    ranges = [
        ByteRange(file, at, min(length, len(_ZIP)))
        for _, file, begin, length in places
        for at in (begin, begin + max(0, length - _ZIP_TAIL))
    ]
    ends = {number: bytes(octets) for number, octets in read_ranges(storage, ranges)}
    for number, (key, file, *_) in enumerate(places):
        begun, ended = ends[2 * number], ends[2 * number + 1]
        if not any(begun) or (begun == _ZIP) != (ended == _ZIP_END):
            return (
                f"{storage.url}/{file} was written incompletely: the begin or end of {key} is "
                f"missing"
            )
    return ""
