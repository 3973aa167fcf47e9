"""Who waits for the late rank does not excuse it: what collectives show of who waits for whom."""

import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from math import inf
from pathlib import Path

import pytest

from everstep.messages import LimitsDocument, NameExcuse, SectionLimit
from everstep.messages.orders import GroupPosition
from everstep_services.agent.stalls.judge import Excused, Stalled, StallJudge
from everstep_services.agent.stalls.rank_view import ActivitySigns
from tests.unit.agent.stalls.monitored_ranks import WatchedNode
from tests.unit.agent.stalls.stalled_ranks import Clock, StallRank, clock_of_pages, limits_of
from tests.unit.agent.stalls.test_collectives import entry, trace
from tests.unit.worker_server import worker_server
from trainer_sdk import layout


@pytest.fixture
def clock() -> Iterator[Clock]:
    clock = Clock()
    with clock_of_pages(clock):
        yield clock


def waits(number: int, idle_s: float = 9.0, group: str = "0") -> ActivitySigns:
    """It is in this collective, of all ranks unless a group is named."""
    return ActivitySigns(
        idle_s,
        None,
        "gloo:all_reduce",
        is_recorded=True,
        entered_in={group: number},
        awaits=(group, number),
    )


def in_none(entered: int | None, idle_s: float = 9.0, **groups: int) -> ActivitySigns:
    """It has left these, and is in none."""
    entered_in = groups if entered is None else {"0": entered, **groups}
    return ActivitySigns(idle_s, is_recorded=True, entered_in=entered_in)


class TestTheLateRank:
    """Rank 0 stopped in `exchange`, which may take 600 s; a moment later rank 1 did in `data`."""

    @pytest.fixture
    def ranks(self, tmp_path: Path, clock: Clock) -> list[StallRank]:
        ranks = [StallRank(tmp_path, rank, clock) for rank in range(2)]
        for rank in ranks:
            rank.run.step()
        ranks[0].run.begin("exchange")
        clock.now += 1
        ranks[1].run.begin("data")
        return ranks

    @pytest.fixture
    def says(self, ranks: list[StallRank], clock: Clock) -> Callable[..., list[type]]:
        judge, stopped_s = StallJudge(limits_of(exchange=600, data=30), clock.now), clock.now

        def look(
            first: ActivitySigns, late: ActivitySigns, at_s: float = 31, looked_s: float = 30.5
        ) -> list[type]:
            clock.now = stopped_s + at_s
            for rank, signs in zip(ranks, (first, late), strict=True):
                rank.signs, rank.looked_s = signs, stopped_s + looked_s
            return [type(one) for one in judge.look([rank.view() for rank in ranks], clock.now)]

        return look

    def test_is_not_excused_by_who_waits_for_it(self, says: Callable[..., list[type]]) -> None:
        assert says(waits(7), in_none(6)) == [Stalled]

    def test_is_not_excused_by_who_waits_for_it_in_another_group(
        self, says: Callable[..., list[type]]
    ) -> None:
        """DeepSpeed and Megatron call collectives in groups of their own (A3.3)."""
        assert says(waits(7, group="dp"), in_none(90, dp=6)) == [Stalled]

    @pytest.mark.parametrize(
        ("first", "late"),
        [
            (ActivitySigns(), ActivitySigns()),
            (waits(7), ActivitySigns()),
            (waits(7), in_none(None)),
            (waits(7), in_none(7)),
            (waits(7), waits(6)),
            (waits(7, idle_s=0.0), in_none(6)),
            (waits(7, group="half"), in_none(6)),
            (waits(7, group="half"), in_none(6, half=7)),
            (
                ActivitySigns(9.0, None, "gloo:send", is_recorded=True, entered_in={"0": 7}),
                in_none(6),
            ),
            (in_none(7), in_none(6)),
        ],
        ids=[
            "nothing is known", "nor of the late one", "nor what it has entered",
            "it has been in that", "it is in one itself", "the other works",
            "it is not of that group", "it has been in that of the group", "the other sends",
            "the other is in none",
        ],
    )  # fmt: skip
    def test_is_excused_where_it_may_wait_for_the_other(
        self, says: Callable[..., list[type]], first: ActivitySigns, late: ActivitySigns
    ) -> None:
        assert says(first, late) == [Excused]

    @pytest.mark.parametrize(
        ("at_s", "looked_s"), [(31, 28.5), (45, 31)], ids=["before it was late", "long ago"]
    )
    def test_is_excused_where_it_was_not_seen_lately(
        self, says: Callable[..., list[type]], at_s: float, looked_s: float
    ) -> None:
        assert says(waits(7), in_none(6), at_s, looked_s) == [Excused]

    def test_is_excused_by_who_works_and_has_not_come_as_far(
        self, ranks: list[StallRank], tmp_path: Path, clock: Clock
    ) -> None:
        """It may wait for that by other means than a collective, also where that moved later."""
        judge, stopped_s = (
            StallJudge(limits_of(exchange=600, data=30, other=60), clock.now),
            clock.now,
        )
        clock.now += 2
        ranks.append(StallRank(tmp_path, 2, clock))
        ranks[2].run.step()
        ranks[2].run.begin("other")
        found = []
        for works in (True, False):
            clock.now = stopped_s + 31
            signs = (waits(7), in_none(6), in_none(6, idle_s=0.0 if works else 9.0))
            for rank, seen in zip(ranks, signs, strict=True):
                rank.signs, rank.looked_s = seen, stopped_s + 30.5
            found.append(
                [type(one) for one in judge.look([one.view() for one in ranks], clock.now)]
            )
        assert found == [[Excused], [Stalled]]


