"""A link that slows the whole job: its node is found by its connections, not by own times."""

import random
from collections.abc import Collection, Mapping
from dataclasses import replace

import msgspec
import pytest

from everstep.messages import RankTiming
from everstep_services.straggler.domain.changes import Change, KeepsUp, SlowRankFound, StepsShifted
from everstep_services.straggler.domain.job import JobJudge
from everstep_services.straggler.domain.rules import LiveRules
from tests.unit.straggler.changes import without_costs
from tests.unit.straggler.windows import Delay, Simulation, Training

QUICK = Training(nodes=4, per_node=2, jitter=0.03)
SLOW = replace(QUICK, transfer_s=0.05)


def judged(
    simulation: Simulation,
    job: JobJudge,
    windows: int,
    held: Collection[int] = (),
    noise: random.Random | None = None,
    held_ms: float = 22,
    throttled: Mapping[int, float] | None = None,
) -> list[Change]:
    """The connections of `held` ranks hold back what they send; hosts hold `throttled` ranks back.

    With noise, those of all others vary from window to window between 1 and 12 ms.
    """
    changes: list[Change] = []
    for number in range(windows):
        for timings in simulation.window():
            ranks = tuple(
                _throttle(_alter(one, held, noise, held_ms), throttled or {})
                for one in timings.ranks
            )
            job.hear(msgspec.structs.replace(timings, ranks=ranks), float(number))
        changes += without_costs(job.close_due(float(number)))
    return changes


def _alter(
    one: RankTiming, held: Collection[int], noise: random.Random | None, held_ms: float
) -> RankTiming:
    assert one.host is not None
    own_s = one.host.round_trip_s
    assert own_s is not None
    if noise is None:
        trip_s = own_s * (600 if one.rank in held else 2)
    elif one.rank in held:
        trip_s = held_ms / 1e3 * noise.uniform(0.97, 1.1)
    else:
        trip_s = noise.uniform(0.001, 0.012)
    host = msgspec.structs.replace(one.host, round_trip_s=trip_s)
    return msgspec.structs.replace(one, host=host)


def _throttle(timing: RankTiming, throttled: Mapping[int, float]) -> RankTiming:
    assert timing.host is not None
    throttled_s = throttled.get(timing.rank, 0.0) * timing.steps
    host = msgspec.structs.replace(timing.host, throttled_s=throttled_s)
    return msgspec.structs.replace(timing, host=host)


@pytest.mark.parametrize("held", [(2,), (2, 3)])
def test_the_node_whose_connections_stand_out_is_named_and_cleared(held: tuple[int, ...]) -> None:
    """One rank's, or all of the node's; but not at once, since the node that it sends to may be the
    slow one (A6.1, A6.2)."""
    simulation, job = Simulation(QUICK), JobJudge("job", LiveRules())
    assert judged(simulation, job, 5) == []
    simulation.plan = SLOW
    assert not [one for one in judged(simulation, job, 5, held) if isinstance(one, SlowRankFound)]
    (found,) = judged(simulation, job, 3, held)
    assert isinstance(found, SlowRankFound)
    assert (found.rank, found.node, found.cause) == (2, "node-1", "network")
    assert found.lost_s == pytest.approx(0.049, rel=0.1)
    assert found.slowdown_ratio == pytest.approx(0.049 / 0.104, rel=0.15)
    assert found.confidence < 0.6
    assert "the connections of node-1 are the only ones that stand out" in found.reason
    assert "instead of 0.2 ms" in found.reason
    assert [one.rank for one in job.scores(8, "").ranks if one.is_straggler] == [2]
    simulation.plan = QUICK
    (over,) = judged(simulation, job, 6)
    assert isinstance(over, KeepsUp)
    assert over.rank == 2


def test_longer_steps_without_such_connections_are_a_shift() -> None:
    simulation, job = Simulation(QUICK), JobJudge("job", LiveRules())
    assert judged(simulation, job, 8) == []
    simulation.plan = SLOW
    (shift,) = judged(simulation, job, 8)
    assert isinstance(shift, StepsShifted)


def test_such_connections_without_longer_steps_accuse_nobody() -> None:
    """A6.2."""
    assert judged(Simulation(QUICK), JobJudge("job", LiveRules()), 12, (2, 3)) == []


