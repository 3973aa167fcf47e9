"""What the code itself says about its messages: meanings, types and subjects."""

import ast
import inspect
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TypeAlias

import msgspec

from everstep import subjects
from everstep.messages.base import DocumentBody, Fact, Message, Order, Part, kind_of
from everstep.messages.beats.progress import NodeBeat
from everstep.messages.beats.timings import NodeTimings
from everstep.messages.documents.buckets import BUCKETS
from everstep.messages.questions.asks import ASKS

Described: TypeAlias = type[msgspec.Struct]
"""A message, a part of one, or a base of messages."""


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a message, as a person must know it."""

    name: str
    hint: object
    is_required: bool
    default: object
    """None where there is none, too: see `is_required`."""
    meaning: str
    owner: type
    """The class that declares it."""


@cache
def fields_of(struct: Described) -> tuple[Field, ...]:
    """The fields in their order on the wire."""
    hints = typing.get_type_hints(struct)
    return tuple(
        Field(
            name=field.name,
            hint=hints[field.name],
            is_required=field.required,
            default=None if field.required else field.default,
            meaning=_meaning(struct, field.name),
            owner=_owner(struct, field.name),
        )
        for field in msgspec.structs.fields(struct)
    )


def summary_of(struct: type) -> str:
    """The first line of its docstring."""
    return (inspect.getdoc(struct) or "").partition("\n")[0]


def type_name(hint: object) -> str:
    """A type as Python writes it, without modules: `tuple[Member, ...] | None`."""
    arguments = typing.get_args(hint)
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return " | ".join(type_name(argument) for argument in arguments)
    if hint is types.NoneType:
        return "None"
    if hint is ...:
        return "..."
    if not arguments:
        return hint.__name__ if isinstance(hint, type) else str(hint)
    origin = str(getattr(typing.get_origin(hint), "__name__", ""))
    return f"{origin}[{', '.join(type_name(argument) for argument in arguments)}]"


def parts_of(structs: Iterable[Described]) -> list[type[Part]]:
    """All parts within these, each once, in the order of their first use."""
    seen: dict[type[Part], None] = {}
    waiting: list[Described] = list(structs)
    while waiting:
        parts = [part for part in _parts_in(waiting.pop(0)) if part not in seen]
        seen.update(dict.fromkeys(parts))
        waiting += parts
    return list(seen)


def subjects_of(message: type[Message]) -> list[str]:
    """Where it travels, with `{job}`, `{node}` and `{key}` as placeholders."""
    if issubclass(message, Fact):
        return [_template(subjects.fact("JOB", kind_of(message)))]
    if issubclass(message, Order):
        return [_template(subjects.order("JOB", "NODE")), _template(subjects.order("JOB"))]
    if message is NodeBeat:
        return [_template(subjects.beat("JOB", "NODE"))]
    if message is NodeTimings:
        return [_template(subjects.timing("JOB", "NODE"))]
    if issubclass(message, DocumentBody):
        return [bucket_subject(b.name) for b in BUCKETS if b.holds is message]
    return [ask_subject(ask.service, ask.verb) for ask in ASKS if ask.question is message]


def ask_subject(service: str, verb: str) -> str:
    """Where a question is asked."""
    return _template(subjects.ask(service, verb, "JOB"))


def bucket_subject(bucket: str) -> str:
    """Where the new revisions of a bucket's documents are announced."""
    return _template(subjects.document_news(bucket, "KEY"))


def _template(subject: str) -> str:
    tokens = subject.split(".")
    holders = {"JOB": "{job}", "NODE": "{node}", "KEY": "{key}"}
    return ".".join(holders.get(token, token) for token in tokens)


def _parts_in(struct: Described) -> Iterator[type[Part]]:
    for field in fields_of(struct):
        yield from (part for part in _classes_in(field.hint) if issubclass(part, Part))


def _classes_in(hint: object) -> Iterator[type]:
    if isinstance(hint, type) and not typing.get_args(hint):
        yield hint
    for argument in typing.get_args(hint):
        yield from _classes_in(argument)


def _owner(struct: type, name: str) -> type:
    return next(base for base in struct.__mro__ if name in inspect.get_annotations(base))


def _meaning(struct: type, name: str) -> str:
    documented = (
        _docs_in(base.__module__).get(base.__name__, {}).get(name) for base in struct.__mro__[:-1]
    )
    return next((meaning for meaning in documented if meaning), "")


@cache
def _docs_in(module: str) -> Mapping[str, Mapping[str, str]]:
    """The string below each attribute, by class and attribute: Python itself drops it."""
    if not module.startswith("everstep."):
        return {}
    tree = ast.parse(inspect.getsource(__import__(module, fromlist=["_"])))
    return {node.name: _docs_below(node) for node in tree.body if isinstance(node, ast.ClassDef)}


def _docs_below(class_: ast.ClassDef) -> dict[str, str]:
    docs: dict[str, str] = {}
    for statement, below in zip(class_.body, class_.body[1:], strict=False):
        match statement, below:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                docs[name] = inspect.cleandoc(text)
            case _:
                pass
    return docs
