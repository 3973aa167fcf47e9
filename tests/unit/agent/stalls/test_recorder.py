"""Where a limit of others ends a wait before ours does: said once, and as soon as it is known."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from everstep.messages import (
    Fact,
    LimitsDocument,
    RankRecovered,
    RankStalled,
    SectionLimit,
    StartRanks,
)
from everstep.messages.codec import encode
from everstep_services.agent.core.actions import Action, ShowLine
from everstep_services.agent.core.agent import Agent
from everstep_services.agent.ranks.protocol import RankSaid
from everstep_services.agent.ranks.round_watch import WatchedRank
from everstep_services.agent.ranks.source import RankSource
from everstep_services.agent.run_plan import RunPlan
from everstep_services.agent.runtime.workdir import Workdir
from everstep_services.agent.settings import AgentSettings
from everstep_services.agent.stalls.limits import Limit
from everstep_services.agent.stalls.limits_table import ExternalLimits
from everstep_services.agent.stalls.position import RankPosition
from everstep_services.agent.stalls.recorder import StallRecorder, _where, limits_in
from everstep_services.agent.telemetry.facts import AgentFacts
from tests.fakes.bus import MemoryBus, MemoryServer
from tests.fakes.clock import FakeClock
from tests.unit.agent.run_plans import BUS, plan
from tests.unit.agent.stalls.stalled_ranks import Clock, StallRank, clock_of_pages
from tests.waiting import until_async
from trainer_sdk import layout
from trainer_sdk.wire import Hung

ORDER = StartRanks(
    id="0" * 32, job="j", round=1, reason="", slot=0, slots=2, first_rank=0, ranks=1,
    world_size=2, master_address="localhost", master_port=1,
)  # fmt: skip
GIVES_UP = "the process group gives up after"


class Desk:
    """The desk of one node, whose only rank has a process group."""

    def __init__(self, made: RunPlan, rank: StallRank, others: ExternalLimits) -> None:
        folder = made.state_dir
        self.rank = rank
        self.bus = MemoryBus(MemoryServer())
        self.facts: list[Fact] = []
        self.acts: list[Action] = []
        self.agent = Agent(AgentSettings(stop_grace_s=3, preempt_grace_s=600))
        clock = FakeClock()
        watched = WatchedRank(folder, rank.view_of_page)
        self.stalls = StallRecorder(
            made,
            self.bus,
            clock,
            AgentFacts("j", "n", clock),
            RankSource(lambda: self.agent.live_ranks, {0: watched}.get, lambda _: self.agent.order),
            self.facts.append,
            Workdir(made, folder / "runtime", {}, None).say,
            others,
            self.agent,
            self.acts.extend,
        )
        self.fingerprint = made.spec.config_fingerprint

    def steps(self, group_timeout_s: float) -> None:
        """The rank has made its first step, and shows its group's timeout."""
        self.rank.link.words[layout.GROUP_TIMEOUT_NS] = int(group_timeout_s * 1e9)
        self.stalls.stepped(0)

    async def learns(self, **limits: float) -> None:
        """Health publishes limits of sections."""
        document = LimitsDocument(
            job="j",
            limits=tuple(
                SectionLimit(section=section, limit_s=limit_s, source="learned")
                for section, limit_s in limits.items()
            ),
            first_step_limit_s=7200,
            config_fingerprint=self.fingerprint,
            reason="",
        )
        await self.bus.documents("LIMITS").put("j", encode(document), revision=None)
        following = asyncio.create_task(self.stalls.follow_limits_for_ever())
        try:
            await until_async(
                lambda: self.stalls.watch.limits.document, "the limits are known",
                holds=lambda known: known == document,
            )  # fmt: skip
        finally:
            following.cancel()
            await asyncio.wait([following])


@pytest.fixture
def run(tmp_path: Path) -> RunPlan:
    return plan(tmp_path, *BUS, "--job", "j", "train.py")


@pytest.fixture
def limited(tmp_path: Path) -> RunPlan:
    return plan(tmp_path, *BUS, "--job", "j", "--limit", "data=90", "train.py")


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[StallRank]:
    clock = Clock()
    with clock_of_pages(clock):
        yield StallRank(tmp_path, 0, clock)


def said(captured: pytest.CaptureFixture[str]) -> list[str]:
    """The reports about the process group since the last time."""
    return [line for line in captured.readouterr().err.splitlines() if GIVES_UP in line]


@pytest.mark.parametrize(
    ("signal", "text"),
    [("collectives", "since its last collective"), ("page", "on the way to its first step")],
)
def test_a_script_that_shows_only_collectives_is_not_on_its_way_to_a_first_step(
    signal: str, text: str
) -> None:
    assert _where(RankPosition(0, "first_step", 5.0, Limit(6.0, ""), signal=signal)) == text


