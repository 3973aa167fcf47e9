"""What flight recorders hold becomes entries by group and sequence; anything else is refused."""

import json
import random
from typing import Any

import pytest

from everstep_services.agent.timings.collective_entries import (
    MOST,
    CollectiveEntry,
    Recording,
    collectives,
    parse_recording,
    within,
)

START_NS = 1_700_000_000_000_000_000
GLOO = {"is_p2p": False, "retired": True, "thread_id": "1", "timeout_ms": 1800000}


def recorded(number: int, sequence: int = -1, **changed: Any) -> dict[str, Any]:
    """An entry as gloo's recorder writes it; its keys are sorted."""
    entry = {
        "collective_seq_id": number if sequence < 0 else sequence,
        "input_sizes": [[100, 2]],
        "process_group": ["0", "default_pg"],
        "profiling_name": "gloo:all_reduce",
        "record_id": number,
        "time_created_ns": START_NS + number * 1_000_000,
        **GLOO,
        **changed,
    }
    return dict(sorted(entry.items()))


def trace(entries: list[dict[str, Any]], **changed: Any) -> bytes:
    whole = {"comm_lib_version": "", "entries": entries, "pg_config": {}, "version": "2.10"}
    return json.dumps({**whole, **changed}, separators=(",", ":")).encode()


def test_entries_are_read_with_their_group_sequence_and_size() -> None:
    found = parse_recording([trace([recorded(1), recorded(2, process_group=["3", "undefined"])])])
    assert found is not None
    assert [(one.group, one.sequence, one.op) for one in found.entries] == [
        ("0 default_pg", 1, "all_reduce 200"),
        ("3", 2, "all_reduce 200"),
    ]
    assert found.entries[0].at_s == pytest.approx(1_700_000_000.001, abs=1e-6)
    assert found.entries[0].lasted_s is None


def test_only_the_latest_of_a_full_ring_are_read() -> None:
    found = parse_recording([trace([recorded(number) for number in range(1, 2001)])])
    assert found is not None
    assert found.entries[-1].sequence == 2000
    assert MOST < len(found.entries) < 2000
    chosen = within(found, 0.0, found.entries[-10].at_s)
    assert [one.sequence for one in chosen] == list(range(1991 - MOST + 1, 1992))
    assert within(found, found.entries[-3].at_s, 2e9) == found.entries[-2:]


def test_keys_in_another_order_are_read_as_well() -> None:
    entries = [dict(reversed(recorded(number).items())) for number in range(5)]
    found = parse_recording([trace(entries)])
    assert found is not None
    assert len(found.entries) == 5


def test_transfers_between_two_ranks_are_left_out_without_durations() -> None:
    found = parse_recording([trace([recorded(1), recorded(2, is_p2p=True, p2p_seq_id=1)])])
    assert found is not None
    assert [one.sequence for one in found.entries] == [1]


def test_transfers_that_lasted_on_a_device_have_numbers_of_their_own() -> None:
    """A batch of them is one: its parts have no durations."""
    sent: dict[str, Any] = {"is_p2p": True, "collective_seq_id": 1, "duration_ms": 0.5}
    part: dict[str, Any] = {"is_p2p": True, "collective_seq_id": 1, "p2p_seq_id": 8}
    entries = [
        recorded(1, duration_ms=1.0),
        recorded(2, profiling_name="nccl:send 0->1", p2p_seq_id=7, **sent),
        recorded(3, profiling_name="nccl:recv 0<-1", **part),
        recorded(4, profiling_name="nccl:coalesced", p2p_seq_id=8, input_sizes=[], **sent),
    ]
    found = parse_recording([trace(entries)])
    assert found is not None
    _, (together, transfers) = collectives(found.entries, {})
    assert (together.are_transfers, together.ops) == (False, ("all_reduce 200",))
    assert (transfers.are_transfers, transfers.first_sequence) == (True, 7)
    assert transfers.ops == ("send 200", "coalesced 0")
    assert transfers.lasted_us == (500, 500)


