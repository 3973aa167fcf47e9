"""The step after which ranks must stop, on pages that the real SDK writes."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from everstep_services.agent.core.actions import AskRanksToStop
from everstep_services.agent.core.agent import Agent
from everstep_services.agent.ranks.round_watch import WatchedRank
from everstep_services.agent.settings import AgentSettings
from everstep_services.agent.telemetry.facts import AgentFacts
from everstep_services.agent.telemetry.saves import CoordinatedSaves
from tests.fakes.clock import FakeClock
from tests.unit.agent.orders import start
from tests.unit.agent.stalls.stalled_ranks import Clock, StallRank, clock_of_pages

STEP_S = 10.0


def saves_of(
    folder: Path, ranks: list[StallRank], clock: FakeClock, slots: int = 1
) -> CoordinatedSaves:
    agent = Agent(AgentSettings())
    agent.ordered(replace(start(), slots=slots))
    watched = {one.rank: WatchedRank(folder, one.view_of_page) for one in ranks}
    return CoordinatedSaves(
        "none", agent, watched.get, AgentFacts("j", "n", clock), clock, lambda _: None
    )


def stops_after(rank: StallRank) -> int:
    """It steps until it must stop."""
    while not rank.run.should_stop:
        rank.run.step()
    return rank.run.steps_made


@pytest.mark.parametrize("named", [0, None], ids=["named-before-they-counted", "not-named"])
def test_ranks_that_step_by_now_stop_after_a_step_that_none_has_passed(
    tmp_path: Path, named: int | None
) -> None:
    """Some may have looked in this step before the order came, and some not (A12.1)."""
    pages, clock = Clock(), FakeClock()
    with clock_of_pages(pages):
        ranks = [StallRank(tmp_path, number, pages) for number in (0, 1)]
        saves = saves_of(tmp_path, ranks, clock)
        assert not saves.ask_to_stop(AskRanksToStop(named)), "nobody looks yet"
        for _ in range(4):
            for one in ranks:
                assert not one.run.should_stop
                one.run.step()
            pages.now += STEP_S
        ranks[0].run.step()  # the other one is a little later
        assert not ranks[0].run.should_stop
        assert saves.counts_now(AskRanksToStop(named)) is None, "no other node must be asked"
        assert saves.ask_to_stop(AskRanksToStop(named))
        first, second = map(stops_after, ranks)
    assert first == second


def test_a_step_that_all_have_agreed_on_is_the_one(tmp_path: Path) -> None:
    pages, clock = Clock(), FakeClock()
    with clock_of_pages(pages):
        rank = StallRank(tmp_path, 0, pages)
        saves = saves_of(tmp_path, [rank], clock)
        assert not rank.run.should_stop
        rank.run.step()
        assert saves.ask_to_stop(AskRanksToStop(7))
        assert stops_after(rank) == 7


def test_where_other_nodes_train_too_they_are_asked_again_how_far_they_are(tmp_path: Path) -> None:
    """Each node by itself would name another step (A12.1)."""
    pages, clock = Clock(), FakeClock()
    with clock_of_pages(pages):
        rank = StallRank(tmp_path, 0, pages)
        saves = saves_of(tmp_path, [rank], clock, slots=2)
        assert saves.counts_now(AskRanksToStop(0)) is None, "nobody counts yet"
        assert not rank.run.should_stop
        rank.run.step()
        told = saves.counts_now(AskRanksToStop(0))
        assert told is not None
        assert (told.event, told.step) == ("reached", 1)
        assert saves.counts_now(AskRanksToStop(7)) is None, "all have agreed on this one"