def test_connections_that_were_always_slow_accuse_nobody() -> None:
    """Another node is far away; what counts is what became longer (A6.2)."""
    simulation, job = Simulation(QUICK), JobJudge("job", LiveRules())
    assert judged(simulation, job, 8, (2, 3)) == []
    simulation.plan = SLOW
    changes = judged(simulation, job, 8, (2, 3))
    assert not [one for one in changes if isinstance(one, SlowRankFound)]


@pytest.mark.parametrize(
    ("held", "named"), [((2, 4), 2), ((4, 2), 2), ((6, 0), 6), ((0, 1, 2, 3), 0)]
)
def test_in_a_ring_what_is_sent_to_a_slow_node_is_held_back_too(
    held: tuple[int, ...], named: int
) -> None:
    """Each node sends to the one before it: of two neighbours the first is in both ways (A6.1)."""
    simulation, job = Simulation(QUICK), JobJudge("job", LiveRules())
    assert judged(simulation, job, 5) == []
    simulation.plan = SLOW
    (found,) = judged(simulation, job, 8, held)
    assert isinstance(found, SlowRankFound)
    assert (found.rank, found.cause) == (named, "network")
    following = (named // 2 + 1) % 4
    assert f"from node-{following}, which sends to it in a ring" in found.reason


@pytest.mark.parametrize("held", [(2, 6), (2, 4, 6)])
def test_nodes_that_stand_out_together_are_not_told_apart(held: tuple[int, ...]) -> None:
    """A6.2."""
    simulation, job = Simulation(QUICK), JobJudge("job", LiveRules())
    assert judged(simulation, job, 8) == []
    simulation.plan = SLOW
    changes = judged(simulation, job, 8, held)
    assert not [one for one in changes if isinstance(one, SlowRankFound)]
    (shift,) = (one for one in changes if isinstance(one, StepsShifted))
    assert "round trips of connections are" in shift.reason


@pytest.mark.parametrize("seed", range(4))
def test_a_delayed_node_is_named_where_round_trips_of_single_windows_vary(seed: int) -> None:
    """10 ms each way, on a network whose usual round trips reach 12 ms now and then (A6.1)."""
    simulation, job, noise = Simulation(QUICK), JobJudge("job", LiveRules()), random.Random(seed)
    assert judged(simulation, job, 8, noise=noise) == []
    simulation.plan = SLOW
    (found,) = judged(simulation, job, 3, (2, 4), noise)
    assert isinstance(found, SlowRankFound)
    assert (found.rank, found.node, found.cause) == (2, "node-1", "network")
    # Steps stay long for another reason.
    (over,) = judged(simulation, job, 8, noise=noise)
    assert isinstance(over, KeepsUp)
    assert over.rank == 2


def test_whoever_sends_to_a_busy_host_is_not_taken_for_slow() -> None:
    """A host that computes for others answers late: its own ranks are named, not their neighbour
    whose round trips are long (A6.2)."""
    simulation, job = Simulation(QUICK), JobJudge("job", LiveRules())
    assert judged(simulation, job, 8) == []
    busy = tuple(Delay(rank, 0.05, "host") for rank in (2, 3))
    simulation.plan = replace(QUICK, delays=busy)
    changes = judged(simulation, job, 8, (4,), random.Random(0), held_ms=70)
    assert {(one.rank, one.cause) for one in changes if isinstance(one, SlowRankFound)} == {
        (2, "host"), (3, "host"),
    }  # fmt: skip


@pytest.mark.parametrize("has_sections", [False, True])
def test_whoever_receives_late_from_a_delayed_node_is_not_blamed(has_sections: bool) -> None:
    """In a ring, the rank before the slow node leaves collectives last; the rank after it has the
    longest round trips, since it sends to the slow node (A6.1, A6.2)."""
    simulation, job = Simulation(QUICK), JobJudge("job", LiveRules())
    assert judged(simulation, job, 8) == []
    slow = Delay(4, 0.03, "ring")
    simulation.plan = replace(QUICK, delays=(slow,), has_sections=has_sections)
    noise = random.Random(1)
    changes: list[Change] = []
    for _ in range(4):
        changes += judged(simulation, job, 1, (4,), noise)
        changes += judged(simulation, job, 1, (4, 6), noise, held_ms=25)
    found = [one for one in changes if isinstance(one, SlowRankFound)]
    assert {(one.rank, one.cause) for one in found} == {(4, "network")}


def test_a_host_that_holds_its_rank_back_within_collectives_is_named_and_cleared() -> None:
    """Its quota is used up while all wait for it: own times tell nothing, its neighbours' round
    trips are long, and the kernel counts for how long its processes did not run (A6.1, A6.2)."""
    simulation, job = Simulation(QUICK), JobJudge("job", LiveRules())
    assert judged(simulation, job, 5) == []
    simulation.plan = SLOW
    changes = judged(simulation, job, 8, (4, 6), throttled={2: 0.04, 3: 0.03})
    (found,) = changes
    assert isinstance(found, SlowRankFound)
    assert (found.rank, found.node, found.cause) == (2, "node-1", "host")
    assert "the host of node-1 kept rank 2 from running for 40.0 ms a step" in found.reason
    simulation.plan = QUICK
    (over,) = judged(simulation, job, 6)
    assert isinstance(over, KeepsUp)
    assert over.rank == 2


def test_a_host_that_holds_its_rank_back_for_less_than_steps_lost_is_not_named() -> None:
    """A6.2."""
    simulation, job = Simulation(QUICK), JobJudge("job", LiveRules())
    assert judged(simulation, job, 5) == []
    simulation.plan = SLOW
    (found,) = judged(simulation, job, 8, (2, 4), throttled={6: 0.005})
    assert isinstance(found, SlowRankFound)
    assert (found.rank, found.cause) == (2, "network")


@pytest.mark.parametrize(("other", "named"), [(0.0, (2, "host")), (0.008, None)])
def test_a_quota_on_one_node_alone_is_to_blame_with_less(
    other: float, named: tuple[int, str] | None
) -> None:
    """Others wait for longer than it was held back; but not if quotas hold many back (A6.2)."""
    simulation, job = Simulation(QUICK), JobJudge("job", LiveRules())
    assert judged(simulation, job, 5) == []
    simulation.plan = SLOW
    changes = judged(simulation, job, 8, (4, 6), throttled={2: 0.012, 7: other})
    found = [(one.rank, one.cause) for one in changes if isinstance(one, SlowRankFound)]
    assert found == ([named] if named else [])


def test_a_quota_that_is_counted_in_one_window_only_excuses_links() -> None:
    """The kernel counts what a quota took when that time is over (A6.2)."""
    simulation, job = Simulation(QUICK), JobJudge("job", LiveRules())
    assert judged(simulation, job, 5) == []
    simulation.plan = SLOW
    changes = judged(simulation, job, 1, (4, 6), throttled={2: 0.04})
    changes += judged(simulation, job, 2, (4, 6))
    assert not [one for one in changes if isinstance(one, SlowRankFound)]
    (found,) = judged(simulation, job, 1, (4, 6))
    assert isinstance(found, SlowRankFound)
    assert (found.rank, found.cause) == (4, "network"), "the quota no longer excuses it"


def test_a_rank_that_seems_to_sleep_was_held_back_by_its_host_the_window_before() -> None:
    """A6.2."""
    simulation, job = Simulation(replace(QUICK, has_sections=False)), JobJudge("job", LiveRules())
    assert judged(simulation, job, 8) == []
    simulation.plan = replace(simulation.plan, delays=(Delay(2, 0.05, "sleep"),))
    changes = judged(simulation, job, 1, throttled={2: 0.05})
    changes += judged(simulation, job, 2)
    (found,) = (one for one in changes if isinstance(one, SlowRankFound))
    assert (found.rank, found.cause) == (2, "host")
    assert "in one of the latest windows" in found.reason


@pytest.mark.parametrize(("held_ms", "named"), [(25, (4, "network")), (8, (3, "compute"))])
def test_what_a_section_lost_without_computing_is_the_links_if_round_trips_explain_it(
    held_ms: float, named: tuple[int, str]
) -> None:
    """Real gloo leaves the all-reduce late on the rank before the delayed one, within backward
    (A6.1, A6.2)."""
    simulation, job = Simulation(QUICK), JobJudge("job", LiveRules())
    assert judged(simulation, job, 8) == []
    simulation.plan = replace(QUICK, delays=(Delay(3, 0.03, "sleep"),))
    changes = judged(simulation, job, 4, (4, 6), random.Random(1), held_ms=held_ms)
    found = [one for one in changes if isinstance(one, SlowRankFound)]
    assert [(one.rank, one.cause) for one in found] == [named]
