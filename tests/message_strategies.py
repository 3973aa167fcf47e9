"""Any message, whole and damaged, for tests that send what nobody should."""

import types
import typing
from collections.abc import Mapping
from datetime import UTC, datetime

import msgspec
from hypothesis import strategies as st

from everstep.messages.base import Count

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
        return st.integers(0, 2**53 - 1) if hint == Count else strategy_for(arguments[0])
    if origin is tuple:
        if arguments[1:] == (...,):
            return st.lists(strategy_for(arguments[0]), max_size=2).map(tuple)
        return st.tuples(*(strategy_for(argument) for argument in arguments))
    if origin is Mapping:
        return st.dictionaries(*(strategy_for(argument) for argument in arguments), max_size=2)
    return structs(hint) if _is_struct(hint) else _plain(hint)


def _is_struct(hint: object) -> typing.TypeGuard[type[msgspec.Struct]]:
    return isinstance(hint, type) and issubclass(hint, msgspec.Struct)


def _plain(hint: object) -> st.SearchStrategy[object]:
    plain: dict[object, st.SearchStrategy[object]] = {
        str: st.text(max_size=10),
        int: st.integers(-(2**63), 2**63 - 1),
        float: st.floats(allow_nan=False, allow_infinity=False),
        bool: st.booleans(),
        datetime: st.datetimes(timezones=st.just(UTC)),
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
