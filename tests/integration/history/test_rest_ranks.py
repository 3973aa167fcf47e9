"""REST answers: how ranks are now, whether anybody watches them, and past which limits."""

import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any

import httpx2
import pytest
from sqlalchemy.ext.asyncio import AsyncConnection

from everstep.bus.requests import RefusalError
from everstep.messages import (
    Done,
    Fact,
    LimitsDocument,
    Member,
    Message,
    NodeBeat,
    RankBeat,
    SectionLimit,
    SetLimit,
    ShowLimits,
)
from everstep.store.database import Database
from everstep.store.log import FactLog
from tests.fakes.clock import FakeClock
from tests.integration.conftest import Api
from tests.integration.history.test_rest_lists import every_item, get
from tests.unit.history.facts import make


@pytest.fixture
def database_url(sqlite_url: str) -> str:
    """SQLite only: how a database answers makes no difference here."""
    return sqlite_url


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
async def api(database: Database, fact_log: FactLog, clock: FakeClock) -> Api:
    made = Api(database, fact_log, clock)
    await made.open()
    return made


def running(*nodes: str) -> list[Fact]:
    """The facts of a job whose round 3 runs on these nodes, with two ranks each."""
    members = tuple(
        Member(slot=slot, node=node, first_rank=2 * slot, ranks=2)
        for slot, node in enumerate(nodes)
    )
    return [
        make("job_started", round=None),
        make("allocation_started", round=None),
        make("round_formed", round=3, members=members),
        make("round_started", round=3),
    ]


def hear(
    api: Api, node: str, slot: int, *ranks: RankBeat, watch: str = "",
    limits: tuple[SectionLimit, ...] = (),
) -> None:  # fmt: skip
    api.context.beats.hear(
        NodeBeat(
            job="j",
            node=node,
            sequence=1,
            at=datetime.now(UTC),
            state="running",
            round=3,
            slot=slot,
            ranks=ranks,
            watch=watch,
            limits=limits,
        )
    )


def rank(number: int, state: str = "running", **more: Any) -> RankBeat:
    return RankBeat(rank=number, state=state, step=1204, **more)


async def test_each_rank_says_where_it_is_and_past_which_limit_it_has_stalled(
    api: Api, reader: httpx2.AsyncClient
) -> None:
    await api.add(*running("n1", "n2"))
    stuck = rank(
        0, "stalled", section="data", section_age_s=31.0, progress_age_s=31.0, limit_s=30.0,
        limit_source="learned",
    )  # fmt: skip
    hear(api, "n1", 0, stuck, rank(1))
    hear(api, "n2", 1, rank(2), rank(3))
    found = await get(reader, "jobs/j/ranks")
    assert (found["round"], found["states"]) == (3, {"stalled": 1, "running": 3})
    assert (found["is_stale"], found["note"], found["silent_nodes"]) == (False, None, [])
    first = found["items"][0]
    assert (first["rank"], first["node"], first["slot"], first["state"]) == (0, "n1", 0, "stalled")
    assert (first["section"], first["section_age_s"], first["step"]) == ("data", 31.0, 1204)
    assert (first["limit_s"], first["limit_source"]) == (30.0, "learned")

    for query, ranks in (
        ({"limit": 1}, [0, 1, 2, 3]),
        ({"limit": 3, "node": "n2"}, [2, 3]),
        ({"state": "stalled"}, [0]),
        ({"state": ["running", "stalled"], "limit": 2}, [0, 1, 2, 3]),
    ):
        items = await every_item(reader, "jobs/j/ranks", **query)
        assert [one["rank"] for one in items] == ranks, query
    assert (await reader.get("jobs/nobody/ranks")).status_code == 404


async def test_job_and_round_show_the_step_at_which_their_ranks_are_said_to_be(
    api: Api, reader: httpx2.AsyncClient
) -> None:
    """The record has it once a minute only; a stall and an end tell it, too."""
    told = make("progress_made", round=3, step=2)
    await api.add(*running("n1"), told, make("rank_stalled", round=3, rank=0, step=700))

    async def steps() -> list[int]:
        listed = await get(reader, "jobs")
        rounds = await get(reader, "jobs/j/rounds")
        one, alone = await get(reader, "jobs/j"), await get(reader, "jobs/j/rounds/3")
        return [it["last_step"] for it in (listed["items"][0], one, rounds["items"][0], alone)]

    assert await steps() == [700] * 4
    hear(api, "n1", 0, rank(0, "stalled"), rank(1))
    assert await steps() == [1204] * 4
    await api.add(make("rank_exited", round=3, rank=1, step=1300))
    await api.add(make("round_ended", round=3, last_step=None), make("job_ended", round=3))
    assert await steps() == [1300] * 4


