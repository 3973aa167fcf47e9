"""What ranks say of their checkpoints, as facts."""

from datetime import UTC, datetime
from typing import Any

import pytest
from msgspec.structs import replace

from everstep.messages import (
    CheckpointCommitted,
    CheckpointFailed,
    CheckpointQuarantined,
    CheckpointRestored,
    CopyReplica,
    Fact,
    FreshStarted,
    IntervalChosen,
    Peer,
    ReleaseImages,
    RestoreFailed,
    SaveRefused,
    SavesDelayed,
    SaveStarted,
    ShardsWritten,
)
from everstep_services.agent.core.agent import Agent
from everstep_services.agent.replicas.recorder import CheckpointRecorder
from everstep_services.agent.settings import AgentSettings
from everstep_services.agent.telemetry.facts import AgentFacts
from tests.fakes.clock import FakeClock
from tests.integration.replicas.nodes import order
from trainer_sdk.wire import Checkpointed

WALL = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def story(clock: FakeClock) -> CheckpointRecorder:
    story = CheckpointRecorder(AgentFacts("j", "n1", clock), clock)
    story.begins(order(1, slots=2, ranks=2, round=3))
    return story


def said(event: str, rank: int = 2, round: int = 3, **body: Any) -> Checkpointed:
    return Checkpointed(round=round, rank=rank, event=event, body=body)


@pytest.mark.parametrize(
    ("event", "body", "kind"),
    [
        ("save_started", {"step": 1, "tier": "global"}, SaveStarted),
        (
            "committed",
            {
                "step": 1, "tier": "global", "path": "/c/1", "size_bytes": 5, "shards": 2,
                "world_size": 4,
            },
            CheckpointCommitted,
        ),
        (
            "failed",
            {"step": 1, "tier": "global", "stage": "write", "reason": "r"},
            CheckpointFailed,
        ),
        ("refused", {"step": 1, "reason": "r"}, SaveRefused),
        ("delayed", {"lag_s": 1.0, "waiting": 2, "reason": "r"}, SavesDelayed),
        (
            "restored",
            {
                "step": 1, "world_size": 4, "reason": "r", "took_s": 0.1,
                "tiers": [{"tier": "memory", "ranks": 4}],
            },
            CheckpointRestored,
        ),
        (
            "restore_failed",
            {"reason": "r", "rejected": [{"step": 1, "reason": "x"}]},
            RestoreFailed,
        ),
        ("fresh", {"cause": "allowed", "reason": "r"}, FreshStarted),
        (
            "interval",
            {"tier": "global", "every_steps": 5, "every_s": 1.0, "reason": "r"},
            IntervalChosen,
        ),
        (
            "quarantine",
            {"step": 1, "tier": "memory", "cause": "nan_after_load", "reason": "r", "by": "rank 2"},
            CheckpointQuarantined,
        ),
    ],
)  # fmt: skip
def test_each_event_becomes_its_fact(
    story: CheckpointRecorder, event: str, body: dict[str, Any], kind: type[Fact]
) -> None:
    (fact,) = story.heard(said(event, **body))
    assert type(fact) is kind
    assert (fact.job, fact.round, fact.source, fact.at) == ("j", 3, "agent/n1", WALL)
    assert getattr(fact, "node", "n1") == "n1"


def test_a_rank_cannot_speak_for_another_node_or_job(story: CheckpointRecorder) -> None:
    body: dict[str, Any] = {"step": 1, "tier": "global", "stage": "write", "reason": "r"}
    body |= {"node": "x", "job": "y"}
    (fact,) = story.heard(said("failed", **body))
    assert isinstance(fact, CheckpointFailed)
    assert (fact.node, fact.job, fact.rank) == ("n1", "j", 2)


@pytest.mark.parametrize(
    "line",
    [
        said("committed", step="one"),
        said("restored"),
        said("part_written", step=1),
        said("of a newer release", step=1),
        said("save_started", round=2, step=1, tier="global"),
    ],
)
def test_what_cannot_be_read_or_is_of_another_round_is_dropped(
    story: CheckpointRecorder, line: Checkpointed
) -> None:
    assert story.heard(line) == []


def test_a_nodes_part_is_told_once_all_its_ranks_have_written_theirs(
    story: CheckpointRecorder,
) -> None:
    body: dict[str, Any] = {"step": 7, "tier": "global", "size_bytes": 10, "world_size": 4}
    assert story.heard(said("part_written", 2, **body, write_s=1.0)) == []
    (fact,) = story.heard(said("part_written", 3, **body, write_s=2.0, stall_s=0.5))
    assert isinstance(fact, ShardsWritten)
    assert (fact.step, fact.tier, fact.slot, fact.ranks) == (7, "global", 1, (2, 3))
    assert (fact.size_bytes, fact.write_s, fact.stall_s) == (20, 2.0, 0.5)


def image(story: CheckpointRecorder, step: int) -> list[int]:
    body: dict[str, Any] = {"step": step, "size_bytes": 10, "folder": "/f", "hash": "h"}
    first = story.heard(said("image", 2, **body))
    facts = [*first, *story.heard(said("image", 3, **body))]
    assert all(isinstance(fact, ShardsWritten) and fact.tier == "memory" for fact in facts)
    return [fact.step for fact in facts if isinstance(fact, ShardsWritten)]


async def test_of_states_in_memory_the_first_the_last_and_one_a_minute_are_told(
    story: CheckpointRecorder, clock: FakeClock
) -> None:
    assert image(story, 1) == [1]
    for step, after_s, told in ((2, 1.0, []), (3, 58.75, []), (4, 0.25, [4]), (5, 1.0, [])):
        await clock.advance(after_s)
        assert image(story, step) == told
    (last,) = story.ends()
    assert isinstance(last, ShardsWritten)
    assert last.step == 5
    assert story.ends() == []


def test_orders_about_copies_are_carried_out_unless_they_are_of_an_earlier_round() -> None:
    agent = Agent(AgentSettings())
    about: dict[str, Any] = {"id": "1" * 32, "job": "j", "reason": "", "owner_slot": 0, "step": 10}
    copy = CopyReplica(**about, round=3, to=Peer(node="n2", slot=1, address="n2", port=1))
    assert agent.ordered(copy) == [copy]
    assert agent.ordered(replace(copy, round=2)) == []
    release = ReleaseImages(id="1" * 32, job="j", round=3, reason="", step=10, by="ann")
    assert agent.ordered(release) == [release]
