"""Whether what was saved fits into the live state, before anything of it is touched."""

import io
from collections.abc import Collection, Mapping
from typing import Any

import torch

from trainer_sdk.checkpoint.restore.errors import UnfitError
from trainer_sdk.checkpoint.restore.target import Target

Form = tuple[torch.dtype, tuple[int, ...]]
"""Of a tensor."""
_NAMED = 3


def check_fit(
    target: Target, wanted: Mapping[str, Form], saved: Mapping[str, Form], others: Collection[str]
) -> None:
    """Every value of the live state has its like among those saved, and no tensor is left over.

    `others` are the saved values that are no tensors.
    """
    plain = target.values.keys() - target.tensors.keys()
    lacking = [one for one in wanted if one not in saved and not target.is_optional(one)]
    lacking += [one for one in plain if one not in others and not target.is_optional(one)]
    for key in lacking:
        if target.is_of_one_world(key):
            raise UnfitError(
                f"{key.partition('.')[0]} has a place for each rank, and was saved by another "
                "number of ranks: restore with that number, use PositionedSampler, or leave it "
                "out of the state to begin the data anew"
            )
    _refuse("lacks", lacking)
    _refuse("has, and the state to load into lacks,", [one for one in saved if one not in wanted])
    for key, form in wanted.items():
        if key in saved and saved[key] != form:
            raise UnfitError(f"{key} is {_words(saved[key])} there, and {_words(form)} here")


def check_values(target: Target, values: Mapping[str, object]) -> None:
    """Every object of the live state that can tell may go on from these."""
    why = target.why_unfit(values)
    if why:
        raise UnfitError(why)


def read_value(octets: bytes | bytearray, key: str) -> Any:
    """A value that is no tensor, if it consists of plain data and tensors."""
    try:
        return torch.load(io.BytesIO(octets), map_location="cpu", weights_only=True)
    except Exception as error:
        said = str(error).strip().partition("\n")[0]
        raise UnfitError(
            f"{key} cannot be read: {said}; numbers, texts, lists, dicts and tensors can be, "
            "objects of other classes are never"
        ) from error


def _refuse(what: str, keys: list[str]) -> None:
    if keys:
        more = f" and {len(keys) - _NAMED} more" if len(keys) > _NAMED else ""
        raise UnfitError(f"it {what} {', '.join(sorted(keys)[:_NAMED])}{more}")


def _words(form: Form) -> str:
    dtype, shape = form
    return f"{str(dtype).removeprefix('torch.')}[{', '.join(map(str, shape))}]"
