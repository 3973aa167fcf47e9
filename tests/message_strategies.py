"""Any message, whole and damaged, for tests that send what nobody should."""

import types
import typing
from collections.abc import Mapping
from datetime import UTC, datetime

import msgspec
from hypothesis import strategies as st

CHARACTERS = st.characters(exclude_characters="\0", exclude_categories=["Cs"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)


def strategy_for(hint: object) -> st.SearchStrategy[object]:
    """Any value of a type that messages use."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return st.one_of([strategy_for(argument) for argument in arguments])
    if origin is typing.Annotated:
        return _within(arguments[0], arguments[1])
    if origin is tuple:
        if arguments[1:] == (...,):
            return st.lists(strategy_for(arguments[0]), max_size=2).map(tuple)
        return st.tuples(*(strategy_for(argument) for argument in arguments))
    if origin is Mapping:
        return st.dictionaries(*(strategy_for(argument) for argument in arguments), max_size=2)
    return structs(hint) if _is_struct(hint) else _plain(hint)


def _within(plain: object, bounds: msgspec.Meta) -> st.SearchStrategy[object]:
    if bounds.pattern is not None:
        return st.from_regex(bounds.pattern, fullmatch=True)
    if plain is float:
        return st.floats(bounds.ge, bounds.le)
    if plain is int:
        return st.integers(int(bounds.ge or 0), int(bounds.le or 0))
    return strategy_for(plain)


def _is_struct(hint: object) -> typing.TypeGuard[type[msgspec.Struct]]:
    return isinstance(hint, type) and issubclass(hint, msgspec.Struct)


def _plain(hint: object) -> st.SearchStrategy[object]:
    plain: dict[object, st.SearchStrategy[object]] = {
        str: st.text(CHARACTERS, max_size=10),
        int: st.integers(-(2**63), 2**63 - 1),
        float: st.floats(allow_nan=False, allow_infinity=False),
        bool: st.booleans(),
        datetime: st.datetimes(datetime(1970, 1, 2), datetime(2999, 1, 1), timezones=st.just(UTC)),  # noqa: DTZ001
        types.NoneType: st.none(),
    }
    return plain[hint]


def structs(struct: type[msgspec.Struct]) -> st.SearchStrategy[msgspec.Struct]:
    """Any instance, with any of its optional fields left out."""
    hints = typing.get_type_hints(struct, include_extras=True)
    fields = msgspec.structs.fields(struct)
    required = {f.name: strategy_for(hints[f.name]) for f in fields if f.required}
    optional = {f.name: strategy_for(hints[f.name]) for f in fields if not f.required}
    return st.fixed_dictionaries(required, optional=optional).map(lambda kw: struct(**kw))
