"""Writes an example of each message as this release encodes it; never over one that exists.

Golden files are what older releases wrote. To change one of a release that is not out yet,
delete it first; those of a release that is out are never touched.
"""

import sys
import types
import typing
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

import msgspec

import everstep
from everstep.messages import MESSAGE_TYPES, Message, encode

GOLDEN = Path(__file__).parent / "golden"
_TEXTS = {
    "id": "0193aefc11e25f0a8c7d4b6e9f201c3d",
    "job": "vit-l-0412",
    "source": "agent/node-07",
    "node": "node-07",
    "reason": "rank 7 was silent for 31.2 s, limit 30 s — „naïve“ \U0001f980",
}


def example(message: type[Message]) -> Message:
    """An instance with every field set to something other than its default."""
    made = _struct(message)
    assert isinstance(made, Message)
    return made


def _struct(struct: type[msgspec.Struct]) -> msgspec.Struct:
    hints = typing.get_type_hints(struct)
    defaults = {field.name: field.default for field in msgspec.structs.fields(struct)}
    return struct(
        **{
            name: not default
            if hints[name] is bool and default is not msgspec.NODEFAULT
            else _value(name, hints[name])
            for name, default in defaults.items()
        }
    )


def _value(name: str, hint: object) -> object:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return _value(name, next(a for a in arguments if a is not types.NoneType))
    if origin is tuple:
        return tuple(_value(name, argument) for argument in arguments if argument is not ...)
    if origin is Mapping:
        return {"team": "vision"}
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return _struct(hint)
    plain: dict[object, object] = {
        str: _TEXTS.get(name, f"some {name}"),
        int: 7,
        float: 2.5,
        bool: True,
        datetime: datetime(2026, 11, 21, 7, 41, 44, 706326, tzinfo=UTC),
    }
    return plain[hint]


def main() -> int:
    """Exit code 1 when a file exists and says something else."""
    folder = GOLDEN / everstep.__version__
    folder.mkdir(parents=True, exist_ok=True)
    refused = []
    for message in MESSAGE_TYPES:
        path, data = folder / f"{message.__name__}.json", encode(example(message))
        if not path.exists():
            path.write_bytes(data)
        elif path.read_bytes() != data:
            refused.append(path.name)
    if refused:
        print("exists and differs, not overwritten: " + ", ".join(refused), file=sys.stderr)
    return 1 if refused else 0


if __name__ == "__main__":
    sys.exit(main())
