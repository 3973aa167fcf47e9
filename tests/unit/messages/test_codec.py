"""Messages keep their word: across releases, there and back, against hostile bytes."""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import everstep
from everstep.messages import (
    MAX_MESSAGE_BYTES,
    MESSAGE_TYPES,
    BadMessageError,
    Done,
    EncodingTooLargeError,
    Fact,
    Member,
    Message,
    NodeLost,
    RankExited,
    RoundFormed,
    UnknownMessageError,
    decode,
    decode_as,
    encode,
    envelope,
    tag_of,
)
from everstep.messages.codec import fields_with
from tests.message_strategies import JSON, structs
from tests.unit.messages import write_golden
from tests.unit.messages.write_golden import GOLDEN, example

NOW = datetime(2026, 11, 21, 7, 41, 44, 706326, tzinfo=UTC)
FILES = sorted(GOLDEN.glob("*/*.json"))
EVERY_MESSAGE = pytest.mark.parametrize("message", MESSAGE_TYPES, ids=lambda m: m.__name__)
FEW = settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])
LOST = NodeLost(
    id="0" * 32,
    job="j",
    at=NOW,
    source="health",
    round=3,
    node="node-07",
    silence_s=31.2,
    limit_s=30.0,
    reason="silent for 31.2 s, limit 30 s",
)


# --- across releases ---------------------------------------------------------------------


@pytest.mark.parametrize("path", FILES, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_bytes_of_every_release_still_say_the_same(path: Path) -> None:
    """Messages of each release are decoded (A15.3)."""
    old = path.read_bytes()
    message = decode(old)
    assert type(message).__name__ == path.stem
    assert says_all_of(json.loads(encode(message)), json.loads(old))
    if path.parent.name == everstep.__version__:
        assert encode(message) == old


def says_all_of(new: object, old: object) -> bool:
    """Whether no value is lost: a field that was renamed or dropped would lose it."""
    if isinstance(old, dict):
        return isinstance(new, dict) and all(
            key in new and says_all_of(new[key], value) for key, value in old.items()
        )
    if isinstance(old, list):
        # A part that is an array may have gained items at its end.
        return isinstance(new, list) and len(new) >= len(old) and all(map(says_all_of, new, old))
    return new == old


def test_what_was_said_and_is_gone_is_noticed() -> None:
    assert says_all_of({"a": 1, "b": [1, 2]}, {"b": [1]})
    assert not says_all_of({"c": 1}, {"a": 1})
    assert not says_all_of({"a": [1]}, {"a": [1, 2]})


@EVERY_MESSAGE
def test_golden_files_cover_every_field(message: type[Message]) -> None:
    written = [json.loads(p.read_bytes()) for p in FILES if p.stem == message.__name__]
    assert written, "no golden file: run tests/unit/messages/write_golden.py"
    covered = {key for file in written for key in file}
    missing = set(message.__struct_fields__) - covered
    assert not missing, "delete the unreleased golden file, then run write_golden.py"


@EVERY_MESSAGE
def test_an_example_sets_every_field_to_something_else_than_its_default(
    message: type[Message],
) -> None:
    assert set(json.loads(encode(example(message)))) == {"type", *message.__struct_fields__}


def test_a_golden_file_is_never_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(write_golden, "GOLDEN", tmp_path)
    assert write_golden.main() == 0
    old = tmp_path / everstep.__version__ / "Done.json"
    old.write_bytes(b"as an earlier release wrote it")
    assert write_golden.main() == 1
    assert "Done.json" in capsys.readouterr().err
    assert old.read_bytes() == b"as an earlier release wrote it"


def test_an_unknown_field_from_a_newer_sender_is_ignored() -> None:
    """An older reader decodes a newer message (A15.3)."""
    newer = encode(LOST)[:-1] + b',"gpu_temp_c":71,"more":{"deep":[1,{"x":null}]}}'
    assert decode(newer) == LOST
    assert decode_as(newer, NodeLost) == LOST


def test_more_items_of_an_array_part_from_a_newer_sender_are_ignored() -> None:
    """An older reader decodes a longer array (A15.3)."""
    newer = b'[3,"node-07",24,8,"gpu",[1]]'
    assert msgspec.json.decode(newer, type=Member) == Member(
        slot=3, node="node-07", first_rank=24, ranks=8
    )


def test_a_fact_from_the_future_is_named_and_its_envelope_is_read() -> None:
    """An unknown kind still has job, time and id (A15.3)."""
    newer = encode(LOST).replace(b"node_lost.v1", b"node_lost.v2")
    with pytest.raises(UnknownMessageError) as caught:
        decode(newer)
    assert caught.value.tag == "node_lost.v2"
    with pytest.raises(UnknownMessageError):
        decode_as(newer, NodeLost)
    read = envelope(newer)
    assert (read.type, read.id, read.job, read.round) == ("node_lost.v2", "0" * 32, "j", 3)
    assert (read.at, read.source) == (NOW, "health")


def test_another_type_than_expected_is_bad_but_not_unknown() -> None:
    with pytest.raises(BadMessageError) as caught:
        decode_as(encode(LOST), RankExited)
    assert not isinstance(caught.value, UnknownMessageError)


def test_what_is_no_fact_has_no_envelope() -> None:
    with pytest.raises(BadMessageError):
        envelope(encode(Done()))


# --- there and back ----------------------------------------------------------------------


@EVERY_MESSAGE
@FEW
@given(data=st.data())
def test_every_message_comes_back_as_it_was(message: type[Message], data: st.DataObject) -> None:
    sent = data.draw(structs(message))
    assert isinstance(sent, Message)
    encoded = encode(sent)
    assert decode(encoded) == sent
    assert decode_as(encoded, message) == sent
    if isinstance(sent, Fact):
        read = envelope(encoded)
        assert (read.type, read.id, read.at) == (tag_of(sent), sent.id, sent.at)


# --- hostile bytes -----------------------------------------------------------------------


def reads_or_refuses(data: bytes) -> None:
    """Every reader gives a message or raises `BadMessageError`, nothing else."""
    for read in (decode, envelope, lambda data: decode_as(data, RankExited)):
        try:
            read(data)
        except BadMessageError as error:
            told = str(error)
            assert len(told) < 2000


@given(st.binary())
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    reads_or_refuses(data)


@given(st.sampled_from(FILES), st.data())
def test_damaged_bytes_are_read_or_refused(path: Path, data: st.DataObject) -> None:
    damaged = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(damaged) - 1))
        damaged[at : at + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=3))
    reads_or_refuses(bytes(damaged))