def test_durations_that_are_not_known_yet_are_said_to_be_so() -> None:
    found = parse_recording([trace([recorded(1, duration_ms=2.5), recorded(2)])])
    assert found is not None
    _, (series,) = collectives(found.entries, {})
    assert series.lasted_us == (2500, -1)


def test_what_is_chosen_begins_at_one_instant_for_all_kinds() -> None:
    """Else a wait that nobody knows of would be taken for work."""
    every = [
        *(entry("a", number, float(number)) for number in range(1, 100)),
        *(CollectiveEntry("a", number, "send 1", 10.5 + number, 0.1, True) for number in range(90)),
    ]
    recording = Recording(tuple(sorted(every, key=lambda one: one.at_s)), {})
    chosen = within(recording, 0.0, 99.2)
    assert [one.is_transfer for one in chosen].count(False) == MOST
    assert min(one.at_s for one in chosen if one.is_transfer) > 99 - MOST


def test_what_nccl_knows_more_is_told() -> None:
    groups = {"0": {"desc": "default_pg", "name": "0", "ranks": "[0, 1, 2]"}}
    entries = [recorded(number, duration_ms=2.5) for number in (1, 2)]
    found = parse_recording([trace(entries, pg_config=groups)])
    assert found is not None
    _, (series,) = collectives(found.entries, found.members)
    assert series.members == (0, 1, 2)
    assert series.lasted_us == (2500, 2500)


@pytest.mark.parametrize("ranks", ["", "[", '"x"', "[1.5]", str(list(range(100)))])
def test_members_that_make_no_sense_or_are_many_are_left_out(ranks: str) -> None:
    found = parse_recording([trace([recorded(1)], pg_config={"0": {"ranks": ranks}})])
    assert found is not None
    assert found.members == {}


@pytest.mark.parametrize("body", [b"", b"null", b"[]", b"{", b'{"entries":3}', b"\xff", b"{}"])
def test_what_is_no_trace_is_none_or_empty(body: bytes) -> None:
    found = parse_recording([body])
    assert found is None or found.entries == ()


@pytest.mark.parametrize("seed", range(30))
def test_damaged_traces_never_raise(seed: int) -> None:
    chance = random.Random(seed)
    body = bytearray(trace([recorded(number) for number in range(20)]))
    for _ in range(chance.randrange(1, 20)):
        body[chance.randrange(len(body))] = chance.randrange(256)
    parse_recording([bytes(body[: chance.randrange(len(body))])])
    parse_recording([bytes(body)])


def entry(group: str, sequence: int, at_s: float, op: str = "all_reduce 4") -> CollectiveEntry:
    return CollectiveEntry(group, sequence, op, at_s)


def test_a_gap_in_a_sequence_begins_another_series() -> None:
    entries = [
        *(entry("a", number, 10.0 + number) for number in (1, 2, 5, 6)),
        entry("b", 1, 9.0, "broadcast 1"),
        entry("a", 2, 12.5),
    ]
    from_s, series = collectives(entries, {})
    assert from_s == 9.0
    assert [(one.group, one.first_sequence, len(one.entered_us)) for one in series] == [
        ("a", 1, 2),
        ("a", 5, 2),
        ("b", 1, 1),
    ]
    assert series[1].entered_us == (6_000_000, 7_000_000)


def test_operations_and_sections_are_told_by_number() -> None:
    entries = [entry("a", number, float(number), f"op {number % 2}") for number in range(1, 5)]
    _, (series,) = collectives(entries, {}, lambda one: one.sequence - 2)
    assert series.ops == ("op 1", "op 0")
    assert series.op == (0, 1, 0, 1)
    assert series.section == (-1, 0, 1, 2)
    _, (series,) = collectives(entries, {}, lambda _: -1)
    assert series.section == (), "none was in a section"
    assert collectives([], {}) == (0.0, ())
