"""A believable fleet behind the dashboard: its record, its beats, its output, and what services answer."""

import asyncio
import base64
import itertools
import math
import random
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np

from everstep.bus.ports import Bus, Handler
from everstep.bus.requests import RefusalError
from everstep.clock import SystemClock
from everstep.messages import (
    CheckpointPlace,
    CheckpointsLocated,
    CollectivesRead,
    HeatMapPart,
    ListCheckpoints,
    Message,
    NodeBeat,
    NodeRun,
    Peer,
    ProbeBeat,
    RankBeat,
    RankScoreTable,
    ShowHeatMap,
    ShowTimings,
    StacksRead,
    TimingTable,
)
from everstep.messages.facts.stragglers import Score
from everstep.messages.questions.attribution import (
    CollectiveFault,
    FoldedStack,
    OpenCollective,
    Suspicion,
)
from everstep.messages.questions.catalog import ReplicaPlace
from everstep.messages.questions.straggler import GroupScores, RankScores, TimingRow
from everstep.messages.rank_logs import LogHeader, LogIndex, LogPiece, LogStream, SentLogFile
from everstep.observe.http import listen, serve_asgi, url_of
from everstep.store.database import open_database
from everstep.store.log import FactLog
from everstep.store.schema import upgrade
from everstep.store.times import to_us
from everstep_services.history.projections.fold import fold
from tests.integration.conftest import Api
from tests.integration.history.dashboard.fleet_facts import (
    JOB,
    NODES,
    PER_NODE,
    SECTIONS,
    TAIL,
    TRACEBACK,
    WINDOWS,
    facts,
    node,
)

TAIL += TRACEBACK


def beats(now: datetime) -> Iterator[NodeBeat]:
    """What the agents of the job say now."""
    for slot in range(NODES):
        name = node(16) if slot == 2 else node(slot)
        ranks = tuple(
            RankBeat(rank=slot * PER_NODE + local, state="running", step=57_800 - (slot % 3 == 0),
                     progress_age_s=0.2 + local / 20, section=SECTIONS[(slot + local) % 4], section_age_s=0.1 + local / 30,
                     limit_s=12.5, limit_source="learned", resident_bytes=22 << 30, device_bytes=71 << 30)
            for local in range(PER_NODE)
        )  # fmt: skip
        yield NodeBeat(
            job=JOB,
            node=name,
            sequence=100,
            at=now,
            state="running",
            round=3,
            slot=slot,
            ranks=ranks,
            watch="armed",
            probes=(
                ProbeBeat(check="gpu", every_s=30.0, policy="observe", state="ok", failures_limit=3),
                ProbeBeat(check="nic", every_s=10.0, policy="exclude", state="failed", failures=2, failures_limit=3),
            ),
        )  # fmt: skip


