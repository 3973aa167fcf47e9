"""The recorders of a rank with a device: gloo's, NCCL's and torchcomms' are read together."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from everstep_services.agent.stalls.collectives import parse_collectives, read_collectives
from everstep_services.agent.stalls.recorder_traces import joined, read_traces
from everstep_services.agent.stalls.torch_server import TorchServerError
from everstep_services.agent.timings.flight_recorders import FlightRecorders
from everstep_services.agent.timings.window import StepRange
from everstep_services.attribution.flight_recorder.dump import read_dump
from tests.fakes.flight_dumps import Call, Group, Job, play
from tests.unit.worker_server import worker_server

GLOO, NCCL, COMMS = "fr_trace_json", "dump_nccl_trace_json", "torchcomms_fr_trace_json"
WHOLE = Group("0", "default_pg", (0, 1))
EMPTY = (
    b'{"comm_lib_version":"","nccl_comm_state":{},"pg_config":{},"pg_status":{},"version":"2.10"}'
)


def as_json(dump: Mapping[str, Any], *, is_active: bool = False) -> bytes:
    """As the handler of torch 2.13 writes it: keys sorted, counts as texts, no empty list."""
    entries = [dict(sorted(entry.items())) for entry in dump["entries"]]
    for entry in entries:
        for name in ("time_discovered_started_ns", "time_discovered_completed_ns"):
            entry[name] = entry[name] or 0
    if is_active:
        entries = [entry for entry in entries if entry["state"] != "completed"]
    status = {
        group: {name: str(number) for name, number in of.items()}
        for group, of in dump["pg_status"].items()
    }
    trace = {**dump, "pg_status": status, "entries": entries}
    if not entries:
        del trace["entries"]
    return json.dumps(dict(sorted(trace.items())), separators=(",", ":")).encode()


def hung(*, ahead: int = 1) -> dict[int, dict[str, Any]]:
    """Rank 1 leaves before the third collective."""
    calls = [Call(WHOLE, "all_reduce")] * 4
    return play(Job(2, [WHOLE], {0: [*calls], 1: calls[:2]}, ahead=ahead))


def of_gloo(*sequences: int, is_over: bool = True) -> bytes:
    """gloo's entries stay scheduled, and are retired when they are over."""
    dump = play(Job(2, [WHOLE], {rank: [Call(WHOLE)] * len(sequences) for rank in (0, 1)}))[0]
    for sequence, entry in zip(sequences, dump["entries"], strict=True):
        entry |= {
            "collective_seq_id": sequence, "profiling_name": "gloo:barrier", "state": "scheduled",
            "retired": is_over, "time_discovered_completed_ns": None,
        }  # fmt: skip
    return as_json(dump)


async def test_nccl_is_asked_for_what_is_not_over_and_with_parameters_that_it_knows(
    tmp_path: Path,
) -> None:
    dumps = hung()
    answers = {GLOO: lambda: EMPTY, NCCL: lambda: as_json(dumps[0], is_active=True)}
    async with worker_server(tmp_path, answers) as asked:
        state = await read_collectives(tmp_path)
    assert sorted(asked) == [
        f"{NCCL}?onlyactive=true", f"{GLOO}?onlyactive=true&includestacktraces=false",
    ]  # fmt: skip
    assert state is not None
    assert state.waits_in == "nccl:all_reduce of default_pg"
    assert (state.entered, state.awaits is not None, state.is_unclear) == (3, True, False)
    whole = parse_collectives([as_json(hung()[1])])
    assert whole is not None
    assert whole.waits_in == ""
    ((group, number),) = whole.entered_in.items()
    assert state.awaits == (group, number + 1), "rank 0 waits for rank 1"


async def test_an_unknown_recorder_is_not_asked_and_a_silent_one_is_no_trace(
    tmp_path: Path,
) -> None:
    async with worker_server(tmp_path, {GLOO: lambda: EMPTY}) as asked:
        assert await read_traces(tmp_path, 1.0, is_whole=True) == (EMPTY,)
        assert len(asked) == 1
    nowhere, silent = tmp_path / "nowhere", tmp_path / "silent"
    for folder in (nowhere, silent):
        folder.mkdir()
    async with worker_server(nowhere, {"ping": lambda: b"pong"}):
        with pytest.raises(TorchServerError, match="no flight recorder"):
            await read_traces(nowhere, 1.0, is_whole=True)
    async with worker_server(silent, {GLOO: lambda: EMPTY, NCCL: lambda: None}):
        with pytest.raises(TorchServerError, match="no answer within"):
            await read_traces(silent, 0.1, is_whole=True)


