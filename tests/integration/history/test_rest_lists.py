"""REST answers: jobs, rounds, nodes and facts, filtered, in pages that stay put."""

from datetime import datetime, timedelta
from typing import Any

import httpx2
import msgspec

from everstep.messages import Fact
from everstep.store.database import Database
from tests.fakes.clock import FakeClock
from tests.integration.conftest import Api
from tests.unit.history.facts import BEGAN, KINDS, make

PROBLEM = "application/problem+json"


async def get(client: httpx2.AsyncClient, path: str, **query: Any) -> Any:
    answer = await client.get(path, params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def every_item(client: httpx2.AsyncClient, path: str, **query: Any) -> list[Any]:
    items: list[Any] = []
    while True:
        page = await get(client, path, **query)
        items += page["items"]
        query["cursor"] = page["next"]
        if query["cursor"] is None:
            return items


async def test_a_page_stays_what_it_is_while_facts_arrive(
    api: Api, reader: httpx2.AsyncClient
) -> None:
    """A cursor neither repeats nor skips a fact (A11.6)."""
    first = [make("rank_exited", job=f"j{n}") for n in range(7)]
    await api.add(*first)
    page = await get(reader, "facts", limit=3, order="desc")
    await api.add(*(make("round_ended", job=f"late{n}") for n in range(5)))
    rest = await every_item(reader, "facts", limit=3, order="desc", cursor=page["next"])
    shown = [item["id"] for item in [*page["items"], *rest]]
    assert shown == [fact.id for fact in reversed(first)]


async def test_jobs_come_in_every_order_each_once(api: Api, reader: httpx2.AsyncClient) -> None:
    names = ["c", "a", "d", "b"]
    await api.add(*(make("job_started", job=name) for name in names), make("job_ended", job="c"))
    wanted = {"created": names, "updated": ["a", "d", "b", "c"], "job": sorted(names)}
    for sort, expected in wanted.items():
        found = await every_item(reader, "jobs", sort=sort, limit=1)
        assert [job["job"] for job in found] == expected, sort
        found = await every_item(reader, "jobs", sort=f"-{sort}", limit=1)
        assert [job["job"] for job in found] == expected[::-1], sort


async def test_a_job_of_which_others_record_facts_is_idle(
    api: Api, reader: httpx2.AsyncClient
) -> None:
    """No agent runs it: it is not forming for ever."""
    await api.add(make("rank_exited", job="llama", round=0))
    [job] = (await get(reader, "jobs"))["items"]
    assert job["state"] == "idle"


async def test_a_job_has_a_state_that_follows_its_facts(
    api: Api, reader: httpx2.AsyncClient
) -> None:
    seen = []
    for fact in (
        make("job_started"),
        make("allocation_started"),
        make("round_formed", round=1),
        make("round_started", round=1),
        make("round_ended", round=1),
        make("round_waiting", round=2),
        make("allocation_ended"),
        make("job_ended", state="failed"),
    ):
        await api.add(fact)
        seen.append((await get(reader, "jobs/j"))["state"])
    assert seen == [
        "forming",
        "forming",
        "starting",
        "running",
        "restarting",
        "forming",
        "idle",
        "failed",
    ]


async def test_a_job_tells_since_when_it_stands_while_its_round_goes_on(
    api: Api, reader: httpx2.AsyncClient
) -> None:
    since, later = BEGAN - timedelta(seconds=40), BEGAN - timedelta(seconds=20)
    stall: dict[str, Any] = {"round": 1, "trigger": "rank_stalled"}
    seen = []
    for fact in (
        make("job_started", round=None),
        make("allocation_started", round=None),
        make("round_formed", round=1),
        make("round_started", round=1),
        make("incident_opened", incident="a", last_progress_at=since, **stall),
        make("incident_opened", incident="b", last_progress_at=later, **stall),
        make("incident_closed", incident="a", round=1, trigger="rank_stalled"),
        make("incident_closed", incident="b", round=1, trigger="rank_stalled"),
        make("incident_opened", incident="c", last_progress_at=None, **stall),
        make("round_ended", round=1),
        make("round_formed", round=2),
        make("round_started", round=2),
        make("incident_opened", incident="d", round=2, trigger="rank_exited"),
    ):
        await api.add(fact)
        [job] = (await get(reader, "jobs"))["items"]
        assert job["stalled_since"] == (await get(reader, "jobs/j"))["stalled_since"]
        seen.append(job["stalled_since"])
    told = [None if at is None else datetime.fromisoformat(at) for at in seen]
    assert told == [None] * 4 + [since, since, later, None, BEGAN] + [None] * 4


async def test_a_job_that_a_later_allocation_takes_up_is_over_no_more(
    api: Api, reader: httpx2.AsyncClient
) -> None:
    await api.add(
        make("job_started", round=None),
        make("allocation_started", round=None, allocation="a1"),
        make("allocation_ended", round=None, allocation="a1"),
        make("job_ended", round=None, state="failed", exit_code=1),
    )
    found = await get(reader, "jobs/j")
    assert (found["state"], found["exit_code"], found["watch"]["state"]) == ("failed", 1, "off")
    await api.add(
        make("allocation_started", round=None, allocation="a2"), make("round_started", round=2)
    )
    found = await get(reader, "jobs/j")
    assert (found["state"], found["exit_code"], found["ended_at"]) == ("running", None, None)
    assert [one["job"] for one in await every_item(reader, "jobs", state="running")] == ["j"]
    await api.add(make("job_ended", round=None, state="done", exit_code=0))
    assert (await get(reader, "jobs/j"))["state"] == "done"


JOB_FILTERS: list[tuple[dict[str, Any], list[str]]] = [
    ({"state": "running"}, ["run"]),
    ({"state": ["running", "failed"]}, ["run", "end"]),
    ({"user": "ann"}, ["run"]),
    ({"label": "team:vision"}, ["run"]),
    ({"label": ["team:vision", "model:vit"]}, ["run"]),
    ({"label": ["team:vision", "model:other"]}, []),
    ({"label": "team:Vision"}, []),
    ({"label": "eam:vision"}, []),
    ({"label": 'quoted:say "hi", ok'}, ["run"]),
    ({"q": "RU"}, ["run"]),
    ({"q": "%"}, []),
    ({"q": "_"}, []),
]


async def test_jobs_can_be_filtered(api: Api, reader: httpx2.AsyncClient) -> None:
    labels = {"model": "vit", "quoted": 'say "hi", ok', "team": "vision"}
    await api.add(
        _started("run", "ann", labels),
        make("round_started", job="run", round=1),
        _started("end", "bob", {"team": "text"}),
        make("job_ended", job="end", state="failed"),
    )
    for query, found in JOB_FILTERS:
        jobs = await every_item(reader, "jobs", **query, sort="created")
        assert [job["job"] for job in jobs] == found, query


def _started(job: str, user: str, labels: dict[str, str]) -> Fact:
    started = make("job_started", job=job, user=user)
    spec = msgspec.structs.replace(started.spec, labels=labels, name=job)  # type: ignore[attr-defined]
    return msgspec.structs.replace(started, spec=spec)


async def test_a_round_tells_who_took_part_and_what_happened(
    api: Api, reader: httpx2.AsyncClient
) -> None:
    stall = make("rank_stalled", round=2, rank=5)
    await api.add(
        make("round_formed", round=2),
        make("round_started", round=2),
        make("rank_exited", round=2, rank=3, how="error", exit_code=1),
        make("rank_exited", round=2, rank=4, how="done", exit_code=0),
        stall,
        make("rank_recovered", round=2, stall=stall.id),
        make("round_ended", round=2, cause="rank_exited", rank=3),
    )
    found = await get(reader, "jobs/j/rounds/2")
    assert (found["state"], found["end_cause"], found["end_rank"]) == ("ended", "rank_exited", 3)
    assert [member["node"] for member in found["members"]] == ["node-07"]
    assert [exit_["rank"] for exit_ in found["exits"]] == [3, 4]
    assert [one["id"] for one in found["stalls_seen"]] == [stall.id]
    assert not found["is_cut"]

    failed = await every_item(reader, "jobs/j/rounds/2/exits", failed=True)
    assert [(one["rank"], one["exit_code"]) for one in failed] == [(3, 1)]
    assert len(await every_item(reader, "jobs/j/rounds/2/members")) == 1


async def test_rounds_are_listed_newest_first_and_filtered(
    api: Api, reader: httpx2.AsyncClient
) -> None:
    await api.add(*(make("round_ended", round=n, cause=f"c{n % 2}") for n in range(1, 6)))
    await api.add(make("round_started", round=6))
    numbers = [one["round"] for one in await every_item(reader, "jobs/j/rounds", limit=2)]
    assert numbers == [6, 5, 4, 3, 2, 1]
    ended = await every_item(reader, "jobs/j/rounds", cause="c0", order="asc")
    assert [one["round"] for one in ended] == [2, 4]
    running = await every_item(reader, "jobs/j/rounds", state="running")
    assert [one["round"] for one in running] == [6]


NODE_FILTERS: list[tuple[dict[str, Any], list[str]]] = [
    ({}, ["n1", "n2", "n3"]),
    ({"order": "desc"}, ["n3", "n2", "n1"]),
    ({"state": "lost"}, ["n2"]),
    ({"healthy": False}, ["n1"]),
    ({"suspect": True}, ["n3"]),
    ({"suspect": False}, ["n1", "n2"]),
    ({"excluded": True}, ["n1"]),
    ({"excluded": False}, ["n2", "n3"]),
    ({"attention": True}, ["n1", "n3"]),
    ({"attention": False}, ["n2"]),
    ({"job": "j1"}, ["n1"]),
    ({"q": "N2"}, ["n2"]),
]


async def test_nodes_can_be_filtered(api: Api, reader: httpx2.AsyncClient) -> None:
    await api.add(
        make("node_joined", node="n1", job="j1"),
        make("node_check_finished", node="n1", is_healthy=False),
        make("node_excluded", node="n1", mode="enforce", ttl_s=None),
        make("node_joined", node="n2", job="j2"),
        make("node_lost", node="n2"),
        make("node_excluded", node="n2", mode="enforce", ttl_s=1.0, at=BEGAN.replace(year=2001)),
        make("node_suspected", node="n3"),
    )
    for query, found in NODE_FILTERS:
        nodes = await every_item(reader, "nodes", limit=2, **query)
        assert [node["node"] for node in nodes] == found, query


SAVE_FILTERS: list[tuple[str, dict[str, Any], list[tuple[str, str]]]] = [
    ("saves", {}, [("j1", "global"), ("j1", "peer"), ("j2", "global"), ("j3", "global")]),
    ("saves", {"failing": True}, [("j1", "global"), ("j3", "global")]),
    ("saves", {"failing": False}, [("j1", "peer"), ("j2", "global")]),
    ("saves", {"failing": True, "state": ["running", "forming"]}, [("j1", "global")]),
    (
        "saves",
        {"failing": True, "heard_since": "2020-01-01T00:00:00Z"},
        [("j1", "global"), ("j3", "global")],
    ),
    ("saves", {"failing": True, "heard_since": "2100-01-01T00:00:00Z"}, []),
    ("saves", {"state": "failed"}, [("j3", "global")]),
    ("save-delays", {}, [("j1", "n1"), ("j1", "n2"), ("j3", "n3")]),
    ("save-delays", {"waiting": True}, [("j1", "n1"), ("j3", "n3")]),
    ("save-delays", {"waiting": False}, [("j1", "n2")]),
    ("save-delays", {"waiting": True, "state": "running"}, [("j1", "n1")]),
]


async def test_saves_of_all_jobs_can_be_filtered(api: Api, reader: httpx2.AsyncClient) -> None:
    """Which saves fail or wait is one question, however many jobs there are (A8.5)."""
    await api.add(
        *(make("job_started", job=job) for job in ("j1", "j2", "j3")),
        *(make("round_started", job=job, round=1) for job in ("j1", "j2")),
        make("job_ended", job="j3", state="failed", at=BEGAN.replace(hour=20)),
        make("checkpoint_committed", job="j1", tier="global"),
        make("checkpoint_failed", job="j1", tier="global"),
        make("checkpoint_committed", job="j1", tier="peer"),
        make("checkpoint_failed", job="j2", tier="global"),
        make("checkpoint_committed", job="j2", tier="global"),
        make("checkpoint_failed", job="j3", tier="global"),
        make("saves_delayed", job="j1", node="n1", waiting=2),
        make("saves_delayed", job="j1", node="n2", waiting=0),
        make("saves_delayed", job="j3", node="n3", waiting=1),
    )
    for path, query, found in SAVE_FILTERS:
        items = await every_item(reader, path, limit=1, **query)
        second = "tier" if path == "saves" else "node"
        assert [(item["job"], item[second]) for item in items] == found, (path, query)


async def test_facts_can_be_filtered(api: Api, reader: httpx2.AsyncClient) -> None:
    facts = {
        "a": make("rank_exited", job="j1", round=1, node="n1", source="agent/n1"),
        "b": make("round_ended", job="j1", round=2, node="n2", source="rendezvous"),
        "c": make("node_lost", job="j2", round=None, node="n1", source="health"),
        "d": make("job_ended", job="j2", at=BEGAN.replace(hour=9)),
    }
    await api.add(*facts.values())
    names = {fact.id: name for name, fact in facts.items()}
    for query, found in (
        ({"job": "j1"}, "ab"),
        ({"kind": "node_lost"}, "c"),
        ({"kind": ["node_lost", "rank_exited"]}, "ac"),
        ({"round": 2}, "b"),
        ({"node": "n1"}, "ac"),
        ({"source": "health"}, "c"),
        ({"since": "2026-11-21T08:00:00Z"}, "d"),
        ({"until": "2026-11-21T09:00:00+01:00"}, "abc"),
        ({"after": 2}, "cd"),
        ({"job": "j1", "kind": "node_lost"}, ""),
    ):
        for order in ("asc", "desc"):
            items = await every_item(reader, "facts", limit=1, order=order, **query)
            shown = "".join(names[item["id"]] for item in items)
            assert shown == (found if order == "asc" else found[::-1]), query


async def test_facts_of_a_wrong_clock_are_found_by_when_they_arrived(
    api: Api, reader: httpx2.AsyncClient
) -> None:
    """The log may have gaps: the facts of a removed job are gone."""
    names = {}
    clock = api.clock = FakeClock()
    for minute, name in enumerate("abcdefgh"):
        years_off = BEGAN.replace(year=2030 if minute % 2 else 2001)
        fact = make("rank_exited", at=years_off, job="gone" if name in "bef" else "j")
        names[fact.id] = name
        await api.add(fact)
        await clock.advance(60)
    async with api.database.write() as connection:
        await connection.exec_driver_sql("DELETE FROM facts WHERE job = 'gone'")
    begin = FakeClock().wall()
    for since, until, found in (
        (None, None, "acdgh"),
        (0, None, "acdgh"),
        (1, None, "cdgh"),
        (120, 181, "cd"),
        (121, 180, ""),
        (181, 420, "g"),
        (420, 500, "h"),
        (421, None, ""),
        (None, 1, "a"),
        (None, 0, ""),
    ):
        moments = {"received_since": since, "received_until": until}
        query = {
            key: (begin + timedelta(seconds=moment)).isoformat()
            for key, moment in moments.items()
            if moment is not None
        }
        for order in ("asc", "desc"):
            items = await every_item(reader, "facts", limit=1, order=order, job="j", **query)
            shown = "".join(names[item["id"]] for item in items)
            assert shown == (found if order == "asc" else found[::-1]), moments


async def test_a_fact_is_shown_as_it_was_sent(api: Api, reader: httpx2.AsyncClient) -> None:
    for kind in KINDS:
        fact = make(kind)
        await api.add(fact)
        found = await get(reader, f"facts/{fact.id}")
        assert (found["kind"], found["body"]["id"], found["job"]) == (kind, fact.id, "j")


async def test_a_page_of_large_facts_ends_early(api: Api) -> None:
    await api.open(max_response_bytes=300_000)
    await api.add(*(make("rank_exited", first_error="x" * 100_000) for _ in range(5)))
    async with api.client(await api.token()) as client:
        page = await get(client, "facts", limit=1000)
        assert len(page["items"]) == 2
        assert len(await every_item(client, "facts")) == 5


async def test_one_fact_larger_than_a_page_is_still_shown(api: Api) -> None:
    await api.open(max_response_bytes=10)
    await api.add(make("rank_exited"), make("rank_exited"))
    async with api.client(await api.token()) as client:
        assert len(await every_item(client, "facts")) == 2


async def test_it_answers_while_the_bus_is_away(
    api: Api, reader: httpx2.AsyncClient, database: Database
) -> None:
    """Jobs and status are read from the database (A11.2)."""
    await api.add(make("job_started"))
    api.is_bus_connected = False
    assert (await get(reader, "jobs"))["items"][0]["job"] == "j"
    status = await get(reader, "status")
    assert not status["is_bus_connected"]
    assert (status["last_n"], status["projected_n"], status["database"]) == (1, 1, database.kind)


ABSENT = [
    "jobs/nobody",
    "jobs/nobody/rounds",
    "jobs/nobody/rounds/1",
    "jobs/nobody/rounds/1/exits",
    "jobs/nobody/rounds/1/members",
    "nodes/nowhere",
    "facts/nothing",
    "no/such/path",
]


async def test_what_is_not_there_is_a_404(reader: httpx2.AsyncClient) -> None:
    for path in ABSENT:
        answer = await reader.get(path)
        assert answer.headers["content-type"] == PROBLEM
        problem = answer.json()
        assert (answer.status_code, problem["code"]) == (404, "not_found")
        assert problem["instance"] == f"/api/v1/{path}"


async def test_an_answer_that_the_client_has_is_not_sent_again(
    api: Api, reader: httpx2.AsyncClient
) -> None:
    await api.add(make("job_started"))
    first = await reader.get("jobs")
    for given in (first.headers["etag"], f'W/{first.headers["etag"]}, "x"', "*"):
        again = await reader.get("jobs", headers={"If-None-Match": given})
        assert (again.status_code, again.content) == (304, b"")
        assert again.headers["etag"] == first.headers["etag"]

    await api.add(make("job_ended"))
    changed = await reader.get("jobs", headers={"If-None-Match": first.headers["etag"]})
    assert changed.status_code == 200


async def test_head_is_get_without_the_body(api: Api, reader: httpx2.AsyncClient) -> None:
    await api.add(make("job_started"))
    get_, head = await reader.get("jobs"), await reader.head("jobs")
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers == get_.headers
