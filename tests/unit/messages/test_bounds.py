"""Every field of every message has bounds, which are checked where bytes become a message."""

import json
import typing
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, timezone

import msgspec
import pytest

from everstep.messages import MESSAGE_TYPES, BadMessageError, Join, RankExited, decode, encode
from everstep.messages.base import Message, Part
from everstep.messages.codec import _refuse_far_times
from tests.unit.messages.write_golden import example

HOSTILE: dict[str, object] = {
    "NUL": "a\0b",
    "year 1": "0001-01-01T00:00:00+23:59",
    "year 9999": "9999-12-31T23:59:59-23:59",
    "2^53": 2**53,
    "2^64": 2**64,
    "1e308": 1e308,
    "-1e308": -1e308,
    "a long name": "x" * 5_000,
    "text": "../../etc/passwd",
    "list": [[]],
}
SPAN = timedelta(seconds=1e10)
ZONES = (timezone(timedelta(hours=23, minutes=59)), timezone(-timedelta(hours=23, minutes=59)))


def replaced(value: object, by: object) -> Iterator[object]:
    """The value with one of its leaves, after the other, replaced; tags stay."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if key != "type":
                yield from ({**value, key: other} for other in replaced(inner, by))
    elif isinstance(value, list):
        for at, inner in enumerate(value):
            yield from ([*value[:at], other, *value[at + 1 :]] for other in replaced(inner, by))
    else:
        yield by


def leaves(value: object) -> Iterator[object]:
    """Every plain value in a message."""
    if isinstance(value, msgspec.Struct):
        for name in value.__struct_fields__:
            yield from leaves(getattr(value, name))
    elif isinstance(value, dict):
        for pair in value.items():
            yield from leaves(list(pair))
    elif isinstance(value, tuple | list):
        for inner in value:
            yield from leaves(inner)
    else:
        yield value


@pytest.mark.parametrize("of", MESSAGE_TYPES, ids=lambda of: of.__name__)
def test_a_hostile_value_is_refused_in_one_line_or_harmless(of: type[Message]) -> None:
    whole = json.loads(encode(example(of)))
    for what, hostile in HOSTILE.items():
        for damaged in replaced(whole, hostile):
            data = json.dumps(damaged).encode()
            try:
                message = decode(data)
            except BadMessageError as error:
                assert "\n" not in str(error), (what, error)
                continue
            assert encode(message) != b"", what
            for leaf in leaves(message):
                if isinstance(leaf, str):
                    assert "\0" not in leaf
                elif isinstance(leaf, float):
                    assert abs(leaf) <= 1e18
                elif isinstance(leaf, datetime):
                    assert all((leaf + SPAN).astimezone(zone) for zone in ZONES)
                    assert all((leaf - SPAN).astimezone(zone) for zone in ZONES)


def test_a_round_that_a_node_claims_leaves_room_for_the_next() -> None:
    """Else the document of the job, with the round after it, could not be read again."""
    join = json.loads(encode(example(Join)))
    for name in ("last_round", "known_round"):
        assert isinstance(decode(json.dumps(join | {name: 2**52}).encode()), Join)
        with pytest.raises(BadMessageError, match=rf"<= {2**52}.*{name}"):
            decode(json.dumps(join | {name: 2**53 - 1}).encode())


def test_a_nul_becomes_a_sign_when_it_is_sent_and_is_refused_when_it_arrives() -> None:
    """A line that a rank printed may have one; a database and a path may not."""
    exited = msgspec.structs.replace(example(RankExited), how="a\0b \\u0000 \\\0")
    read = decode(encode(exited))
    assert isinstance(read, RankExited)
    assert read.how == "a\ufffdb \\u0000 \\\ufffd", "the text of an escape stays as it is"
    with pytest.raises(BadMessageError, match="a NUL in a text"):
        decode(encode(exited).replace(b"\\ufffd", rb"\u0000"))


@pytest.mark.parametrize(
    ("field", "value"), [("id", "../x"), ("id", "a.*"), ("id", "A" * 32), ("job", "a.b")]
)
def test_a_reference_to_a_blob_is_a_subject_and_nothing_else(field: str, value: str) -> None:
    """REST builds the subject of a blob from what a job has sent."""
    whole = json.loads(encode(example(RankExited)))
    assert isinstance(decode(json.dumps(whole).encode()), RankExited)
    with pytest.raises(BadMessageError, match=f"matching regex.*log.{field}"):
        decode(json.dumps(whole | {"log": whole["log"] | {field: value}}).encode())


def test_times_are_found_wherever_they_are() -> None:
    class Inner(Part, frozen=True, kw_only=True):
        when: datetime | None = None

    class Outer(Part, frozen=True, kw_only=True):
        name: str = ""
        parts: tuple[Inner, ...] = ()
        named: typing.Mapping[str, tuple[Inner, ...]] = {}

    good, bad = datetime(2026, 1, 1, tzinfo=UTC), datetime(1, 1, 1, tzinfo=UTC)
    for where in (Outer(parts=(Inner(), Inner(when=bad))), Outer(named={"a": (Inner(when=bad),)})):
        with pytest.raises(BadMessageError, match="0001-01-01.*not between 1970 and 3000"):
            _refuse_far_times(where, b"")
    _refuse_far_times(Outer(parts=(Inner(when=good),), named={"a": (Inner(),)}), b"")
