"""The messages between a rank and its writer; JSON, one a line."""

from typing import Literal

import msgspec

from trainer_sdk.checkpoint.manifest import Identity
from trainer_sdk.wire import WireLine

SaveStage = Literal["plan", "memory", "keep", "copy", "write", "hash", "publish"]
"""The stages of a save, where it is or has failed: up to `copy` in the rank, then in its writer."""
Region = tuple[int, int]
"""Offset and length in a buffer."""


class WriteState(WireLine, frozen=True, kw_only=True):
    """Make a rank's part of a checkpoint durable; rank 0's writer makes all of it visible."""

    save: int
    image: str
    """The buffer, as a file."""
    folder: str = ""
    """Its folder; empty if it is not kept."""
    identity: Identity
    rank: int
    file_bytes: int
    """The size of the shard file, from the start of the buffer."""
    image_bytes: int
    metadata: Region
    """For torch's loader; only rank 0 has it."""
    entries: Region
    """Of the image, as JSON; where it is kept."""
    root: str = ""
    """Path or URL of the global tier; empty if it is not saved there."""
    launch: str = ""
    """The process that saves, where no agent counts launches: no other may save into the root."""
    saving: str = ""
    """The name of its folder until it is visible."""
    shard: str = ""
    keep: bool = False
    """The image is kept in the memory of the node."""
    window_bytes: int = 0
    """The size of a window, where the file comes in windows; 0 if the buffer will have it all."""
    is_filling: bool = False
    """The buffer is still being filled; `BufferFilled` reports how far."""
    bytes_per_s: int = 0
    """The limit, until the training waits for the save; 0 for no limit."""
    stall_s: float = 0.0
    occasion: str = "interval"
    has_data_position: bool = False
    user: dict[str, str] = msgspec.field(default_factory=dict)
    within_s: float
    """How long to wait for the parts of other ranks."""


class BufferFilled(WireLine, frozen=True, kw_only=True, tag="filled"):
    """More of a state is in the buffer."""

    save: int
    end: int
    """All bytes before this offset are there; the image's end once the copy is checked."""
    stall_s: float = 0.0


class GiveUpSave(WireLine, frozen=True, kw_only=True, tag="giveup"):
    """The rank gives up: the rest of the state will not arrive."""

    save: int


class HurrySave(WireLine, frozen=True, kw_only=True, tag="hurry"):
    """The training waits for the save: no limit from now on."""

    save: int


class WriteFile(WireLine, frozen=True, kw_only=True):
    """Make one file durable."""

    save: int
    image: str
    size_bytes: int
    path: str
    is_hashed: bool = False
    """Whether the result has the hash of the file."""


ToWriter = WriteState | BufferFilled | GiveUpSave | HurrySave | WriteFile


class SaveProgress(WireLine, frozen=True, kw_only=True, tag="going"):
    """The writer makes progress, or waits for the parts of these ranks."""

    save: int
    stage: SaveStage
    waits_for: tuple[int, ...] = ()


class NextWindow(WireLine, frozen=True, kw_only=True, tag="nextwave"):
    """The buffer may be filled with the next window."""

    save: int


class ImageKept(WireLine, frozen=True, kw_only=True, tag="kept"):
    """The image is complete, and has its index."""

    save: int
    hash: str


class PartWritten(WireLine, frozen=True, kw_only=True, tag="written"):
    """The rank's part is durable: the buffer may be used again."""

    save: int
    size_bytes: int
    write_s: float


class SaveDone(WireLine, frozen=True, kw_only=True, tag="done"):
    """The checkpoint, or the file, is visible."""

    save: int
    place: str
    size_bytes: int = 0
    shards: int = 0
    manifest_hash: str = ""
    hash: str = ""
    """Of a single file, if the order asks for it."""
    given_up: str = ""
    """Why another complete checkpoint stays in its place; empty if this save is visible."""


class SaveFailed(WireLine, frozen=True, kw_only=True, tag="failed"):
    """A save has failed."""

    save: int
    stage: SaveStage
    reason: str
    error: str = ""
    place: str = ""


FromWriter = SaveProgress | NextWindow | ImageKept | PartWritten | SaveDone | SaveFailed
msgspec.json.Decoder(FromWriter)  # at import: see manifest.py
msgspec.json.Decoder(ToWriter)
