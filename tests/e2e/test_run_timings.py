"""What agents tell of a real training: sections, collectives, host, window by window (A6.1)."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median

import pytest

from everstep import subjects
from everstep.bus import BusSettings, connect
from everstep.bus.auth.roles import SERVICE
from everstep.bus.client import NatsBus
from everstep.bus.ports import Inbox
from everstep.messages import NodeTimings, RankTiming, StragglersDocument, encode
from tests.e2e.cluster import Cluster
from tests.e2e.conftest import NewCluster
from tests.e2e.control_planes import Pieces
from tests.e2e.processes import SCRIPTS, Process, environment, python
from tests.variants import variant

LATE_RANK, LATE_S = 1, 0.03
WITHIN_S = 120.0
NODES = ("node-1", "node-2")
Window = Mapping[str, NodeTimings]
"""What each node told of the same steps."""


@pytest.fixture
def cluster(new_cluster: NewCluster, shared_pieces: Pieces, job: str) -> Cluster:
    """Without the service that would write the document itself."""
    if "straggler" in shared_pieces.processes:
        shared_pieces.kill("straggler")
    return new_cluster(shared_pieces, job)


def start(cluster: Cluster, kind: str) -> None:
    script = (SCRIPTS / "measured.py", cluster.folder, kind, LATE_RANK, LATE_S)
    for node in NODES:
        cluster.run("--nnodes", "2", "--nproc-per-node", "2", *map(str, script), node=node)


@asynccontextmanager
async def listening(
    cluster: Cluster, pieces: Pieces
) -> AsyncIterator[tuple[NatsBus, Inbox[NodeTimings]]]:
    login = pieces._as(SERVICE)
    settings = BusSettings(
        url=login["EVERSTEP_BUS__URL"],
        credentials_file=Path(login["EVERSTEP_BUS__CREDENTIALS_FILE"]),
    )
    async with (
        connect(settings, "test") as bus,
        bus.subscribe(subjects.timing(cluster.job), NodeTimings) as inbox,
    ):
        yield bus, inbox


async def windows(
    inbox: Inbox[NodeTimings], count: int, holds: Callable[[NodeTimings], bool] = lambda _: True
) -> list[Window]:
    """The first windows that both nodes have reported."""
    found: dict[tuple[int, int], dict[str, NodeTimings]] = defaultdict(dict)
    async with asyncio.timeout(WITHIN_S):
        while True:
            told = await inbox.get()
            if holds(told):
                found[told.first_step, told.last_step][told.node] = told
            whole: list[Window] = [one for one in found.values() if set(one) == set(NODES)]
            if len(whole) >= count:
                return whole


def ranks_of(window: Window) -> dict[int, RankTiming]:
    return {rank.rank: rank for told in window.values() for rank in told.ranks}


def entered(timing: RankTiming, op: str) -> dict[tuple[str, int], float]:
    """When each collective of this operation was entered, by group and sequence."""
    return {
        (series.group, series.first_sequence + place): timing.entries_from_s + us / 1e6
        for series in timing.collectives
        for place, us in enumerate(series.entered_us)
        if series.ops[series.op[place]].startswith(op)
    }


def lateness(window: Window, op: str) -> dict[int, float]:
    """By how much each rank enters later than the median of the others, in the median."""
    ranks = {rank: entered(timing, op) for rank, timing in ranks_of(window).items()}
    common = set.intersection(*(set(one) for one in ranks.values()))
    assert len(common) >= 8, "most are matched by group and sequence"
    return {
        rank: median(
            own[key] - median(other[key] for one, other in ranks.items() if one != rank)
            for key in common
        )
        for rank, own in ranks.items()
    }


def is_whole(told: NodeTimings) -> bool:
    """It has entries of all ranks; a rank that stands for a while leaves a window with a gap."""
    return all(rank.collectives and not rank.gap for rank in told.ranks)


async def put(bus: NatsBus, job: str, *, is_on: bool, steps: int) -> None:
    document = StragglersDocument(job=job, is_on=is_on, window_steps=steps)
    await bus.documents("STRAGGLERS").put(job, encode(document), revision=None)


async def silence(cluster: Cluster, inbox: Inbox[NodeTimings]) -> None:
    """The training makes many more steps than the last reported window has."""

    def newest_step() -> int:
        return min((rank["step"] or 0 for rank in cluster.ranks().values()), default=0)

    latest = 0
    async with asyncio.timeout(WITHIN_S):
        while await asyncio.to_thread(newest_step) < latest + 96:
            try:
                async with asyncio.timeout(0.1):
                    latest = (await inbox.get()).last_step
            except TimeoutError:
                latest = latest or await asyncio.to_thread(newest_step)


@pytest.mark.parametrize("kind", ["plain", variant("sections")])
def test_agents_tell_of_the_same_windows_and_who_is_late(
    cluster: Cluster, shared_pieces: Pieces, kind: str
) -> None:
    """A late rank enters collectives later, also in an unmodified script (A6.1).

    Timings are switched off and on, and windows made longer, without a restart (A6.4).
    """

    async def heard() -> tuple[list[Window], list[Window]]:
        async with listening(cluster, shared_pieces) as (bus, inbox):
            await asyncio.to_thread(start, cluster, kind)
            first = await windows(inbox, 3, is_whole)
            await put(bus, cluster.job, is_on=False, steps=16)
            await silence(cluster, inbox)
            await put(bus, cluster.job, is_on=True, steps=48)
            return first, await windows(inbox, 2)

    found, longer = asyncio.run(heard())
    cluster.finish()
    cluster.until_done()
    for window in longer:
        assert window["node-1"].last_step % 48 == 0
        assert window["node-1"].first_step % 48 == 1
    for window in found:
        told = window["node-1"]
        assert told.last_step % 16 == 0
        assert (told.last_step - told.first_step + 1) % 16 == 0
        assert [one.world for one in window.values()] == [4, 4]
        assert {one.slot for one in window.values()} == {0, 1}
        assert set(ranks_of(window)) == {0, 1, 2, 3}
        late = lateness(window, "all_reduce")
        assert max(late, key=lambda rank: late[rank]) == LATE_RANK, late
        assert late[LATE_RANK] > LATE_S / 2
        for timing in ranks_of(window).values():
            has_told_of_itself(timing, told, kind)


def has_told_of_itself(timing: RankTiming, told: NodeTimings, kind: str) -> None:
    steps = told.last_step - told.first_step + 1
    assert timing.gap == ""
    assert timing.steps == steps
    assert timing.window_s > steps * 0.02
    whole, *sections = timing.sections
    assert whole.section == ""
    assert steps - 1 <= whole.wall.count <= steps, "the first step has no beginning"
    assert timing.host is not None
    assert timing.host.cpu_s is not None
    if kind == "plain":
        assert sections == []
        return
    named = {one.section: one for one in sections}
    assert set(named) == {"data", "forward", "backward"}
    for one in sections:
        assert one.wall.count == steps
        assert one.cpu is not None or told.first_step == 1
    least_s = LATE_S if timing.rank == LATE_RANK else 0.0
    assert named["data"].wall.quantile_s(0.5) > 0.019 + least_s
    places = {
        timing.sections[section].section
        for series in timing.collectives
        for section, op in zip(series.section, series.op, strict=True)
        if series.ops[op].startswith("all_reduce")
    }
    assert places == ({"backward"} if timing.collectives else set())


@pytest.mark.variant
def test_ranks_of_another_launcher_are_measured_as_well(
    cluster: Cluster, shared_pieces: Pieces
) -> None:
    """Who keeps torchrun learns the same of its ranks, and who of them is late."""
    own = {
        **shared_pieces.login(cluster.job),
        "EVERSTEP_STATE_DIR": str(cluster.folder / "state"),
        "EVERSTEP_JOB": cluster.job,
    }
    script = (SCRIPTS / "measured.py", cluster.folder, "sections", LATE_RANK, LATE_S)
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")

    async def heard() -> NodeTimings:
        async with listening(cluster, shared_pieces) as (_, inbox), asyncio.timeout(WITHIN_S):
            while True:
                told = await inbox.get()
                if told.first_step > 1 and is_whole(told):
                    return told

    async def story() -> tuple[NodeTimings, Process]:
        return await asyncio.gather(heard(), asyncio.to_thread(launch))

    def launch() -> Process:
        environ = environment(cluster.folder, cluster.tag, **own)
        log = cluster.folder / "torchrun.log"
        return Process(python(*launcher, *map(str, script)), environ, log, cluster.folder)

    try:
        told, process = asyncio.run(story())
    finally:
        cluster.finish()
    assert process.wait() == 0
    assert (told.slot, told.slots, told.world, told.round) == (0, 1, 2, 1)
    assert [one.rank for one in told.ranks] == [0, 1]
    for timing in told.ranks:
        has_told_of_itself(timing, told, "sections")
    late = lateness({told.node: told}, "all_reduce")
    assert max(late, key=lambda rank: late[rank]) == LATE_RANK, late
