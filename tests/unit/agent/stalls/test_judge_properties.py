"""The judge over random orders of events: what never may happen, never does."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from everstep_services.agent.stalls.judge import Moving, Stalled, StallJudge
from everstep_services.agent.stalls.limits import StallLimits
from tests.unit.agent.stalls.monitored_ranks import WatchedNode
from tests.unit.agent.stalls.stalled_ranks import Clock, StallRank, clock_of_pages, limits_of
from tests.variants import variant
from trainer_sdk import layout
from trainer_sdk.page import BadPageError, make_page

SECTIONS = ("data", "forward", "evaluation", "checkpoint")
LONGEST_S = 50.0


@pytest.fixture
def clock() -> Iterator[Clock]:
    clock = Clock()
    with clock_of_pages(clock):
        yield clock


def limits() -> StallLimits:
    names = dict.fromkeys((*SECTIONS, "step", "outside", "first_step"), LONGEST_S)
    return limits_of(**names)


class Schedule:
    """One node under random events, looked at whenever its judge wants to be."""

    def __init__(self, folder: Path, clock: Clock, seed: int, ranks: int = 3) -> None:
        self.folder = folder
        self.clock = clock
        self.seed = seed
        self.rng = random.Random(seed)
        self.ranks = [StallRank(folder, rank, clock) for rank in range(ranks)]
        self.judge = StallJudge(limits(), clock.now)
        self.paused: set[int] = set()
        self.findings: list[Stalled] = []
        self._stalled: set[int] = set()

    def play(self, events: int) -> None:
        """Do this number of things, and look in between."""
        for _ in range(events):
            self._event(self.rng.choice(self.ranks))
            self.wait(self.rng.choice([0.0, 0.1, 5.0, 30.0, 80.0]))

    def wait(self, seconds: float) -> None:
        end = self.clock.now + seconds
        self.look()
        while self.judge.wake_at < end:
            self.clock.now = self.judge.wake_at
            self.look()
        self.clock.now = end
        self.look()

    def look(self) -> None:
        for news in self.judge.look([rank.view() for rank in self.ranks], self.clock.now):
            match news:
                case Stalled(place=place, waited_s=waited_s):
                    said = f"seed {self.seed}: rank {place.rank} at {self.clock.now:g}"
                    assert place.rank not in self.paused, f"{said} is paused"
                    assert place.rank not in self._stalled, f"{said} was reported twice"
                    assert waited_s >= place.limit.s - 1e-6, f"{said} only waited {waited_s:g} s"
                    self._stalled.add(place.rank)
                    self.findings.append(news)
                case Moving(stalled=stalled):
                    self._stalled.remove(stalled.place.rank)
                case _:
                    pass

    def restart(self) -> None:
        """The ranks are killed as they are, and a new round begins."""
        self.ranks = [StallRank(self.folder, one.rank, self.clock) for one in self.ranks]
        self.judge = StallJudge(limits(), self.clock.now)
        self.paused.clear()
        self._stalled.clear()

    def _event(self, rank: StallRank) -> None:
        run, name = rank.run, self.rng.choice(SECTIONS)
        match self.rng.randrange(7):
            case 0 | 1:
                run.begin(name)
            case 2:
                run.end(name)
            case 3:
                run.step()
            case 4:
                run.heartbeat()
            case 5 if rank.rank in self.paused:
                run.resume()
                self.paused.discard(rank.rank)
            case 5:
                run.pause()
                self.paused.add(rank.rank)
            case _:
                run.end_all()


def play(folder: Path, clock: Clock, seeds: range) -> list[Schedule]:
    played = []
    for seed in seeds:
        schedule = Schedule(folder, clock, seed)
        schedule.play(12)
        # A crash with whatever is open; then a round that is healthy, but for one stall.
        schedule.restart()
        before = len(schedule.findings)
        schedule.wait(LONGEST_S - 1)
        assert len(schedule.findings) == before, f"seed {seed}: the round before has an effect"
        for _ in range(3):
            for rank in schedule.ranks:
                with rank.run.section("data"):
                    pass
                rank.run.step()
            schedule.wait(20)
        assert len(schedule.findings) == before, f"seed {seed}: a healthy round has a finding"
        played.append(schedule)
    return played


@pytest.mark.parametrize("seeds", [range(100), variant(range(100, 500)), variant(range(500, 1000))])
def test_a_thousand_orders_of_events(tmp_path: Path, clock: Clock, seeds: range) -> None:
    """Ranks die with sections open, and the next round has no finding of them (A3.3)."""
    played = play(tmp_path, clock, seeds)
    # They are worth something: ranks did stall.
    assert sum(len(one.findings) for one in played) > 0.4 * len(seeds)


@pytest.mark.chaos
@pytest.mark.timeout(900)
@pytest.mark.parametrize("chunk", range(10))
def test_twenty_thousand_orders_of_events(tmp_path: Path, clock: Clock, chunk: int) -> None:
    """Twenty thousand more seeds of the same kind (A3.3)."""
    play(tmp_path, clock, range(10_000 + chunk * 2000, 10_000 + (chunk + 1) * 2000))


@pytest.mark.parametrize("seed", range(20))
def test_two_stalls_of_one_rank_are_two_findings(tmp_path: Path, clock: Clock, seed: int) -> None:
    """A rank that recovers in between is found each time (A3.4)."""
    rng = random.Random(seed)
    schedule = Schedule(tmp_path, clock, seed, ranks=1)
    run = schedule.ranks[0].run
    run.step()
    for number in range(2):
        name = rng.choice(SECTIONS)
        run.begin(name)
        schedule.wait(LONGEST_S + rng.uniform(1, 100))
        run.end(name)
        run.step()
        schedule.wait(rng.uniform(0, LONGEST_S / 2))
        assert len(schedule.findings) == number + 1
    assert schedule.findings[0] is not schedule.findings[1]


def damage(page: "memoryview[int]", rng: random.Random) -> None:
    """Write what no rank writes, somewhere among what is read."""
    places = [*range(layout.MAGIC_AT, layout.GROUP_TIMEOUT_NS + 1)]
    places += [layout.COMPILING_NS, layout.COMPILED_NS]
    lanes_end = layout.LANES_AT + layout.LANES * layout.LANE_WORDS
    places += [*range(layout.LANES_AT, lanes_end), *range(layout.SECTIONS_AT, layout.VALUES_AT)]
    for place in rng.sample(places, rng.choice([1, 3, 100, 600])):
        page[place] = rng.choice(
            [-1, 2**63 - 1, -(2**63), rng.randrange(2**63), 0x7FF8 << 48, rng.randrange(100)]
        )


@pytest.mark.parametrize("chunk", [0, 1, variant(2), variant(3)])
def test_a_damaged_page_is_said_and_not_trusted(tmp_path: Path, clock: Clock, chunk: int) -> None:
    refused = 0
    for seed in range(chunk * 250, chunk * 250 + 250):
        node = WatchedNode(tmp_path, clock, limits().rules, 1)
        for name in SECTIONS:
            node.ranks[0].run.begin(name)
        node.ranks[0].run.step()
        damage(node.ranks[0].link.words, random.Random(seed))
        node.wait(2 * LONGEST_S)
        if node.said:
            refused += 1
            (said,) = node.said
            assert said.startswith("the page of rank 0 is damaged, and not trusted: ")
            assert not node.stalled, f"seed {seed}: what is not trusted is not evidence"
    assert refused > 100


def test_a_page_that_was_cut_off_is_bad_at_every_size(tmp_path: Path) -> None:
    path = tmp_path / "page"
    for size in (0, 8, 4096, layout.PAGE_BYTES - 8):
        page = make_page(str(path))
        with path.open("r+b") as file:
            file.truncate(size)
        with pytest.raises(BadPageError, match=f"cut to {size} bytes"):
            page.read()
