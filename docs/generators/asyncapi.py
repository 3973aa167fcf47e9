"""The bus as an AsyncAPI 3.0 document, made from the code."""

import inspect
from collections.abc import Iterable, Mapping
from typing import TypeAlias

import msgspec

import everstep
from docs.generators.message_description import (
    Described,
    ask_subject,
    bucket_subject,
    fields_of,
    parts_of,
    subjects_of,
    summary_of,
)
from everstep.messages.base import DocumentBody, Fact, Message, Order, Question, Reply, tag_of
from everstep.messages.documents.buckets import BUCKETS
from everstep.messages.questions.asks import ASKS
from everstep.messages.registry import MESSAGE_TYPES

Json: TypeAlias = "Mapping[str, Json] | list[Json] | str | int | float | bool | None"
Node: TypeAlias = dict[str, Json]

_ABOUT = """What Everstep's processes say to each other over NATS.

Operations are Everstep's own: it sends beats, facts, orders and news of documents, which a
program on the bus may hear; and it receives questions, which such a program may ask.

Messages are JSON. The field `type` names the message and its version. Fields are only ever
added: ignore those that you do not know, and values of a string that you do not know.
"""
_PARAMETERS: Mapping[str, str] = {
    "job": "The id of a job, or `_cluster` for what belongs to no job.",
    "node": "The id of a node.",
    "key": "The key of the document: the id of a job, or `_cluster`.",
}


def document() -> Node:
    """The whole document, the same for the same release."""
    channels: Node = {}
    operations: Node = {}
    _add_sent(channels, operations)
    _add_asked(channels, operations)
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": "Everstep",
            "version": everstep.__version__,
            "description": _ABOUT,
            "license": {"name": "Apache-2.0"},
        },
        "defaultContentType": "application/json",
        "channels": channels,
        "operations": operations,
        "components": {
            "messages": {message.__name__: _message(message) for message in MESSAGE_TYPES},
            "schemas": _schemas(),
        },
    }


def _add_sent(channels: Node, operations: Node) -> None:
    """Beats, timings, facts, orders and documents: one channel for each subject."""
    on_subject: dict[str, list[type[Message]]] = {}
    for message in MESSAGE_TYPES:
        if not issubclass(message, Question | Reply):
            for subject in subjects_of(message):
                on_subject.setdefault(subject, []).append(message)
    for subject, messages in on_subject.items():
        name = _channel_name(subject)
        channels[name] = _channel(subject, messages, _channel_about(messages[0]))
        operations[f"send.{name}"] = _operation("send", name, messages)


def _add_asked(channels: Node, operations: Node) -> None:
    """Questions, each with a channel for its reply, whose address the asker chooses."""
    for ask in ASKS:
        subject = ask_subject(ask.service, ask.verb)
        name = _channel_name(subject)
        channels[name] = _channel(subject, [ask.question], f"Questions to {ask.service}.")
        channels[f"{name}.reply"] = _channel(
            None, [ask.reply], "The inbox that the question names: NATS request-reply."
        )
        operation = _operation("receive", name, [ask.question])
        operation["reply"] = {
            "channel": _ref("channels", f"{name}.reply"),
            "messages": [_ref("channels", f"{name}.reply", "messages", ask.reply.__name__)],
        }
        operations[f"receive.{name}"] = operation


def _channel(subject: str | None, messages: Iterable[type[Message]], about: str) -> Node:
    channel: Node = {
        "address": subject,
        "description": about,
        "messages": {m.__name__: _ref("components", "messages", m.__name__) for m in messages},
    }
    parameters: Node = {
        name: {"description": meaning}
        for name, meaning in _PARAMETERS.items()
        if f"{{{name}}}" in (subject or "")
    }
    return channel | ({"parameters": parameters} if parameters else {})


def _channel_about(message: type[Message]) -> str:
    if issubclass(message, Fact):
        return "Kept: JetStream stream FACTS, with the fact's id as Nats-Msg-Id."
    if issubclass(message, Order):
        return "Not kept: the truth is in ROUNDS, and an agent reads it on each connect."
    if issubclass(message, DocumentBody):
        bucket = next(b for b in BUCKETS if b.holds is message)
        news = bucket_subject(bucket.name)
        return f"Each new revision in the KV bucket {bucket.name} (key: {bucket.key}): {news}."
    return "Not kept, and losable."


def _operation(action: str, channel: str, messages: Iterable[type[Message]]) -> Node:
    return {
        "action": action,
        "channel": _ref("channels", channel),
        "messages": [_ref("channels", channel, "messages", m.__name__) for m in messages],
    }


def _message(message: type[Message]) -> Node:
    return {
        "name": tag_of(message),
        "title": message.__name__,
        "summary": summary_of(message),
        "description": inspect.getdoc(message) or "",
        "contentType": "application/json",
        "payload": _ref("components", "schemas", message.__name__),
    }


def _schemas() -> Node:
    _, schemas = msgspec.json.schema_components(
        MESSAGE_TYPES, ref_template="#/components/schemas/{name}"
    )
    structs = {struct.__name__: struct for struct in [*MESSAGE_TYPES, *parts_of(MESSAGE_TYPES)]}
    return {
        name: _with_meanings(structs[name], _as_draft_7(schema))
        for name, schema in sorted(schemas.items())
    }


def _with_meanings(struct: Described, schema: Json) -> Json:
    """The schema with the docstrings of the class and of each field."""
    assert isinstance(schema, dict)
    fields = fields_of(struct)
    told: Node = {"description": inspect.getdoc(struct) or ""}
    match schema:
        case {"properties": dict(properties)}:
            meanings = {field.name: field.meaning for field in fields}
            told["properties"] = {
                name: _described(property_, meanings.get(name, "Its name and version."))
                for name, property_ in properties.items()
            }
        case {"items": list(items)}:
            told["items"] = [
                _described(item, f"{field.name}: {field.meaning}")
                for field, item in zip(fields, items, strict=True)
            ]
        case _:
            pass
    return schema | told


def _described(schema: Json, meaning: str) -> Json:
    assert isinstance(schema, dict)
    # In draft 7, everything next to a $ref is ignored.
    inner: Node = {"allOf": [schema]} if "$ref" in schema else schema
    return inner | {"description": meaning}


def _as_draft_7(schema: object) -> Json:
    """AsyncAPI's own dialect: there, `items` with a list is what is now `prefixItems`."""
    if isinstance(schema, dict):
        kept = {key: _as_draft_7(value) for key, value in schema.items()}
        if "prefixItems" in kept:
            kept["additionalItems"] = kept.pop("items", True)
            kept["items"] = kept.pop("prefixItems")
        return kept
    if isinstance(schema, list | tuple):
        return [_as_draft_7(item) for item in schema]
    assert schema is None or isinstance(schema, str | int | float | bool)
    return schema


def _channel_name(subject: str) -> str:
    return ".".join(token.strip("{}") for token in subject.split(".")[1:])


def _ref(*path: str) -> Node:
    return {"$ref": "#/" + "/".join(path)}