def test_agents_look_closer_only_while_somebody_may_be_late(tmp_path: Path, clock: Clock) -> None:
    node = WatchedNode(tmp_path, clock, limits_of(data=30).rules, 1)
    (rank,) = node.ranks
    rank.run.step()
    rank.run.begin("data")
    node.wait(29)
    assert node.watch._silent() == {}
    node.wait(0.5)
    assert set(node.watch._silent()) == {0}
    rank.run.end("data")
    node.wait(1)
    assert node.watch._silent() == {}


@pytest.fixture
def sleeper() -> Iterator[int]:
    code, pipe = "import sys; print(flush=True); sys.stdin.read()", subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None
        process.stdout.readline()  # what its start has taken is over
        yield process.pid
        process.kill()


async def test_another_nodes_rank_is_looked_at_and_then_not_named(
    tmp_path: Path, clock: Clock, sleeper: int
) -> None:
    node = WatchedNode(tmp_path, clock, limits_of(exchange=600).rules, 1)
    (rank,) = node.ranks
    rank.run.step()
    rank.run.begin("exchange")
    node.watched(0).pid = sleeper
    node.wait(40)

    def is_named(entered: int | None, **groups: int) -> bool:
        order = NameExcuse(
            id="0" * 32, job="j", round=1, reason="", node="n2", rank=1, waited_s=39.0, step=1,
            entered=entered, entered_in=tuple(
                GroupPosition(group=group, entered=number) for group, number in groups.items()
            ),
        )  # fmt: skip
        return node.watch.excuse(order) is not None

    assert is_named(None)
    assert node.watch._silent() == {}, "of no use where nothing is known of the late one"
    assert is_named(6)
    recorded = trace(entry(0, 0.0, retired=False, collective_seq_id=7), g0=7)
    async with worker_server(tmp_path, {"fr_trace_json": lambda: recorded}):
        for _ in range(3):
            await node.watch._closer.look(node.watch._silent())
            clock.now += 4
    assert is_named(7)
    assert not is_named(6), "as an older release asks"
    assert not is_named(None, **{"0": 6, "1": 3})
    assert is_named(None, **{"1": 6}), "it is not of that group"


async def test_a_late_rank_is_looked_at_again_while_its_excuse_is_asked_for(
    tmp_path: Path, clock: Clock, sleeper: int
) -> None:
    """How far it has come may not have been known when its stall was reported (A3.3)."""
    node = WatchedNode(tmp_path, clock, limits_of(data=30).rules, 1)
    (rank,) = node.ranks
    rank.run.step()
    rank.run.begin("data")
    node.watched(0).pid = sleeper
    node.wait(60)
    assert node.watch.entered_in(0) == {}
    assert set(node.watch._silent()) == {0}
    recorded = trace(entry(0, 0.0, retired=True, collective_seq_id=7), g0=7)
    async with worker_server(tmp_path, {"fr_trace_json": lambda: recorded}):
        for _ in range(3):
            await node.watch._closer.look(node.watch._silent())
            clock.now += 4
    assert node.watch.entered_in(0) == {"0": 7}


# -- random trainings ----------------------------------------------------------------------------

LIMIT_S, LOOK_S, RANKS = 20.0, 5.0, 3
LEARNED = LimitsDocument(
    job="j",
    limits=(SectionLimit(section="", limit_s=LIMIT_S, source="learned"),),
    first_step_limit_s=7200,
    first_step_longest_s=1,
    reason="",
)