async def test_ranks_whose_scripts_run_are_not_shown_as_starting_until_a_step(
    api: Api, reader: httpx2.AsyncClient
) -> None:
    """Many scripts show no step at all, and others import for long."""
    await api.add(*running("n1"))
    hear(api, "n1", 0, RankBeat(rank=0, state="starting"), rank(1))
    found = await get(reader, "jobs/j/ranks", state="running")
    assert found["states"] == {"running": 2}
    assert [(it["state"], it["progress_age_s"]) for it in found["items"]] == [
        ("running", None), ("running", 0.0),
    ]  # fmt: skip


async def test_a_view_that_is_stale_says_why(
    api: Api, reader: httpx2.AsyncClient, clock: FakeClock
) -> None:
    async def said() -> tuple[bool, str | None, list[str]]:
        found = await get(reader, "jobs/j/ranks")
        return found["is_stale"], found["note"], found["silent_nodes"]

    await api.add(*running("n1", "n2", "n3"))
    await clock.advance(7)
    nobody = "no agent was heard in the 7 s that this replica has listened"
    assert await said() == (True, nobody, ["n1", "n2", "n3"])
    hear(api, "n1", 0, rank(0), rank(1))
    hear(api, "n2", 1, rank(2), rank(3))
    one = "n3 was not heard yet"
    assert await said() == (True, one, ["n3"])
    hear(api, "n3", 2, rank(4), rank(5))
    assert await said() == (False, None, [])
    await clock.advance(12)
    hear(api, "n1", 0, rank(0), rank(1))
    two = "n2 was last heard 12 s ago, and 1 more is silent"
    assert await said() == (True, two, ["n2", "n3"])
    stale = {one["rank"]: one["is_stale"] for one in (await get(reader, "jobs/j/ranks"))["items"]}
    assert stale == {0: False, 1: False, 2: True, 3: True, 4: True, 5: True}

    api.is_bus_connected = False
    await clock.advance(8)
    away = "the bus is away: this is how it was 8 s ago"
    assert (await said())[:2] == (True, away)
    api.is_bus_connected = True
    await api.add(make("job_ended", round=3, state="done"))
    assert await said() == (False, "no ranks run: the job is done", [])


async def test_a_job_says_whether_stalls_are_looked_for_and_why_not(
    api: Api, reader: httpx2.AsyncClient
) -> None:
    """The state of the watch, its reason, and the node that reports it (A3.8)."""

    async def watch() -> dict[str, Any] | None:
        found: dict[str, Any] | None = (await get(reader, "jobs/j"))["watch"]
        return found

    await api.add(make("job_started", round=None))
    found = await watch()
    assert found is not None
    assert (found["state"], found["reason"]) == ("off", "no ranks run: the job is forming")
    await api.add(*running("n1", "n2"))
    assert await watch() is None
    hear(api, "n1", 0, rank(0), watch="learning")
    found = await watch()
    assert found is not None
    assert (found["state"], found["node"], found["nodes"]) == ("learning", "n1", {"learning": 1})
    await api.add(
        make(
            "watch_changed",
            round=3,
            node="n1",
            state="armed",
            reason="limits of 4 sections are known",
        ),
        make("watch_changed", round=3, node="n2", state="armed"),
        make("watch_changed", round=3, node="n2", state="paused", reason="the script paused it"),
        make("watch_changed", round=3, node="gone", state="off"),
    )
    found = await watch()
    assert found is not None
    assert found.pop("at") is not None
    assert found == {
        "state": "paused",
        "reason": "the script paused it",
        "node": "n2",
        "nodes": {"armed": 1, "paused": 1},
    }


