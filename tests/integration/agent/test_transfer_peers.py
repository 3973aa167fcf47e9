"""The peer of a transfer that a rank waits for, where the call that began it has returned."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest

from everstep.clock import SystemClock
from everstep.evidence.archive import ArchiveMember
from everstep_services.agent.collectors.collection import Scene
from everstep_services.agent.collectors.stacks import StacksReader
from everstep_services.agent.ranks.protocol import RankSeen
from everstep_services.attribution.flight_recorder.analysis import FlightAnalysis
from everstep_services.attribution.flight_recorder.stack_calls import with_stack_call
from everstep_services.attribution.flight_recorder.summary import RankSummary
from everstep_services.attribution.stack_analysis.dumps import read_stacks
from everstep_services.attribution.stack_analysis.rules import shipped
from everstep_services.attribution.stack_analysis.stacks import Thread
from tests.waiting import until
from trainer_sdk.page import make_page

TRAINING = """
import sys
import torch
import torch.distributed as dist

number, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", store=dist.FileStore(store), rank=number, world_size=4)
data = torch.ones(1 << 20)


def receive(peer, secret):
    request = dist.irecv(data, peer)
    request.wait()


def send(dst, secret):
    request = dist.isend(data, dst)
    request.wait()


def exchange(peer, secret):
    ops = [dist.P2POp(dist.isend, data, peer), dist.P2POp(dist.irecv, data.clone(), peer)]
    requests = dist.batch_isend_irecv(ops)
    for request in requests:
        request.wait()


def wait_all(works):
    for work in works:
        work.wait()


def run_stage(first, secret):
    works = {first: [dist.irecv(data, first)]}
    for part in works.values():
        wait_all(part)


dist.barrier()
[receive, send, exchange, run_stage][number]((number + 1) % 4, 5309)
"""
CALLS = {
    0: ("recv", {"peer": 1}), 1: ("send", {"dst": 2}), 2: ("send", {"peer": 3}),
    3: ("recv", {"peer": 0}),
}  # fmt: skip


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[list[RankSeen]]:
    (tmp_path / "train.py").write_text(TRAINING)
    with ExitStack() as processes:
        seen = []
        for number in CALLS:
            folder = tmp_path / str(number)
            folder.mkdir()
            command = [sys.executable, "train.py", str(number), "store"]
            process = processes.enter_context(subprocess.Popen(command, cwd=tmp_path))
            processes.callback(process.kill)
            page = make_page(str(folder / "page"))
            seen.append(RankSeen(number, process.pid, page, folder, is_gone=False))
        yield seen


def stacks(ranks: list[RankSeen]) -> Mapping[int, bytes]:
    scene = Scene(ranks, 30.0, may_pause=True)
    found = asyncio.run(StacksReader(native=True).stacks(scene, SystemClock()))
    assert found is not None
    members: tuple[ArchiveMember, ...] = found.members
    return {it.rank: it.content for it in members if it.rank is not None}


def mains(read: Mapping[int, bytes]) -> Mapping[int, Thread | None]:
    return {rank: read_stacks(content, rank).main for rank, content in read.items()}


def test_each_rank_of_a_circle_tells_whom_it_waits_for(ranks: list[RankSeen]) -> None:
    """A7.4: gloo's recorder has no transfers, and every rank waits for another."""

    def look() -> Mapping[int, bytes] | None:
        read = stacks(ranks)
        calls = {rank: main.call for rank, main in mains(read).items() if main is not None}
        return read if calls == {rank: call for rank, (call, _) in CALLS.items()} else None

    read = until(look, "all ranks wait for their transfers")
    assert not any(b"5309" in content for content in read.values()), "other values stay in a rank"
    analysis = FlightAnalysis(world=4)
    for rank, main in mains(read).items():
        assert main is not None
        assert (main.call, main.arguments) == CALLS[rank]
        state = shipped().state(main)
        assert (state.activity, state.call) == ("point_to_point", main.call)
        dump = RankSummary(rank=rank, newest_ns=9, taken_ns=3_600_000_000_000)
        analysis.add(with_stack_call(dump, main.call, main.arguments))
    (circle, *_) = analysis.report().faults
    assert circle.kind == "cycle", circle.summary
