"""The registry of messages is complete, and every message keeps the house rules."""

import inspect
import re
import types
import typing
from collections.abc import Iterator, Mapping
from datetime import datetime

import msgspec
import pytest

from docs.generators import message_description
from everstep import messages
from everstep.messages import (
    ASKS,
    BUCKETS,
    FACTS,
    MESSAGE_TYPES,
    DocumentBody,
    Fact,
    Message,
    Question,
    Reply,
    kind_of,
    tag_of,
)

PLAIN_FLOATS = {"confidence", "high", "low", "value", "weight", "first", "elsewhere", "largest"}
SIZE_WORDS = {
    *("size", "memory", "bytes", "duration", "timeout", "time", "wait", "waited", "age"),
    *("silence", "grace", "lag", "ttl", "elapsed", "delay", "resident"),
}
IMMUTABLE = (str, int, float, bool, tuple, types.NoneType)
PLAIN: set[type] = {str, int, float, bool, datetime, types.NoneType}
CONTAINERS = {None, tuple, Mapping, types.UnionType, typing.Union}
STRUCTS = [*MESSAGE_TYPES, *message_description.parts_of(MESSAGE_TYPES)]


def problems_of(struct: type[msgspec.Struct]) -> list[str]:
    """Every house rule that a message, or a part of one, breaks."""
    found = [] if own_doc(struct) else ["no docstring"]
    config = struct.__struct_config__
    if not (config.frozen and config.omit_defaults):
        found.append("not frozen, or sends defaults")
    if issubclass(struct, Message):
        found += tag_problems(struct)
    for field in msgspec.structs.fields(struct):
        hint = typing.get_type_hints(struct)[field.name]
        found += [f"{field.name}: {problem}" for problem in field_problems(field, hint)]
    undocumented = [f.name for f in message_description.fields_of(struct) if not f.meaning]
    return found + [f"{name}: no docstring" for name in undocumented]


def own_doc(struct: type) -> str:
    return inspect.cleandoc(struct.__dict__.get("__doc__") or "")


def tag_problems(message: type[Message]) -> Iterator[str]:
    snake = re.sub(r"(?<!^)(?=[A-Z])", "_", message.__name__).lower()
    if not re.fullmatch(rf"{snake}\.v[1-9][0-9]*", tag_of(message)):
        yield f"tag {tag_of(message)} is not {snake}.v1"


def field_problems(field: msgspec.structs.FieldInfo, hint: object) -> Iterator[str]:
    has_factory = field.default_factory is not msgspec.NODEFAULT
    if has_factory or not isinstance(field.default, (*IMMUTABLE, type(msgspec.NODEFAULT))):
        yield "default is mutable"
    if int in flat(hint) and not re.search(
        r"le=(9223372036854775807|9007199254740991|4503599627370496)", str(field.type)
    ):
        yield "a bare int: use Int or Count"
    if float in flat(hint) and not re.search(r"le=1e\+?1[08]|le=10000000000.0", str(field.type)):
        yield "a float without bounds"
    yield from unit_problems(field.name, hint)
    if bool in flat(hint) and not re.match(
        r"is_|are_|has_|then_|save_|again|warm|core_", field.name
    ):
        yield "does not read as a claim"
    if not all(kind in PLAIN or issubclass(kind, msgspec.Struct) for kind in flat(hint)):
        yield "neither plain nor a part"
    if typing.get_origin(hint) not in CONTAINERS:
        yield "neither a tuple nor a Mapping"


def unit_problems(name: str, hint: object) -> Iterator[str]:
    if typing.get_origin(hint) not in (None, types.UnionType, typing.Union):
        return  # a container is named for what it holds
    kinds = flat(hint)
    has_unit = re.search(r"_(s|bytes|ratio|score|watts|celsius)$|world_size$", name)
    if float in kinds and not has_unit and name not in PLAIN_FLOATS:
        yield "a float without a unit"
    if int in kinds and not has_unit and SIZE_WORDS & set(name.split("_")):
        yield "a size or duration without a unit"


def flat(hint: object) -> set[type]:
    """The plain classes in a type."""
    inner = [argument for argument in typing.get_args(hint) if argument is not ...]
    if not inner:
        assert isinstance(hint, type), hint
        return {hint}
    return set[type]().union(*(flat(argument) for argument in inner))


@pytest.mark.parametrize("struct", STRUCTS, ids=lambda s: s.__name__)
def test_every_message_keeps_the_house_rules(struct: type[msgspec.Struct]) -> None:
    assert problems_of(struct) == []


class Sloppy(Message, frozen=True, kw_only=True, tag="sloppy_thing.1"):
    timeout: int
    elapsed: float
    labels: dict[str, str] = {}  # noqa: RUF012  that is what is wrong with it
    ready: bool = False
    anything: object = None


def test_the_house_rules_find_what_they_look_for() -> None:
    assert {problem.partition(" is not")[0] for problem in problems_of(Sloppy)} >= {
        "no docstring",
        "tag sloppy_thing.1",
        "timeout: a bare int: use Int or Count",
        "timeout: a size or duration without a unit",
        "elapsed: a float without a unit",
        "labels: default is mutable",
        "labels: neither a tuple nor a Mapping",
        "ready: does not read as a claim",
        "anything: neither plain nor a part",
        "timeout: no docstring",
    }


def test_the_registry_is_complete() -> None:
    ours = [m for m in below(Message) if m.__module__.startswith("everstep.")]
    tagged = {m for m in ours if "." in tag_of(m)}
    assert tagged == set(MESSAGE_TYPES)
    bases = {m.__name__ for m in ours} - {m.__name__ for m in tagged}
    assert bases == {
        *("Fact", "RoundFact", "RankFact", "IncidentFact", "NumericsFact"),
        *("Order", "Question", "Reply", "DocumentBody"),
    }, "a message without a tag"
    assert set(FACTS) == {m for m in MESSAGE_TYPES if issubclass(m, Fact)}
    assert {m.__name__ for m in STRUCTS} <= set(vars(messages))


def below(base: type[Message]) -> Iterator[type[Message]]:
    for child in base.__subclasses__():
        yield child
        yield from below(child)


def test_a_kind_names_one_fact_only() -> None:
    tags = [tag_of(message) for message in MESSAGE_TYPES]
    assert len(set(tags)) == len(tags)
    kinds = [kind_of(fact) for fact in FACTS]
    assert len(set(kinds)) == len(kinds)
    assert len({m.__name__ for m in STRUCTS}) == len(STRUCTS)


def test_every_question_is_asked_and_every_reply_answers() -> None:
    assert {ask.question for ask in ASKS} == only(Question)
    assert {ask.reply for ask in ASKS} >= only(Reply)
    assert len({(ask.service, ask.verb) for ask in ASKS}) == len(ASKS)
    assert {bucket.holds for bucket in BUCKETS} == only(DocumentBody)


def only(base: type[Message]) -> set[type[Message]]:
    return {message for message in MESSAGE_TYPES if issubclass(message, base)}
