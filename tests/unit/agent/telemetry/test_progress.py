"""What an agent reports of steps, from pages that the real SDK writes."""

from pathlib import Path
from typing import Any, cast

from msgspec.structs import replace

from everstep_services.agent.core.agent import Agent
from everstep_services.agent.ranks.round_watch import WatchedRank
from everstep_services.agent.ranks.source import RankSource
from everstep_services.agent.settings import AgentSettings
from everstep_services.agent.telemetry.facts import AgentFacts
from everstep_services.agent.telemetry.progress import ProgressReader
from tests.fakes.clock import FakeClock
from tests.unit.agent.orders import start
from tests.unit.agent.stalls.stalled_ranks import Clock, StallRank, clock_of_pages


def test_a_round_that_begins_anew_reports_the_steps_that_it_makes_again(tmp_path: Path) -> None:
    pages, clock, agent = Clock(), FakeClock(), Agent(AgentSettings())
    order = replace(start(), slot=0, first_rank=0, round=1)
    agent.ordered(order)
    with clock_of_pages(pages):
        rank = StallRank(tmp_path, 0, pages)
        watched = {0: WatchedRank(tmp_path, rank.view_of_page)}
        none = cast("Any", None)
        progress = ProgressReader(
            none, agent, RankSource(tuple, watched.get, lambda _: agent.order),
            AgentFacts("j", "n", clock), clock, none,
        )  # fmt: skip
        progress.begins(order)
        for _ in range(9):
            rank.run.step()
        assert progress.last_step() == 9
        rank.run.step()
        assert not list(progress.ends()), "no step was reported"
        agent.ordered(replace(start(), slot=0, first_rank=0, ranks=0, round=2))
        assert progress.last_step() == 10, "as rendezvous is told when the ranks are gone"
        agent.ordered(order)
        again = replace(order, round=2, reached_step=9)
        progress.begins(again)
        (tmp_path / "2").mkdir()
        restarted = StallRank(tmp_path / "2", 0, pages)
        watched[0] = WatchedRank(tmp_path, restarted.view_of_page)
        assert progress.last_step() is None, "nothing of the round before"
        assert progress.age_s() is None, "nothing of this round either: its script may be importing"
        restarted.run.step(1)
        first = progress.stepped(again, 0, 1)
        assert first is not None
        assert (first.lost_steps, first.is_counted_anew) == (9, False)
        assert "with nothing restored: 9 steps are made again" in progress.steps_again(again, 0, 1)
        assert progress.steps_again(again, 0, 10) == ""
        assert progress.steps_again(again, 1, 1) == "", "that rank has not stepped"


def test_a_script_that_does_not_number_its_steps_may_resume_anywhere(tmp_path: Path) -> None:
    """It resumes by its own means, and nobody is told that it does not."""
    pages, clock, agent = Clock(), FakeClock(), Agent(AgentSettings())
    order = replace(start(), slot=0, first_rank=0, round=2, reached_step=26)
    agent.ordered(order)
    with clock_of_pages(pages):
        rank = StallRank(tmp_path, 0, pages)
        none = cast("Any", None)
        watched = {0: WatchedRank(tmp_path, rank.view_of_page)}
        progress = ProgressReader(
            none, agent, RankSource(tuple, watched.get, lambda _: agent.order),
            AgentFacts("j", "n", clock), clock, none,
        )  # fmt: skip
        progress.begins(order)
        rank.run.step()
        first = progress.stepped(order, 0, 1)
        assert first is not None
        assert (first.lost_steps, first.is_counted_anew) == (0, True)
        assert progress.steps_again(order, 0, 1) == ""
        assert progress.last_step() is None, "step 1 of this round may be step 27 of the job"
        rank.run.start_at(24)
        assert progress.is_numbered(0)
        rank.run.step()
        assert progress.last_step() == 25