class Services:
    """What straggler, catalog and attribution would answer."""

    def __init__(self, now: datetime, ranks: int = NODES * PER_NODE) -> None:
        self._now = now
        self._ranks = ranks
        self._chance = random.Random(7)
        self._table = [self._values(rank, WINDOWS) for rank in range(ranks)]

    async def scores(self, _question: Message) -> Message:
        """The slowest ranks."""
        ranks = tuple(
            RankScores(rank=rank, node=node(rank // PER_NODE), role="all", is_straggler=rank == 93,
                       own_s=own, slower_ratio=own / 0.36 - 1, lateness_s=max(0.0, own - 0.37), waited_s=max(0.0, 0.47 - own),
                       scores=(Score(signal="own", relative_score=0.36 / own, value_s=own, reference_s=0.36),))
            for rank, own in ((93, 0.472), (33, 0.391), (12, 0.377), (71, 0.371), (5, 0.369), (101, 0.367), (64, 0.366), (88, 0.365))
        )  # fmt: skip
        return RankScoreTable(round=3, window=57_776, ranks=ranks, ranks_seen=NODES * PER_NODE, slowdown_ratio=0.13,
                              groups=(GroupScores(group="dp", ranks=16, last_rank=93, last_ratio=0.91, waited_s=0.1),
                                      GroupScores(group="tp11", ranks=8, last_rank=93, last_ratio=0.97, waited_s=0.09)),
                              step_s=0.9, clock_error_s=0.0004, window_steps=16)  # fmt: skip

    async def timings(self, question: Message) -> Message:
        """A table with one slow rank, one slow node for a while, and some gaps."""
        assert isinstance(question, ShowTimings)
        starts = range(57_792 - 16 * WINDOWS, 57_792, 16)
        windows = tuple((start, start + 15) for start in starts)[-question.most_windows :]
        end = min(self._ranks, question.first_rank + question.most_ranks)
        rows = tuple(
            TimingRow(
                rank=rank,
                node=node(rank // PER_NODE),
                role="all",
                values=self._table[rank][-len(windows) :],
            )
            for rank in range(question.first_rank, end)
        )
        return TimingTable(round=3, measure=question.measure, windows=windows, rows=rows, next_rank=end if end < self._ranks else None,
                           sections=("", *SECTIONS))  # fmt: skip

    async def heat_map(self, question: Message) -> Message:
        """The same table as a picture."""
        assert isinstance(question, ShowHeatMap)
        if question.job == "never":
            raise RefusalError("404", "no such job")
        most = question.most_windows
        asked = ShowTimings(job=question.job, measure=question.measure, section=question.section,
                            most_ranks=self._ranks, most_windows=most)  # fmt: skip
        table = await self.timings(asked)
        assert isinstance(table, TimingTable)
        values = np.array([row.values for row in table.rows], np.float64)
        low, high = float(np.nanmin(values)), float(np.nanmax(values))
        cells = (
            np.nan_to_num((values - low) / (high - low) * 65_534 + 1, nan=0).round().astype("<u2")
        )
        return HeatMapPart(round=3, measure=question.measure, windows=table.windows, first_rank=0, low=low, high=high,
                           nodes=tuple(NodeRun(node=node(i), ranks=PER_NODE) for i in range(self._ranks // PER_NODE)),
                           cells=base64.b64encode(cells.tobytes()).decode(), sections=table.sections)  # fmt: skip

    def _values(self, rank: int, windows: int) -> tuple[float | None, ...]:
        base = 0.355 + (rank % PER_NODE) * 0.002 + self._chance.uniform(0, 0.006)
        values: list[float | None] = [
            round(base + self._chance.gauss(0, 0.004), 5) for _ in range(windows)
        ]
        for i in range(windows):
            if rank % 128 == 93 and i > windows * 0.62:
                values[i] = 0.47 + self._chance.gauss(0, 0.006)
            if rank % 128 // PER_NODE == 4 and windows * 0.2 < i < windows * 0.35:
                values[i] = 0.41 + self._chance.gauss(0, 0.01)
            if rank % 128 in {40, 41} and i < windows * 0.08:
                values[i] = None
        return tuple(values)

    async def listed(self, question: Message) -> Message:
        """Checkpoints in three tiers."""
        places = []
        for i in range(12):
            step, saved = 57_500 - i * 1500, self._now - timedelta(minutes=4 + 20 * i)
            common: dict[str, Any] = {
                "step": step,
                "saved_at": saved,
                "size_bytes": 140 << 30,
                "shards": 128,
                "world_size": 128,
                "round": 3,
            }
            if i < 2:
                holders = tuple(
                    ReplicaPlace(
                        slot=slot,
                        holders=tuple(
                            Peer(
                                node=node((slot + k) % NODES),
                                slot=(slot + k) % NODES,
                                address="10.4.0.9",
                                port=7100,
                            )
                            for k in (1, 2)
                        ),
                    )
                    for slot in range(NODES)
                )
                places.append(
                    CheckpointPlace(tier="memory", path="", survivable_losses=0, **common)
                )
                places.append(
                    CheckpointPlace(
                        tier="peer", path="", survivable_losses=2, replicas=holders, **common
                    )
                )
            places.append(CheckpointPlace(tier="global", path=f"s3://ckpt/{JOB}/step-{step}", is_verified=i not in {0, 5},
                                          verified_at=saved + timedelta(minutes=2), is_pinned=i == 6, is_quarantined=i == 5,
                                          note="shard 41 has another hash than its manifest" if i == 5 else "", **common))  # fmt: skip
        assert isinstance(question, ListCheckpoints)
        wanted = [one for one in places if question.tier in {"", one.tier}]
        return CheckpointsLocated(places=tuple(wanted))

    async def collectives(self, _question: Message) -> Message:
        """One rank never joined."""
        others = tuple(rank for rank in range(16, 48) if rank != 21)
        return CollectivesRead(
            verdict="fault", summary="Rank 21 never joined all_reduce 1204 of group dp, in which 127 ranks wait.", ranks=128, dumps=127,
            faults=(CollectiveFault(kind="missing_rank", summary="127 ranks wait for rank 21 in all_reduce", confidence=0.93,
                                    suspects=(Suspicion(rank=21, reason="it never joined"),), waiting=others),),
            collectives=(OpenCollective(group="dp", sequence=1204, operation="all_reduce", where="train.py:188", age_s=2.1,
                                        never_joined=(21,), started=others),
                         OpenCollective(group="tp2", sequence=88_120, operation="all_gather", where="train.py:150",
                                        never_joined=(21,), started=(16, 17, 18, 19), scheduled=(20, 22, 23)),
                         OpenCollective(group="dp", sequence=1203, operation="reduce_scatter", where="train.py:188",
                                        completed=(*others, 21))),
            without_dump=(21,))  # fmt: skip

    async def stacks(self, _question: Message) -> Message:
        """All but one wait."""
        return StacksRead(
            verdict="odd", summary="1 rank stands elsewhere: rank 21, in the allocator.", confidence=0.9, ranks=128,
            suspects=(Suspicion(rank=21, reason="it stands elsewhere"),), waiting=tuple(r for r in range(128) if r != 21),
            stacks=(FoldedStack(ranks=(21,), thread="MainThread", does="raises an exception",
                                frames=("main (train.py:301)", "step (train.py:188)", "backward (torch/_tensor.py:648)", "malloc (CUDACachingAllocator)")),
                    FoldedStack(ranks=tuple(r for r in range(128) if r != 21), thread="MainThread", does="waits in all_reduce",
                                frames=("main (train.py:301)", "step (train.py:188)", "backward (torch/_tensor.py:648)", "all_reduce (torch/distributed)"))))  # fmt: skip


@asynccontextmanager
async def answering(bus: Bus, now: datetime, ranks: int = NODES * PER_NODE) -> AsyncIterator[None]:
    """With services that answer what pages ask."""
    services = Services(now, ranks)
    parts: Mapping[str, Mapping[str, Handler]] = {
        "straggler": {
            "scores": services.scores,
            "timings": services.timings,
            "heat_map": services.heat_map,
        },
        "catalog": {"list": services.listed},
        "attribution": {"collectives": services.collectives, "stacks": services.stacks},
    }
    async with AsyncExitStack() as opened:
        for name, verbs in parts.items():
            await opened.enter_async_context(bus.answer(name, verbs))
        yield


LOG_ROUND = 3
_LOG_LINES = 40
_HOSTILE_LINE = (
    "\x1b]0;title\x07\x1b[2J<script>alert('log')</script> \x1b[8mhidden\x1b[0m \u202egnp.exe"
)


def _log_lines(rank: int) -> Iterator[str]:
    for number in range(_LOG_LINES):
        step = 57_460 + number
        text = (
            f"step {step} loss {1.93 + math.sin(step + rank) / 50:.4f} tokens/s {4100 + step % 70}"
        )
        yield f"[\x1b[32mINFO\x1b[0m] {text}" if number % 8 == rank % 8 else text
    if rank == 0:
        yield "\x1b[1;33mWARNING\x1b[0m: the learning rate is \x1b[36m0\x1b[0m since step 57 490"
        yield _HOSTILE_LINE


async def fill_logs(api: Api, now: datetime) -> None:
    """The output of two nodes of the newest round in the log store."""
    for rank in range(2 * PER_NODE):
        where, file = node(rank // PER_NODE), f"f{rank}"
        texts: dict[LogStream, list[str]] = {"stdout": list(_log_lines(rank))}
        if rank == 5:
            texts["stderr"] = ["train.py:188: \x1b[31mUserWarning\x1b[0m: a gradient has 3 NaN"]
        files = []
        for stream, lines in texts.items():
            late_us = 38_000_000 if stream == "stderr" else 0
            began = to_us(now) - 42_000_000 + rank * 7_000 + late_us
            times = tuple((at + 1, began + at * 1_000_000) for at in range(len(lines)))
            data = "".join(f"{line}\n" for line in lines).encode()
            await put_output(
                api,
                stream,
                rank,
                data,
                LogHeader(file=file + stream, offset=0, size=len(data), line=0, times=times),
            )
            files.append(SentLogFile(rank=rank, stream=stream, file=file + stream, size=len(data), sent=len(data), lines=len(lines),
                                     first_us=began, last_us=times[-1][1], is_over=False))  # fmt: skip
        index = await api.bus.rank_logs.indexes(JOB, LOG_ROUND)
        older = next((one.files for one in index if one.node == where), ())
        await api.bus.rank_logs.put_index(
            LogIndex(job=JOB, round=LOG_ROUND, node=where, at_us=to_us(now), files=(*older, *files))
        )


async def put_output(
    api: Api, stream: LogStream, rank: int, data: bytes, header: LogHeader
) -> None:
    """A piece of what a rank has written."""
    piece = LogPiece(job=JOB, round=LOG_ROUND, node=node(rank // PER_NODE), rank=rank,
                     stream=stream, header=header, data=data)  # fmt: skip
    await api.bus.rank_logs.put(piece)


async def fill(api: Api, now: datetime) -> None:
    """The record, and what agents say now."""
    await fill_logs(api, now)
    blob = await api.bus.blobs.put(JOB, TAIL.encode())
    told = facts(now, blob)
    for start in range(0, len(told), 2000):
        await api.add(*told[start : start + 2000])
    for beat in beats(now):
        api.context.beats.hear(beat)


@asynccontextmanager
async def opened(
    folder: Path, ranks: int = NODES * PER_NODE, *, is_empty: bool = False
) -> AsyncIterator[Api]:
    """The interface over a database with the fleet in it."""
    now = datetime.now(UTC)
    async with open_database(f"sqlite:///{folder / 'dashboard.db'}") as database:
        await upgrade(database)
        api = Api(database, FactLog(database, fold), SystemClock())
        await api.open()
        if not is_empty:
            await fill(api, now)
        async with answering(api.bus, now, ranks):
            yield api


async def _beat(api: Api) -> None:
    for number in itertools.count(_LOG_LINES + 2):
        text = f"step {57_460 + number} \x1b[32mloss\x1b[0m <b>{number}</b>\n".encode()
        at_us = to_us(datetime.now(UTC))
        header = LogHeader(
            file="f0stdout", offset=number * 1000, size=len(text), line=number, times=((1, at_us),)
        )
        await put_output(api, "stdout", 0, text, header)
        for beat in beats(datetime.now(UTC)):
            api.context.beats.hear(beat)
        await api.clock.sleep(1)


async def _serve(folder: Path, port: int, *, is_empty: bool, ranks: int) -> None:
    async with opened(folder, ranks, is_empty=is_empty) as api:
        listener = listen("127.0.0.1", port, remedy="name another port")
        token = await api.token("admin")
        sys.stdout.write(f"{url_of(listener)}  token {token}\n")
        sys.stdout.flush()
        async with asyncio.TaskGroup() as tasks:
            if not is_empty:
                tasks.create_task(_beat(api))
            tasks.create_task(serve_asgi(api.app, listener, asyncio.Event(), drain_within_s=0.5))


def main(folder: str, port: str, *more: str) -> None:
    """`python -m tests.integration.history.dashboard.dashboard_story FOLDER PORT [--empty] [RANKS]`."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    ranks = next((int(word) for word in more if word.isdecimal()), NODES * PER_NODE)
    asyncio.run(_serve(Path(folder), int(port), is_empty="--empty" in more, ranks=ranks))


if __name__ == "__main__":
    main(*sys.argv[1:])