@given(st.sampled_from(FILES), st.data())
def test_a_field_of_another_type_is_read_or_refused(path: Path, data: st.DataObject) -> None:
    fields = json.loads(path.read_bytes())
    fields[data.draw(st.sampled_from(sorted(fields)))] = data.draw(JSON)
    reads_or_refuses(json.dumps(fields).encode())


HOSTILE = {
    "nothing": b"",
    "null": b"null",
    "no object": b"[]",
    "no type": b"{}",
    "type of another type": b'{"type":1}',
    "nested in an unknown field": b'{"type":"done.v1","z":' + b"[" * 500_000,
    "nested objects": b'{"type":"done.v1","z":' + b'{"a":' * 100_000,
    "nested in a type from the future": b'{"z":' + b"[" * 500_000,
    "invalid UTF-8": b'{"type":"done.v1","text":"\xff"}',
    "lone surrogate": b'{"type":"done.v1","text":"\\ud800"}',
    "truncated": encode(LOST)[:-1],
    "followed by more": encode(LOST) + b"{}",
    "NaN": encode(LOST).replace(b"31.2,", b"NaN,"),
    "infinite": encode(LOST).replace(b"31.2,", b"1e999,"),
    "long number": encode(LOST).replace(b"31.2,", b"9" * 10_000 + b","),
    "past 64 bits": encode(LOST).replace(b'"round":3', b'"round":9223372036854775808'),
    "a negative round": encode(LOST).replace(b'"round":3', b'"round":-3'),
    "a round that readers round": encode(LOST).replace(b'"round":3', b'"round":9007199254740992'),
    "a name of 200 kB": encode(LOST).replace(b'"node-07"', b'"' + b"n" * 200_000 + b'"'),
    "an id of 200 kB": encode(LOST).replace(b"0" * 32, b"0" * 200_000),
    "integer with exponent": encode(LOST).replace(b'"round":3', b'"round":1e30'),
    "no time": encode(LOST).replace(b"2026-11-21", b"2026-13-41"),
    "time without zone": encode(LOST).replace(b'706326Z"', b'706326"'),
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_bytes_are_refused_by_name(data: bytes) -> None:
    with pytest.raises(BadMessageError) as caught:
        decode(data)
    assert caught.value.first_bytes == data[:80]
    assert len(str(caught.value)) < 1000


def test_a_message_past_the_limit_is_refused_before_it_is_looked_at() -> None:
    """The error has the size (A13.3)."""
    data = b'{"type":"done.v1","text":"' + b"x" * MAX_MESSAGE_BYTES + b'"}'
    for read in (decode, envelope):
        with pytest.raises(EncodingTooLargeError) as caught:
            read(data)
        assert caught.value.size_bytes == len(data)
    with pytest.raises(EncodingTooLargeError):
        encode(Done(text="x" * MAX_MESSAGE_BYTES))


@pytest.mark.parametrize(
    "change",
    [
        {"silence_s": float("nan")},
        {"silence_s": float("inf")},
        {"reason": "\ud800"},
        {"reason": object()},
    ],
    ids=["NaN", "infinity", "surrogate", "foreign object"],
)
def test_what_no_reader_could_decode_is_not_sent(change: dict[str, object]) -> None:
    with pytest.raises(BadMessageError, match=r"node_lost\.v1"):
        encode(msgspec.structs.replace(LOST, **change))


def test_the_word_null_in_a_text_is_sent() -> None:
    sent = msgspec.structs.replace(LOST, reason="the pointer was null")
    assert decode(encode(sent)) == sent


def test_the_largest_fleet_fits_into_one_message() -> None:
    nodes = [f"worker-gpu-{slot:05}" for slot in range(12_500)]
    formed = RoundFormed(
        id="0" * 32,
        job="j",
        at=NOW,
        source="rendezvous",
        round=1,
        members=tuple(
            Member(slot=slot, node=node, first_rank=8 * slot, ranks=8)
            for slot, node in enumerate(nodes)
        ),
        world_size=100_000,
        waited_s=12.0,
        allocation="a",
    )
    assert decode(encode(formed)) == formed


@EVERY_MESSAGE
def test_values_are_searched_for_wherever_a_message_may_have_a_float(
    message: type[Message],
) -> None:
    """Only there: orders of large rounds have none, and a null."""
    shown = repr(msgspec.inspect.type_info(message))
    may_have = "FloatType" in shown or "AnyType" in shown
    assert bool(fields_with(message, float, object, Any)) == may_have