async def test_the_console_of_a_healthy_start_has_one_line_about_limits(
    run: RunPlan, rank: StallRank, capfd: pytest.CaptureFixture[str]
) -> None:
    Desk(run, rank, ExternalLimits()).stalls.begins(ORDER)
    (line,) = capfd.readouterr().err.splitlines()
    assert "how long a rank may go without progress: 2 h until its first step" in line


async def test_a_limit_learned_in_the_first_round_is_held_against_the_group(
    run: RunPlan, rank: StallRank, capfd: pytest.CaptureFixture[str]
) -> None:
    desk = Desk(run, rank, ExternalLimits())
    desk.stalls.begins(ORDER)
    desk.steps(1800)
    assert said(capfd) == []
    await desk.learns(forward=2000, data=120)
    (warning,) = said(capfd)
    assert warning.startswith(f"everstep: warning: {GIVES_UP} 30 min")
    assert "before a stall in forward is found (33.3 min, learned)" in warning
    await desk.learns(forward=2100, data=130)
    assert said(capfd) == []


async def test_a_group_that_is_known_only_later_is_held_against_what_was_learned(
    run: RunPlan, rank: StallRank, capfd: pytest.CaptureFixture[str]
) -> None:
    desk = Desk(run, rank, ExternalLimits())
    desk.stalls.begins(ORDER)
    await desk.learns(forward=900)
    assert said(capfd) == []
    desk.steps(600)
    texts = said(capfd)
    assert any("before a stall in forward is found (15 min, learned)" in text for text in texts)


async def test_the_defaults_are_held_against_what_torch_is_likely_to_do(
    run: RunPlan, rank: StallRank, capfd: pytest.CaptureFixture[str]
) -> None:
    desk = Desk(run, rank, ExternalLimits(has_nccl=True))
    desk.stalls.begins(ORDER)
    (line,) = said(capfd)
    assert "until limits are learned" in line
    assert "warning" not in line
    desk.steps(600)
    assert said(capfd) == []
    desk.stalls.begins(of_round(2))
    assert said(capfd) == []
    desk.steps(300)  # the new round's script is less patient
    (line,) = said(capfd)
    assert f"{GIVES_UP} 5 min, before" in line


async def test_one_node_speaks_for_all(
    limited: RunPlan, rank: StallRank, capfd: pytest.CaptureFixture[str]
) -> None:
    desk = Desk(limited, rank, ExternalLimits())
    desk.stalls.begins(of_round(1, slot=1))
    desk.steps(60)
    assert capfd.readouterr().err == ""
    desk.stalls.begins(of_round(2))  # slot 0's node was lost: it is this one now
    assert any("before a stall in data is found" in text for text in said(capfd))


def of_round(number: int, slot: int = 0) -> StartRanks:
    return msgspec.structs.replace(ORDER, round=number, slot=slot)


def test_what_people_have_set_holds_for_another_configuration_too() -> None:
    document = LimitsDocument(
        job="j",
        limits=(
            SectionLimit(section="data", limit_s=30, source="configured"),
            SectionLimit(section="forward", limit_s=120, source="learned"),
        ),
        first_step_limit_s=3600,
        first_step_longest_s=60,
        config_fingerprint="other",
        reason="",
    )
    found = limits_in(encode(document), "this")
    assert found is not None
    assert [one.section for one in found.limits] == ["data"]
    assert found.first_step_longest_s is None
    assert limits_in(encode(document), "other") == document
    learned = msgspec.structs.replace(document, limits=document.limits[1:])
    assert limits_in(encode(learned), "this") is None


def test_a_rank_that_its_own_monitor_ends_has_stalled(run: RunPlan, rank: StallRank) -> None:
    """The monitor of an in-process restart says so before it kills the rank."""
    desk = Desk(run, rank, ExternalLimits())
    desk.stalls.said(RankSaid(1, 0, Hung(round=1, rank=0, limit_s=40.0)))
    assert desk.facts == []  # nothing runs
    desk.agent.ordered(ORDER)
    desk.stalls.said(RankSaid(1, 0, Hung(round=1, rank=0, limit_s=40.0)))
    (fact,) = (fact for fact in desk.facts if isinstance(fact, RankStalled))
    assert (fact.rank, fact.waited_s, fact.limit_name) == (0, 40.0, "hard_timeout")
    assert (fact.signal, fact.limit_origin) == ("monitor", "inprocess.Wrapper, which ends it")
    assert not fact.is_fatal, "its end ends the round"
    desk.stalls.said(RankSaid(1, 0, Hung(round=1, rank=0, limit_s=40.0, is_over=True)))
    assert [it.stall for it in desk.facts if isinstance(it, RankRecovered)] == [fact.id]
    lines = [act.text for act in desk.acts if isinstance(act, ShowLine)]
    assert len(lines) == len(desk.acts) == 2, "rendezvous ends no round because of that"
    assert "limit for hard_timeout 40 s, inprocess.Wrapper, which ends it" in lines[0]
    assert lines[1] == "rank 0 moves again after 40 s"
