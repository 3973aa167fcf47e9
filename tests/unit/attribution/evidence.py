"""Cases with pieces of evidence, and the verdict that analyzers reach on them."""

import asyncio
import json
from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from everstep.bus.errors import BlobMissingError
from everstep.evidence.archive import ArchiveMember, pack
from everstep.messages import BlobRef, Case, EvidencePiece, Stall
from everstep_services.attribution.analyzers.runner import BUILT_IN, AnalyzerRunner
from everstep_services.attribution.domain.combiner import CaseJudgement, combine
from everstep_services.attribution.incident import Analyzer
from tests.fakes import flight_dumps as fake
from tests.unit.attribution.cases import case, end


def with_evidence(of: Case, contents: Mapping[str, bytes], node: str = "n1") -> tuple[Case, Any]:
    """The case with these pieces of evidence, and who fetches them."""
    blobs = {kind: BlobRef(job="j", id=kind, size_bytes=1, parts=1) for kind in contents}
    pieces = tuple(
        EvidencePiece(evidence=kind, node=node, fact=f"f-{kind}", blob=blob)
        for kind, blob in blobs.items()
    )

    async def fetch(ref: BlobRef) -> bytes:
        if not contents[ref.id]:
            raise BlobMissingError("it is older than the stream keeps")
        return contents[ref.id]

    return replace(of, evidence=pieces), fetch


async def judged(
    of: Case, contents: Mapping[str, bytes], analyzers: Mapping[str, Analyzer] = BUILT_IN
) -> CaseJudgement:
    whole, fetch = with_evidence(of, contents)
    heard = await AnalyzerRunner(analyzers).run(whole, fetch, 60.0)
    return await asyncio.to_thread(combine, whole, heard.claims, heard.missing)


def recorders(rank: int, at: int, world: int = 4, others: tuple[int, ...] = ()) -> bytes:
    """Dumps of all ranks; this rank, and others, have stopped calling collectives."""
    group = fake.Group("0", "default_pg", tuple(range(world)))
    calls = {one: [fake.Call(group, "all_reduce", ((4,),))] * 6 for one in range(world)}
    job = fake.Job(world, [group], calls)
    for gone in (rank, *others):
        fake.leave(job, gone, at)
    dumps = fake.play(job)
    members = [ArchiveMember(one, "json", json.dumps(dump).encode()) for one, dump in dumps.items()]
    return pack(members, {})


def stack(*frames: tuple[str, str, int]) -> bytes:
    thread = {
        "pid": 7, "thread_id": 1, "thread_name": "MainThread", "os_thread_id": 7, "active": True,
        "owns_gil": False,
        "frames": [
            {"name": name, "filename": file, "short_filename": file, "line": line, "module": None}
            for name, file, line in frames
        ],
    }  # fmt: skip
    return json.dumps([thread]).encode()


STEP = ("step", "/home/ann/train.py", 40)


ALL_REDUCE = (
    ("all_reduce", "/site-packages/torch/distributed/distributed_c10d.py", 3252),
    ("wrapper", "/site-packages/torch/distributed/c10d_logger.py", 81),
    STEP,
)


def stalls(*elsewhere: int) -> tuple[Stall, ...]:
    where = "its main thread is at distributed_c10d.py:3252 in all_reduce"
    return tuple(
        Stall(
            rank=rank, node="n0", fact=f"s{rank}", round=1, phase="step", waited_s=6, limit_s=5,
            process_state="S", is_waiting_for_ranks=rank not in elsewhere,
            blocked_in="its main thread is at train.py:25 in train" if rank in elsewhere else where,
        )
        for rank in range(4)
    )  # fmt: skip


HANG = case(trigger="rank_stalled")
KILLED = end(3, how="signal", exit_code=None, signal="SIGKILL")