async def test_calls_of_gloo_and_of_nccl_in_one_group_are_told_apart(tmp_path: Path) -> None:
    """With the backend `cpu:gloo,cuda:nccl` both number the calls of group 0."""
    dumps = hung()
    answers = {GLOO: lambda: of_gloo(1, 2, 3, 4, 5, 6, 7), NCCL: lambda: as_json(dumps[0])}
    async with worker_server(tmp_path, answers):
        state = await read_collectives(tmp_path, is_whole=True)
        traces = await read_traces(tmp_path, 1.0, is_whole=True)
        told = await FlightRecorders().read({0: tmp_path}, StepRange(1, 16), 10.0)
    assert state is not None
    assert (state.entered, state.waits_in) == (10, "nccl:all_reduce of default_pg")
    assert sorted(state.entered_in.values()) == [3, 7]
    assert state.awaits is not None
    assert state.awaits[1] == 3
    entries = told.recordings[0].entries
    assert {entry.group for entry in entries} == {"0/gloo default_pg", "0 default_pg"}
    assert len(entries) == 10
    dump = read_dump(joined(traces), 0)
    assert {group.name: group.enqueued for group in dump.groups} == {"0": 3, "0/gloo": 7}


async def test_torchcomms_numbers_the_calls_of_all_groups_so_they_are_not_compared(
    tmp_path: Path,
) -> None:
    dump = hung()[0]
    for entry in dump["entries"]:
        entry["profiling_name"] = "all_reduce"
    async with worker_server(tmp_path, {GLOO: lambda: EMPTY, COMMS: lambda: as_json(dump)}):
        state = await read_collectives(tmp_path)
        told = await FlightRecorders().read({0: tmp_path}, StepRange(1, 16), 10.0)
        traces = await read_traces(tmp_path, 1.0, is_whole=True)
    assert state is not None
    assert (state.entered, state.waits_in) == (3, "all_reduce of default_pg")
    assert (state.entered_in, state.awaits) == ({}, None)
    assert told.recordings[0].entries == ()
    summary = read_dump(joined(traces), 0)
    (group,) = summary.groups
    assert (group.calls, group.pending, summary.is_partial) == (b"", (), True)


def batch(number: int, state: str) -> list[dict[str, Any]]:
    """Two transfers that were made together; only the entry that closes them has a state."""
    both = {"process_group": ["3", "pipeline"], "collective_seq_id": number, "p2p_seq_id": number,
            "is_p2p": True, "retired": False, "pg_id": 3}  # fmt: skip
    names = ["nccl:send 0->1", "nccl:recv 0<-1", "nccl:coalesced"]
    states = ["scheduled", "scheduled", state]
    return [
        {**both, "profiling_name": name, "state": one, "record_id": 3 * number + at,
         "time_created_ns": 10**9}
        for at, (name, one) in enumerate(zip(names, states, strict=True))
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("last", "waits_in"), [("completed", ""), ("started", "nccl:coalesced of pipeline")]
)
def test_the_parts_of_a_batch_are_over_when_the_batch_is(last: str, waits_in: str) -> None:
    entries = [*batch(1, "completed"), *batch(2, last)]
    state = parse_collectives([json.dumps({"entries": entries}).encode()])
    assert state is not None
    assert (state.waits_in, state.awaits, state.is_unclear) == (waits_in, None, False)
    listed = [entry for entry in entries if entry["state"] != "completed"]
    active = parse_collectives([json.dumps({"entries": listed}).encode()])
    assert active is not None
    assert active.is_unclear, "the end of the first batch is not listed"


def test_what_nccl_has_given_up_is_not_over() -> None:
    entry = {"profiling_name": "nccl:all_reduce", "state": "started", "retired": True,
             "process_group": ["0", "default_pg"], "record_id": 1}  # fmt: skip
    state = parse_collectives([json.dumps({"entries": [entry]}).encode()])
    assert state is not None
    assert state.waits_in == "nccl:all_reduce of default_pg"


@pytest.mark.parametrize(
    "body",
    [b"<html>", b'{"entries":1}', b'{"entries":[1]}', b'{"entries":[{"process_group":{}}]}',
     b"[" * 100_000],
)  # fmt: skip
async def test_nonsense_is_refused(tmp_path: Path, body: bytes) -> None:
    nccl = as_json(hung()[0])
    async with worker_server(tmp_path, {GLOO: lambda: body, NCCL: lambda: nccl}):
        with pytest.raises(TorchServerError, match="it answered nonsense"):
            await read_traces(tmp_path, 5.0, is_whole=True)