class Training:
    """Ranks of an unmodified script. All run the same random program: each works for itself, one
    works and the others wait for its file, all meet in a collective."""

    def __init__(self, seed: int, *, hangs: bool) -> None:
        rng = random.Random(seed)
        self.spans: list[list[tuple[float, str, int]]] = [[] for _ in range(RANKS)]
        """For each rank since when it does what, and its last collective."""
        self.hung, self.hangs_s = rng.randrange(RANKS), inf
        self._now, self._entered = [0.0] * RANKS, 0
        self._meet()
        for _ in range(12):
            match rng.randrange(4):
                case 0:
                    self._meet()
                case 1:
                    self._alone([rng.uniform(0, 15) for _ in range(RANKS)])
                case _:
                    self._for_others(rng.randrange(RANKS), rng.uniform(0, 15))
        self._meet()
        self._alone([rng.uniform(0, 15) for _ in range(RANKS)])
        if hangs:
            self.hangs_s = self._now[self.hung]
            self._does(self.hung, "hangs", inf)
        self._meet()
        self.ends_s = max(self._now)

    def signs(self, rank: int, now: float, looked_s: float) -> ActivitySigns:
        known = [span for span in self.spans[rank] if span[0] <= now]
        since_s, does, entered = known[-1]
        worked = [
            end[0] for begin, end in pairwise(known) if begin[1] == "works" and end[0] > looked_s
        ]
        idle_s = 0.0 if does == "works" else now - max([since_s, *worked])
        collective_s = max(at_s for at_s, what, _ in known if what == "meets")
        seen = waits(entered, idle_s) if does == "meets" else in_none(entered, idle_s)
        return replace(seen, collective_s=1000 + collective_s)

    def _does(self, rank: int, what: str, until_s: float) -> None:
        self.spans[rank].append((self._now[rank], what, self._entered))
        self._now[rank] = until_s

    def _alone(self, seconds: list[float]) -> None:
        for rank, longer_s in enumerate(seconds):
            self._does(rank, "works", self._now[rank] + longer_s)

    def _for_others(self, owner: int, seconds: float) -> None:
        self._does(owner, "works", self._now[owner] + seconds)
        for rank in range(RANKS):
            if rank != owner:
                self._does(rank, "awaits a file", max(self._now[rank], self._now[owner]))

    def _meet(self) -> None:
        self._entered += 1
        together_s = max(self._now)
        for rank in range(RANKS):
            if self._now[rank] < inf:
                self._does(rank, "meets", together_s)


def watched(training: Training, folder: Path, clock: Clock) -> list[Stalled | Excused]:
    """What a judge says of it that looks every second, and closer as an agent does."""
    clock.now = 1000.0
    limits = limits_of()
    limits.learn(LEARNED)
    ranks = [StallRank(folder, rank, clock) for rank in range(RANKS)]
    for rank in ranks:
        rank.link.up()
        rank.link.words[layout.COUNTED_BY] = layout.BY_OPTIMIZER
        rank.link.words[layout.STEPS] = rank.link.words[layout.STEP] = 1
    judge, looked_s, late, news = StallJudge(limits, clock.now, 0.6), -inf, set[int](), []
    while clock.now < 1000 + min(training.ends_s, training.hangs_s + 4 * LIMIT_S):
        before, late = late, judge.in_question(clock.now)
        if clock.now - looked_s >= LOOK_S or late - before:
            for rank in ranks:
                rank.signs = training.signs(rank.rank, clock.now - 1000, looked_s - 1000)
                rank.looked_s = clock.now
            looked_s = clock.now
        news += judge.look([rank.view() for rank in ranks], clock.now)
        clock.now += 0.5
    return [one for one in news if isinstance(one, Stalled | Excused)]


@pytest.mark.parametrize("chunk", range(4))
def test_nobody_is_found_who_waits_for_a_rank_that_works(
    tmp_path: Path, clock: Clock, chunk: int
) -> None:
    excused = 0
    for seed in range(chunk * 25, chunk * 25 + 25):
        news = watched(Training(seed, hangs=False), tmp_path, clock)
        assert [one for one in news if isinstance(one, Stalled)] == [], f"seed {seed}"
        excused += len(news)
    assert excused > 10


@pytest.mark.parametrize("chunk", range(4))
def test_the_one_that_hangs_is_found_first_and_soon(
    tmp_path: Path, clock: Clock, chunk: int
) -> None:
    for seed in range(chunk * 25, chunk * 25 + 25):
        training = Training(seed, hangs=True)
        news = watched(training, tmp_path, clock)
        found = [one for one in news if isinstance(one, Stalled)]
        assert found[0].place.rank == training.hung, f"seed {seed}"
