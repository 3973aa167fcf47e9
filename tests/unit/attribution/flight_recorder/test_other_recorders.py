"""Dumps of torchcomms' recorder and of torch's backend nccl2, shaped as their sources show."""

import json
from typing import Any

import pytest

from everstep_services.attribution.flight_recorder.analysis import FlightAnalysis
from everstep_services.attribution.flight_recorder.dump import read_dump
from everstep_services.attribution.flight_recorder.report import FlightReport
from tests.fakes import flight_dumps as fake

WORLD, CULPRIT = 16, 6


def of_torchcomms(dump: dict[str, Any], before: int) -> dict[str, Any]:
    """The dump as torchcomms writes it; `before` calls of others were recorded and forgotten."""
    for entry in dump["entries"]:
        entry["collective_seq_id"] = entry["record_id"] + before
        entry["process_group"][1] = "ncclx"
        entry["profiling_name"] = entry["profiling_name"].rpartition(":")[2]
        entry |= {"p2p_seq_id": 0, "is_p2p": False}
    for group in dump["pg_config"].values():
        group |= {"desc": "ncclx", "ranks": group["ranks"].strip("[]").replace(" ", "")}
    return dump


def of_nccl2(dump: dict[str, Any]) -> dict[str, Any]:
    for entry in dump["entries"]:
        entry["profiling_name"] = f"nccl2:{entry['profiling_name'].rpartition(':')[2]}"
    return dump


def played(ring: int = 2000) -> dict[int, dict[str, Any]]:
    """A rank leaves between two calls: the ranks of each other group have made as many."""
    own = {rank: fake.Group(f"{100 + rank}", "own", (rank,)) for rank in range(0, WORLD, 3)}
    job = fake.steady([*fake.three_dimensions(4, 2, 2)], WORLD, 6)
    job.groups, job.ring = [*job.groups, *own.values()], ring
    for rank, group in own.items():  # ranks differ in how many calls they have made in all
        job.calls[rank] = [fake.Call(group), *job.calls[rank]]
    fake.leave(job, CULPRIT, 8)
    return fake.play(job)


def report(dumps: dict[int, dict[str, Any]]) -> FlightReport:
    analysis = FlightAnalysis()
    for rank, dump in dumps.items():
        analysis.add(read_dump(json.dumps(dump).encode(), rank))
    return analysis.report()


def culprits(of: FlightReport) -> set[int]:
    return {s.rank for fault in of.faults if fault.confidence >= 0.5 for s in fault.suspects}


def test_calls_of_torchcomms_are_counted_in_their_groups() -> None:
    dumps = {rank: of_torchcomms(dump, rank) for rank, dump in played().items()}
    found = report(dumps)
    assert culprits(found) == {CULPRIT}
    assert found.faults[0].kind == "never_joined"


def test_overwritten_calls_of_torchcomms_accuse_nobody() -> None:
    dumps = {rank: of_torchcomms(dump, rank) for rank, dump in played(ring=5).items()}
    found = report(dumps)
    assert not found.faults
    assert any("torchcomms" in note for note in found.notes)


@pytest.mark.parametrize("name", ["send", "recv", "batch_op_issue"])
def test_a_transfer_of_torchcomms_is_not_a_collective(name: str) -> None:
    """Only two ranks of the group make it: it moves no number of the group."""
    dumps = {rank: of_torchcomms(dump, rank) for rank, dump in played().items()}
    for rank in (1, 2):
        entries = dumps[rank]["entries"]
        entries.insert(0, entries[0] | {"profiling_name": name})
        for number, entry in enumerate(entries):
            entry |= {"record_id": number, "collective_seq_id": number + rank}
    assert culprits(report(dumps)) == {CULPRIT}


def test_dumps_of_nccl2_are_read_as_those_of_nccl() -> None:
    assert culprits(report({rank: of_nccl2(dump) for rank, dump in played().items()})) == {CULPRIT}