LIMITS = LimitsDocument(
    job="j",
    limits=(
        SectionLimit(section="", limit_s=120.0, source="floor", longest_s=1.5, observations=900),
        SectionLimit(
            section="data", limit_s=150.0, source="learned", longest_s=30.0, observations=1,
            kind="plain",
        ),
        SectionLimit(section="eval", limit_s=60.0, source="configured"),
    ),
    first_step_limit_s=1200.0,
    first_step_longest_s=240.0,
    reason="5 times the longest on any rank, as of round 3",
    round=3,
    config_fingerprint="f",
)  # fmt: skip


async def test_a_job_whose_agents_speak_between_two_questions_is_shown(
    api: Api, reader: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each question of an answer sees another moment."""
    await api.add(*running("n1", "n2"), make("watch_changed", round=3, node="n1", state="armed"))
    real, states = Database.read, itertools.cycle(["paused", "armed", "learning"])

    @asynccontextmanager
    async def read(database: Database) -> AsyncIterator[AsyncConnection]:
        async with real(database) as connection:
            yield connection
        monkeypatch.setattr(Database, "read", real)
        await api.add(make("watch_changed", round=3, node="n1", state=next(states)))
        monkeypatch.setattr(Database, "read", read)

    monkeypatch.setattr(Database, "read", read)
    found = await get(reader, "jobs/j")
    assert sum(found["watch"]["nodes"].values()) == 1


class Health:
    """Stands for health: answers what the test wants, and remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[Message] = []
        self.refusal: RefusalError | None = None

    async def __call__(self, question: Message) -> Message:
        self.asked.append(question)
        if self.refusal is not None:
            raise self.refusal
        return LIMITS if isinstance(question, ShowLimits) else Done(text="data has 30 s now")


async def test_each_limit_says_which_rule_set_it_and_from_which_numbers(
    api: Api, reader: httpx2.AsyncClient
) -> None:
    await api.add(*running("n1"))
    async with api.bus.answer("health", {"limits": Health()}):
        found = await get(reader, "jobs/j/limits")
    assert (found["is_live"], found["round"]) == (True, 3)
    assert "no agent tells its limits now" in found["note"]
    assert found["rule"] == LIMITS.reason
    names = ("section", "limit_s", "source", "why")
    shown = [[one[name] for name in names] for one in found["limits"]]
    assert [tuple(one) for one in shown] == [
        ("first-step", 1200.0, "learned", "the longest first step took 240 s"),
        ("outside", 120.0, "floor",
         "the least that a limit may be: the longest on any rank took 1.5 s, seen 900 times"),
        ("data", 150.0, "learned",
         "5 times the longest: the longest on any rank took 30 s, seen 1 time"),
        ("eval", 60.0, "configured", "set by an operator; it was never seen to end"),
    ]  # fmt: skip


ACTING = (
    SectionLimit(section="first-step", limit_s=1200.0, source="learned"),
    SectionLimit(section="step", limit_s=7200.0, source="default"),
    SectionLimit(section="", limit_s=60.0, source="configured", origin="--limit"),
    SectionLimit(section="data", limit_s=150.0, source="learned", kind="plain"),
    SectionLimit(section="heartbeat", limit_s=3.0, source="configured", origin="[agent] limits"),
)


async def test_while_ranks_run_the_limits_are_those_that_can_act_on_them(
    api: Api, reader: httpx2.AsyncClient
) -> None:
    """What is learned, and hidden by what somebody has set, is not shown."""
    await api.add(*running("n1"))
    hear(api, "n1", 0, limits=ACTING)
    async with api.bus.answer("health", {"limits": Health()}):
        found = await get(reader, "jobs/j/limits")
    assert (found["is_live"], found["rule"], found["note"]) == (True, LIMITS.reason, None)
    names = ("section", "limit_s", "source", "origin", "why")
    assert [tuple(one[name] for name in names) for one in found["limits"]] == [
        ("first-step", 1200.0, "learned", None, "the longest first step took 240 s"),
        ("step", 7200.0, "default", None, "nothing was learned yet"),
        ("outside", 60.0, "configured", "--limit",
         "set by --limit; the longest on any rank took 1.5 s, seen 900 times"),
        ("data", 150.0, "learned", None,
         "5 times the longest: the longest on any rank took 30 s, seen 1 time"),
        ("heartbeat", 3.0, "configured", "[agent] limits",
         "set by [agent] limits; it was never seen to end"),
    ]  # fmt: skip
    without = await get(reader, "jobs/j/limits")
    assert [one["section"] for one in without["limits"]] == [
        one.section or "outside" for one in ACTING
    ]
    assert "health cannot be asked" in without["note"]


async def test_without_health_the_limits_are_those_on_record(
    api: Api, reader: httpx2.AsyncClient
) -> None:
    await api.add(*running("n1"))
    found = await get(reader, "jobs/j/limits")
    assert (found["is_live"], found["limits"], found["at"]) == (False, [], None)
    await api.add(make("limits_learned", round=3, limits=LIMITS.limits, reason="the rule"))
    found = await get(reader, "jobs/j/limits")
    assert [one["section"] for one in found["limits"]] == ["outside", "data", "eval"]
    assert (found["rule"], found["at"] is not None) == ("the rule", True)
    assert "health cannot be asked: nobody answers health.limits" in found["note"]
    assert (await reader.get("jobs/nobody/limits")).status_code == 404


async def test_a_limit_is_set_and_given_back_by_health(api: Api) -> None:
    await api.add(*running("n1"))
    health = Health()
    async with (
        api.client(await api.token("operate")) as operator,
        api.bus.answer("health", {"set_limit": health}),
    ):
        wanted = {"limit_s": 30, "reason": "the disk is slow", "user": "ann@login-1"}
        for path in ("jobs/j/limits/data%2Fload", "jobs/j/limits/outside"):
            answer = await operator.put(path, json=wanted)
            said = (answer.status_code, answer.json()["text"])
            assert said == (202, "data has 30 s now")
        answer = await operator.delete("jobs/j/limits/outside", params={"reason": "it is fast"})
        assert answer.status_code == 202, answer.text
        health.refusal = RefusalError("422", "a limit must be at least 1 s")
        answer = await operator.put("jobs/j/limits/data", json={"limit_s": 0.1})
        assert (answer.status_code, answer.json()["detail"]) == (
            409,
            "set_limit of j refused: a limit must be at least 1 s",
        )
        assert (await operator.put("jobs/j/limits/data", json={"limit_s": 0})).status_code == 422
    by, after = (
        "ann@login-1 (a operate)",
        SectionLimit(section="", limit_s=0.0, source="configured"),
    )
    assert health.asked[:3] == [
        SetLimit(
            job="j",
            limit=SectionLimit(section=section, limit_s=30.0, source="configured"),
            by=by,
            reason="the disk is slow",
            origin="rest",
        )
        for section in ("data/load", "")
    ] + [SetLimit(job="j", limit=after, by="a operate", reason="it is fast", origin="rest")]


async def test_a_token_that_may_only_read_sets_nothing(
    api: Api, reader: httpx2.AsyncClient
) -> None:
    await api.add(*running("n1"))
    assert (await reader.put("jobs/j/limits/data", json={"limit_s": 30})).status_code == 403
    assert (await reader.delete("jobs/j/limits/data")).status_code == 403


async def test_a_job_that_is_over_has_no_round_that_forms(
    api: Api, reader: httpx2.AsyncClient
) -> None:
    """It was stopped while it waited for nodes: the round has ended with it."""
    waiting = {"joined": 1, "needed": 2, "waited_s": 0.0, "limit_s": 60.0}
    await api.add(
        make("job_started", round=None),
        make("allocation_started", round=None, allocation="a1"),
        make("round_ended", round=1, cause="node_lost"),
        make("round_waiting", round=2, **waiting),
    )

    async def states() -> list[str]:
        listed = [one["state"] for one in await every_item(reader, "jobs/j/rounds")]
        assert (await get(reader, "jobs/j/rounds/2"))["state"] == listed[0]
        return listed

    assert await states() == ["forming", "ended"]
    await api.add(make("job_ended", round=None, state="stopped", exit_code=93))
    assert await states() == ["ended", "ended"]
    assert not await every_item(reader, "jobs/j/rounds", state="forming")
    await api.add(make("allocation_started", round=None, allocation="a2"))
    assert await states() == ["forming", "ended"]
