"""Torch's `.metadata`, read as data: only torch's own descriptions are made, by their classes."""

from collections import OrderedDict
from dataclasses import fields
from pathlib import PurePosixPath
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata

from trainer_sdk.bootstrap.garbage_collection import collector_paused
from trainer_sdk.checkpoint.restore.errors import UnfitError
from trainer_sdk.checkpoint.storage.pickle_data import (
    NAMED,
    DescribedCall,
    Pairs,
    ReadBudget,
    TreeBuilder,
    UnreadableBytesError,
)
from trainer_sdk.checkpoint.storage.pickled_values import parsed_metadata
from trainer_sdk.checkpoint.value_kinds import dtype_of, expect, layout_of, size_of

_MODULE = "torch.distributed.checkpoint"
_DESCRIPTIONS: dict[str, Any] = {
    f"{_MODULE}.filesystem._StorageInfo": filesystem._StorageInfo,  # noqa: SLF001 - what torch writes
    **{
        f"{_MODULE}.metadata.{name}": getattr(metadata, name)
        for name in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorStorageMetadata",
        )
    },
}
_PROPERTIES = f"{_MODULE}.metadata.TensorProperties"
_FORM = f"{_MODULE}.metadata._MEM_FORMAT_ENCODING"
_FIELDS = {kind: [field.name for field in fields(kind)] for kind in _DESCRIPTIONS.values()}
_FORMS = (torch.contiguous_format, torch.channels_last, torch.preserve_format)
"""By torch's number for them."""


def read_metadata(octets: bytes, place: str) -> metadata.Metadata:
    """What torch has described; `UnfitError` if there is anything else in it."""
    try:
        with collector_paused():  # a tree has no cycles: a look for them is a third of the time
            described: metadata.Metadata = TreeBuilder(_made, ReadBudget.of(len(octets))).build(
                parsed_metadata(octets)
            )
    except (UnreadableBytesError, MemoryError) as error:
        raise UnfitError(f"{place} cannot be read: {error}") from error
    if type(described.storage_data) is not dict or type(described.state_dict_metadata) is not dict:
        raise UnfitError(f"{place} is not what torch writes there")
    return described


def _made(call: DescribedCall, builder: TreeBuilder) -> Any:  # noqa: PLR0911 - one for each description
    if (kind := _DESCRIPTIONS.get(call.name)) is not None:
        return _description(kind, call.state, builder)
    if call.name == _PROPERTIES:
        dtype, layout, requires_grad, form, pinned = expect(builder.build(call.state), tuple)
        return metadata.TensorProperties(
            expect(dtype, torch.dtype),
            expect(layout, torch.layout),
            expect(requires_grad, bool),
            form,
            expect(pinned, bool),
        )
    if call.name == "torch.Size":
        builder.budget.spend(len(call.args[0]))  # type: ignore[arg-type]
        return size_of(*call.args[0])  # type: ignore[misc]  # it refuses all but integers
    if call.name == _FORM:
        return _FORMS[expect(call.args[0], int)]
    if call.name == NAMED:
        return dtype_of(expect(call.args[0], str).removeprefix("torch."))
    if call.name == "torch.serialization._get_layout":
        return layout_of(*map(str, call.args))
    args = builder.each(call.args)
    if call.name == "collections.OrderedDict":
        return builder.mapping(call.pairs, OrderedDict(*args))
    return PurePosixPath(*args)


def _description(kind: Any, state: object, builder: TreeBuilder) -> Any:
    pairs = state.pairs if type(state) is Pairs else []
    if pairs[::2] == _FIELDS[kind]:
        return kind(*builder.each(pairs[1::2]))
    named = Pairs(pairs).fields()
    expected = [key for key in _FIELDS[kind] if key in named]  # a later torch may describe more
    values = builder.each([named[key] for key in expected])
    return kind(**dict(zip(expected, values, strict=True)))
