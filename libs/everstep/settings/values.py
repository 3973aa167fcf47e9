"""Converts written values to the types of settings, and describes the values expected."""

import types
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Union, get_args, get_origin

import msgspec
from msgspec import inspect

from everstep.settings.schema import Leaf, SettingsError, shown

_TRUE = frozenset({"true", "yes", "on", "1"})
_FALSE = frozenset({"false", "no", "off", "0"})


def converted(leaf: Leaf, given: object, origin: str, *, is_text: bool) -> object:
    """The value of a setting. Raises `SettingsError` with what was given, where, and expected.

    `is_text` is for the environment, where everything is text and the type says what it means.
    """
    value = given
    try:
        value = _read(leaf.type, given) if is_text and isinstance(given, str) else given
        return msgspec.convert(value, leaf.type, dec_hook=_path)
    except (msgspec.MsgspecError, ValueError) as error:
        expected = expects(leaf.type)
        if _is_table(without_none(leaf.type)[0]):
            inner = _wrong_within(leaf.type, value) if isinstance(value, dict) else None
            if inner is not None:
                raise SettingsError(f"{leaf.key}{inner[0]} ({origin}): {inner[1]}") from error
            expected += f"{', as JSON' if is_text else ''} ({error})"
        raise SettingsError(
            f"{leaf.key} = {shown(leaf.key, given)!r} ({origin}): expected {expected}"
        ) from error


def _wrong_within(of: Any, table: Mapping[str, object]) -> tuple[str, str] | None:
    """The place of the first wrong value in a table, with the value, and what is wrong there."""
    base, _ = without_none(of)
    if get_origin(base) in {dict, Mapping}:
        types_by_key = dict.fromkeys(table, get_args(base)[1])
    elif isinstance(base, type) and issubclass(base, msgspec.Struct):
        types_by_key = {field.encode_name: field.type for field in msgspec.structs.fields(base)}
    else:
        return None
    for key, value in table.items():
        if key not in types_by_key:
            near = get_close_matches(key, types_by_key, 1)
            hint = f"did you mean {near[0]}?" if near else f"there is {', '.join(types_by_key)}"
            return f".{key}", f"it is not a setting; {hint}"
        try:
            msgspec.convert(value, types_by_key[key], dec_hook=_path)
        except (msgspec.MsgspecError, ValueError) as error:
            inner = _wrong_within(types_by_key[key], value) if isinstance(value, dict) else None
            if inner is not None:
                return f".{key}{inner[0]}", inner[1]
            if isinstance(value, dict):
                return f".{key}", str(error).partition(" - at ")[0]
            return f".{key} = {shown(key, value)!r}", f"expected {expects(types_by_key[key])}"
    return None


def expects(of: Any) -> str:
    """Which values a type allows, in words."""
    base, optional = without_none(of)
    if base is Path:
        words = "a path"
    elif get_origin(base) in {tuple, list}:
        words = f"a list, each {expects(get_args(base)[0])}"
    else:
        words = _words(inspect.type_info(base))
    return f"{words}, or nothing" if optional else words


def without_none(of: Any) -> tuple[Any, bool]:
    """`X, True` for `X | None`, else the type itself and False."""
    if get_origin(of) in {Union, types.UnionType}:
        rest = [part for part in get_args(of) if part is not type(None)]
        if len(rest) == 1:
            return rest[0], len(rest) < len(get_args(of))
    return of, False


def _read(of: Any, text: str) -> object:
    """The value of this text for a type. Raises ValueError when it has none."""
    base, optional = without_none(of)
    text = text.strip()
    if optional and text.lower() in {"", "none"}:
        return None
    if get_origin(base) in {tuple, list}:
        item = get_args(base)[0]
        if text.startswith("["):
            return msgspec.json.decode(text)
        return [_read(item, part) for part in text.split(",")] if text else []
    return text if base is Path else _read_scalar(inspect.type_info(base), text)


def _read_scalar(info: inspect.Type, text: str) -> object:
    match info:
        case inspect.Metadata(type=inner):
            return _read_scalar(inner, text)
        case inspect.BoolType():
            if text.lower() not in _TRUE | _FALSE:
                raise ValueError(text)
            return text.lower() in _TRUE
        case inspect.IntType():
            return int(text)
        case inspect.FloatType():
            return float(text)
        case inspect.DictType() | inspect.StructType():
            return msgspec.json.decode(text)
        case _:
            return text


def _is_table(of: Any) -> bool:
    return of is not Path and isinstance(
        inspect.type_info(of), inspect.DictType | inspect.StructType
    )


def _path(of: type, value: object) -> object:
    if of is Path and isinstance(value, str | Path) and str(value) and "\0" not in str(value):
        try:
            return Path(value).expanduser()
        except RuntimeError as error:  # `~nobody`
            raise ValueError(value) from error
    raise ValueError(value)


def _words(info: inspect.Type) -> str:
    match info:
        case inspect.Metadata(type=inner):
            words = _words(inner)
        case inspect.BoolType():
            words = "true or false"
        case inspect.IntType():
            words = f"a whole number{_bounds(info)}"
        case inspect.FloatType():
            words = f"a number{_bounds(info)}"
        case inspect.StrType(pattern=pattern):
            words = f"text that matches {pattern}" if pattern else "text"
        case inspect.LiteralType(values=values):
            words = "one of " + ", ".join(str(value) for value in values)
        case inspect.EnumType(cls=cls):
            words = "one of " + ", ".join(str(member.value) for member in cls)
        case _:
            words = "a table"
    return words


def _bounds(info: inspect.IntType | inspect.FloatType) -> str:
    bounds = (("at least", info.ge), ("above", info.gt), ("at most", info.le), ("below", info.lt))
    limits = [f"{word} {bound:g}" for word, bound in bounds if bound is not None]
    return f", {' and '.join(limits)}" if limits else ""
