"""Who stopped first: from steps, from times, from sections, and when beats cannot tell."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.messages import RankBeat, RankRecovered, RankStalled
from everstep_services.health.domain.stalls import StallFinding, StallLocator
from tests.unit.health.fleet import beat

AT = beat("x", 1).at


class World:
    """Two ranks a node, beats once a second, judged four times a second."""

    def __init__(self, nodes: int = 4) -> None:
        self.locator = StallLocator(3600.0)
        self.now = 1000.0
        self.round = 1
        self.back_s = 0.0
        self.silent: set[str] = set()
        self.nodes = [f"n{number}" for number in range(nodes)]
        self.ranks = range(2 * nodes)
        self.stopped: dict[int, float] = {}
        self.steps = dict.fromkeys(self.ranks, 10)
        self.sections: dict[int, str] = {}
        self.states: dict[int, str] = {}
        self.collectives: dict[int, str] = {}
        self.found: list[StallFinding] = []

    def stop(self, rank: int, *, at: float, section: str = "forward", step: int = 10) -> None:
        self.stopped[rank], self.sections[rank], self.steps[rank] = at, section, step

    def stop_all(self, *but: int, at: float, section: str = "forward", step: int = 10) -> None:
        for rank in self.ranks:
            if rank not in but:
                self.stop(rank, at=at, section=section, step=step)

    def beat_of(self, node: str, sequence: int = 1) -> None:
        number = self.nodes.index(node)
        ranks = tuple(self.rank_beat(rank) for rank in (2 * number, 2 * number + 1))
        said = beat(node, sequence, state="running", round=self.round, slot=number, ranks=ranks)
        self.locator.hear(said, self.now)

    def rank_beat(self, rank: int) -> RankBeat:
        return RankBeat(
            rank=rank,
            state=self.states.get(rank, "running"),
            step=self.steps[rank],
            progress_age_s=max(0.001, self.now - self.stopped.get(rank, self.now)),
            section=self.sections.get(rank, "forward"),
            collective=self.collectives.get(rank),
        )

    def stalled(self, rank: int, fact: str = "", waits: bool | None = False) -> None:
        """Its agent reports it, in a fact and from the next beat on."""
        self.states[rank] = "stalled"
        stall = RankStalled(
            id=fact or f"stall-{rank}-{self.now}",
            job="j",
            at=AT,
            source="agent",
            round=self.round,
            node=self.nodes[rank // 2],
            slot=rank // 2,
            rank=rank,
            local_rank=rank % 2,
            waited_s=self.now - self.stopped[rank],
            limit_s=5.0,
            limit_source="learned",
            phase="section",
            section=self.sections[rank],
            step=self.steps[rank],
            is_waiting_for_ranks=waits,
        )
        self.locator.stalled(stall, self.now)

    def recovered(self, rank: int) -> None:
        self.states.pop(rank, None)
        self.stopped.pop(rank, None)
        self.locator.recovered(
            RankRecovered(
                id=f"back-{rank}-{self.now}",
                job="j",
                at=AT,
                source="agent",
                round=self.round,
                node=self.nodes[rank // 2],
                slot=rank // 2,
                rank=rank,
                local_rank=rank % 2,
                stalled_s=1.0,
                stall="",
            )
        )

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end - 1e-9:
            self.now += 0.25
            if self.now % 1 == 0:
                for node in self.nodes:
                    if node not in self.silent:
                        self.beat_of(node)
            self.found += self.locator.judge(self.now, self.back_s)

    def happen(self, what: str, rank: int) -> None:
        """Anything, to anybody."""
        match what:
            case "stop":
                self.stop(rank, at=self.now)
            case "stall":
                self.stopped.setdefault(rank, self.now - 5)
                self.sections.setdefault(rank, "forward")
                self.stalled(rank)
            case "recover":
                self.recovered(rank)
            case "round":
                self.round += 1
                self.stopped, self.states = {}, {}
            case "exited" | "paused":
                self.states[rank] = what
            case _:
                self.silent ^= {f"n{rank // 2}"}

    @property
    def one(self) -> StallFinding:
        (found,) = self.found
        return found


def test_the_rank_that_stopped_first_is_named_with_its_lead() -> None:
    world = World()
    world.run(3)
    world.stop(5, at=world.now, section="data")
    world.stop_all(5, at=world.now + 0.8, section="data")
    world.run(6)
    world.stalled(5)
    world.run(3)
    found = world.one
    assert (found.first_ranks, found.nodes, found.section) == ((5,), ("n2",), "data")
    assert (found.waiting_ranks, found.lead_s, found.is_certain) == (7, 0.8, True)
    assert found.reason == (
        "rank 5 on n2 in section data stopped 0.8 s before all others; 7 others wait"
    )


def test_a_rank_that_is_behind_by_a_step_is_first_whatever_the_clocks_say() -> None:
    world = World()
    world.run(3)
    world.stop_all(2, at=world.now, step=11)
    world.stop(2, at=world.now, step=10)
    world.run(6)
    world.stalled(0, waits=True)
    world.stalled(2)
    world.run(3)
    assert (world.one.first_ranks, world.one.is_certain) == ((2,), True)
    assert "made its last step, 10, before all others" in world.one.reason


@pytest.mark.parametrize("reported", [(5, True), (5, None), (0, False)])
def test_times_alone_do_not_tell_who_waits_for_whom(reported: tuple[int, bool | None]) -> None:
    """A stage of a pipeline that waits may have stopped before the one that it waits for."""
    world = World()
    world.run(3)
    world.stop(5, at=world.now)
    world.stop_all(5, at=world.now + 0.4)
    world.run(6)
    world.stalled(reported[0], waits=reported[1])
    world.run(3)
    assert (world.one.first_ranks, world.one.lead_s) == ((5,), 0.4)
    assert not world.one.is_certain


def test_a_rank_that_is_elsewhere_is_what_the_others_wait_for() -> None:
    """As rank 0 that evaluates alone: it moved on for long after the others had stopped."""
    world = World()
    world.run(3)
    world.stop_all(0, at=world.now, section="forward")
    world.run(20)
    world.stop(0, at=world.now, section="evaluation")
    world.run(6)
    world.stalled(3)
    world.run(3)
    assert (world.one.first_ranks, world.one.section) == ((0,), "evaluation")
    assert not world.one.is_certain


def test_ranks_that_stop_together_cannot_be_told_apart() -> None:
    world = World()
    world.run(3)
    world.stop_all(at=world.now)
    world.run(6)
    world.stalled(4)
    world.run(3)
    assert (world.one.first_ranks, world.one.waiting_ranks) == (tuple(range(8)), 0)
    assert not world.one.is_certain
    assert "beats cannot tell more" in world.one.reason


def of_unmodified(collectives: dict[int, str]) -> StallFinding:
    """What is found of scripts that name no section, and whose steps are short."""
    world = World()
    world.run(3)
    world.stop_all(at=world.now)
    world.collectives = collectives
    world.run(6)
    world.stalled(4)
    world.run(3)
    return world.one


ALL_WAIT = dict.fromkeys(range(8), "gloo:all_reduce of default_pg")


def test_of_ranks_that_stop_together_the_one_in_no_collective_is_first() -> None:
    found = of_unmodified(ALL_WAIT | {5: ""})
    assert (found.first_ranks, found.nodes, found.waiting_ranks) == ((5,), ("n2",), 7)
    assert not found.is_certain  # it may wait for what no recorder sees
    assert "is in no collective, while all others wait in one, but may wait, too" in found.reason


@pytest.mark.parametrize(
    "collectives",
    [
        ALL_WAIT,
        dict.fromkeys(range(8), ""),
        {rank: name for rank, name in ALL_WAIT.items() if rank != 3} | {5: ""},
        ALL_WAIT | dict.fromkeys(range(5), ""),
    ],
    ids=["all wait", "none waits", "of one nobody knows", "most do not"],
)
def test_collectives_that_name_nobody_tell_nothing(collectives: dict[int, str]) -> None:
    assert of_unmodified(collectives).first_ranks == tuple(range(8))


@pytest.mark.parametrize("silent", ["n0", "n2"])
def test_while_a_node_is_not_heard_nothing_is_certain(silent: str) -> None:
    """A node whose beats are missing makes a finding uncertain (A3.7)."""
    world = World()
    world.run(3)
    world.stop(2, at=world.now - 1)
    world.stop_all(2, at=world.now)
    world.silent = {silent}
    world.run(6)
    world.stalled(2)
    world.run(4)
    assert (world.one.first_ranks, world.one.is_certain) == ((2,), False)
    assert f"health had not heard {silent} since" in world.one.reason


def test_what_was_said_while_we_were_blind_makes_nothing_certain() -> None:
    world = World()
    world.run(3)
    world.stop(2, at=world.now - 1)
    world.stop_all(2, at=world.now)
    world.run(6)
    world.stalled(2)
    world.back_s = world.now + 0.1
    world.run(3)
    assert not world.one.is_certain


def test_a_stall_is_told_once_however_many_ranks_say_so() -> None:
    world = World()
    world.run(3)
    world.stop(5, at=world.now - 1)
    world.stop_all(5, at=world.now)
    world.run(6)
    for rank in world.ranks:
        world.stalled(rank)
        world.run(0.25)
    world.run(60)
    assert len(world.found) == 1


def test_a_second_stall_of_one_rank_is_another_one() -> None:
    """Each of the two stalls has its own finding (A3.4)."""
    world = World()
    world.run(3)
    for _ in range(2):
        world.stop(5, at=world.now - 1)
        world.stop_all(5, at=world.now)
        world.run(6)
        world.stalled(5)
        world.run(3)
        world.recovered(5)
        world.stopped.clear()
        world.run(5)
    first, second = world.found
    assert first.id != second.id


def test_beats_alone_tell_of_a_stall_and_of_its_end() -> None:
    world = World()
    world.run(3)
    world.stop(5, at=world.now - 1)
    world.stop_all(5, at=world.now)
    world.run(6)
    world.states[5] = "stalled"
    world.run(3)
    assert world.one.first_ranks == (5,)
    world.states.clear()
    world.stopped.clear()
    world.run(5)
    world.stop(1, at=world.now - 1, step=12)
    world.stop_all(1, at=world.now, step=12)
    world.run(6)
    world.states[1] = "stalled"
    world.run(3)
    assert world.found[1].first_ranks == (1,)


def test_nothing_of_a_round_reaches_the_next() -> None:
    """Stalls of a round that is over are not found in the next one (A3.3, A15.2)."""
    world = World()
    world.run(3)
    world.stop_all(at=world.now)
    world.run(6)
    world.now += 0.125  # nobody has been heard since
    world.stalled(5)
    world.now -= 0.125
    world.round, world.stopped = 2, {}
    world.states.clear()
    world.run(60)
    assert world.found == []
    world.round = 1
    world.stopped[5] = world.now - 9
    world.stalled(5)  # late, of a round that is over
    world.round, world.stopped = 2, {}
    world.states.clear()
    world.run(5)
    assert world.found == []


def test_two_observers_make_one_finding() -> None:
    found = []
    for shift_s in (0.0, 0.25):
        world = World()
        world.now += shift_s
        world.run(3)
        world.stop(5, at=world.now - 1)
        world.stop_all(5, at=world.now)
        world.run(6)
        for rank in (7, 5) if shift_s else (5, 7):
            world.stalled(rank, f"fact-{rank}")
        world.run(4)
        found.append(world.one.id)
    assert found[0] == found[1]


def test_ranks_that_were_stopped_do_not_change_where_they_stood() -> None:
    world = World()
    world.run(3)
    world.stop(5, at=world.now - 1)
    world.stop_all(5, at=world.now)
    world.run(6)
    world.stalled(5)
    world.states = dict.fromkeys(world.ranks, "exited")
    world.run(5)
    assert world.one.first_ranks == (5,)


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["stop", "stall", "recover", "run", "round", "exited", "paused", "silent"]),
        st.integers(0, 7),
    ),
    max_size=25,
)


@settings(max_examples=150, deadline=None)
@given(EVENTS)
def test_whatever_happens_findings_are_of_stalled_rounds_and_once_each(
    events: list[tuple[str, int]],
) -> None:
    world = World()
    world.run(2)
    for what, rank in events:
        world.happen(what, rank)
        before = len(world.found)
        world.run(1 + rank)
        for found in world.found[before:]:
            assert found.round == world.round
            assert found.first_ranks
    assert len(world.found) <= sum(what == "stall" for what, _ in events)
    assert len({found.id for found in world.found}) == len(world.found)
