"""What people ask REST to do: asked of rendezvous, answered in its words, and on record."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from everstep.bus import BusSettings, connect
from everstep.bus.auth.roles import ADMIN, SERVICE
from everstep.bus.requests import RefusalError
from everstep.bus.server.dev_server import DevServer
from everstep.clock import SystemClock
from everstep.messages import (
    Done,
    DrainNode,
    Member,
    Message,
    Question,
    RequestMeasurement,
    RestartJob,
    StopJob,
)
from everstep.observe.http import listen, url_of
from everstep.runtime import serve
from everstep_services.history.replica import opened
from everstep_services.history.settings import ApiSettings, HistorySettings
from everstep_services.rendezvous.service import Rendezvous
from everstep_services.rendezvous.settings import RendezvousSettings
from tests.integration.conftest import Api
from tests.integration.rendezvous.agents import Agent
from tests.unit.history.facts import make
from tests.unit.rendezvous.world import spec
from tests.waiting import until_async


@pytest.fixture
def database_url(sqlite_url: str) -> str:
    """SQLite only: how a database answers makes no difference here."""
    return sqlite_url


class Told:
    """Stands for rendezvous: says what the test wants, and remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[Message] = []
        self.answer: Done | RefusalError = Done(text="round 4 ends")

    async def __call__(self, question: Message) -> Message:
        assert isinstance(question, Question)
        self.asked.append(question)
        if isinstance(self.answer, RefusalError):
            raise self.answer
        return self.answer


@pytest.fixture
async def told(api: Api) -> AsyncIterator[Told]:
    made = Told()
    async with api.bus.answer(
        "rendezvous", dict.fromkeys(("stop", "restart", "drain", "measure"), made)
    ):
        yield made


@pytest.fixture
async def operator(api: Api) -> AsyncIterator[httpx2.AsyncClient]:
    async with api.client(await api.token("operate")) as client:
        yield client


def problem(answer: httpx2.Response) -> tuple[int, str, str]:
    assert answer.headers["content-type"] == "application/problem+json", answer.text
    body = answer.json()
    return answer.status_code, body["code"], body["detail"]


async def test_rendezvous_hears_who_asks_by_which_token_and_why(
    operator: httpx2.AsyncClient, told: Told
) -> None:
    wanted = {"reason": "too slow", "user": "ann@login-1", "save_first": False}
    answer = await operator.post("jobs/llama:stop", json=wanted)
    assert answer.status_code == 202
    assert answer.json() == {
        "job": "llama",
        "action": "stop",
        "node": None,
        "by": "ann@login-1 (a operate)",
        "text": "round 4 ends",
    }
    more = {"round": 4, "without_nodes": ["n1"]}
    assert (await operator.post("jobs/llama:restart", json=more)).status_code == 202
    assert told.asked == [
        StopJob(
            job="llama",
            by="ann@login-1 (a operate)",
            reason="too slow",
            save_first=False,
            origin="rest",
        ),
        RestartJob(
            job="llama",
            by="a operate",
            reason="no reason given",
            round=4,
            without_nodes=("n1",),
            origin="rest",
        ),
    ]


async def test_a_network_test_has_the_id_that_the_asker_made_or_a_new_one(
    operator: httpx2.AsyncClient, told: Told
) -> None:
    test = "0193aefc11e25f0a8c7d4b6e9f201c3d"
    wanted = {"nodes": ["n1", "n2"], "partners": 3, "is_beside_training": True, "test": test}
    assert (await operator.post("jobs/llama:measure", json=wanted)).status_code == 202
    assert (await operator.post("jobs/llama:measure", json={})).status_code == 202
    for wrong in ({"test": "mine"}, {"partners": 0}, {"nodes": ["a b"]}):
        assert (await operator.post("jobs/llama:measure", json=wrong)).status_code == 422, wrong
    first, second = told.asked
    assert first == RequestMeasurement(
        job="llama",
        by="a operate",
        reason="no reason given",
        nodes=("n1", "n2"),
        partners=3,
        is_beside_training=True,
        test=test,
        origin="rest",
    )
    assert isinstance(second, RequestMeasurement)
    assert (second.nodes, len(second.test)) == ((), 32)


async def test_what_rendezvous_refuses_is_a_conflict(
    operator: httpx2.AsyncClient, told: Told
) -> None:
    told.answer = Done(text="round 3 does not run", is_refused=True)
    answer = await operator.post("jobs/llama:restart", json={"round": 3})
    said = "restart of llama refused: round 3 does not run"
    assert problem(answer) == (409, "refused", said)


async def test_a_job_that_nobody_knows_is_named_with_those_like_it(
    api: Api, operator: httpx2.AsyncClient, told: Told
) -> None:
    await api.add(make("job_started", job="llama-8b"), make("job_started", job="vit"))
    told.answer = RefusalError("404", "there is no job llama-8c: join it first")
    answer = await operator.post("jobs/llama-8c:stop", json={})
    detail = "there is no job llama-8c; did you mean llama-8b?"
    assert problem(answer) == (404, "not_found", detail)


async def test_without_rendezvous_or_bus_nothing_is_done_and_reading_goes_on(
    api: Api, operator: httpx2.AsyncClient
) -> None:
    await api.add(make("job_started", job="j"))
    for is_up, said in (True, "nobody answers rendezvous.stop"), (False, "no connection"):
        await api.bus._server.set_up(up=is_up)
        answer = await operator.post("jobs/j:stop", json={})
        status, code, detail = problem(answer)
        assert (status, code) == (503, "rendezvous_unavailable")
        assert said in detail
        assert answer.headers["retry-after"] == "5"
        assert (await operator.get("jobs/j")).status_code == 200


async def test_a_token_that_may_only_read_gets_nothing_done(
    reader: httpx2.AsyncClient, told: Told
) -> None:
    for path in ("jobs/j:stop", "jobs/j:restart", "jobs/j:save", "nodes/n:drain"):
        status, code, detail = problem(await reader.post(path, json={}))
        assert (status, code) == (403, "scope_missing")
        assert "scope operate; yours has read" in detail
    assert told.asked == []


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("jobs/j:stop", {"save": True}),
        ("jobs/j:stop", {"reason": ""}),
        ("jobs/j:stop", {"reason": "x\ny"}),
        ("jobs/j:stop", {"user": "x" * 129}),
        ("jobs/a.b:stop", {}),
        ("jobs/j:restart", {"round": -1}),
        ("jobs/j:restart", {"without_nodes": ["a.b"]}),
        ("nodes/n:drain", {"within_s": -1}),
        ("nodes/n:drain", {"within_s": 1e9}),
        ("nodes/n:drain", {"job": "*"}),
    ],
)
async def test_what_makes_no_sense_never_reaches_rendezvous(
    operator: httpx2.AsyncClient, told: Told, path: str, body: dict[str, Any]
) -> None:
    assert problem(await operator.post(path, json=body))[:2] == (422, "invalid_request")
    assert told.asked == []


async def test_a_drained_node_is_found_in_its_job(
    api: Api, operator: httpx2.AsyncClient, told: Told
) -> None:
    await api.add(
        make("round_formed", job="here", round=1, members=()),
        make("node_joined", job="here", node="n1", round=None),
        make("node_joined", job="over", node="n2", round=None),
        make("job_ended", job="over"),
    )
    answer = await operator.post("nodes/n1:drain", json={"within_s": 30})
    assert (answer.status_code, answer.json()["job"], answer.json()["node"]) == (202, "here", "n1")
    (question,) = told.asked
    assert isinstance(question, DrainNode)
    assert (question.job, question.node, question.within_s) == ("here", "n1", 30.0)
    detail = "there is no job that node n2 takes part in"
    assert problem(await operator.post("nodes/n2:drain", json={})) == (404, "not_found", detail)
    answer = await operator.post("nodes/n2:drain", json={"job": "over"})
    assert answer.json()["job"] == "over"


async def test_a_node_of_several_jobs_is_drained_of_none_by_chance(
    api: Api, operator: httpx2.AsyncClient, told: Told
) -> None:
    members = (Member(slot=0, node="n1", first_rank=0, ranks=2),)
    await api.add(*(make("round_formed", job=job, round=1, members=members) for job in "ab"))
    detail = "n1 takes part in a, b: name the `job`"
    answer = await operator.post("nodes/n1:drain", json={})
    assert problem(answer) == (409, "several_jobs", detail)
    assert told.asked == []


# -- the real bus, rendezvous and history ------------------------------------------------------


@asynccontextmanager
async def rendezvous(settings: BusSettings, spool: Path) -> AsyncIterator[None]:
    async with connect(settings, "rendezvous", spool=spool) as bus, asyncio.TaskGroup() as tasks:
        service = Rendezvous(RendezvousSettings(last_call_s=0.5), bus, SystemClock())
        serving = tasks.create_task(service.serve_for_ever())
        await service.answers.wait()
        yield
        serving.cancel()


@asynccontextmanager
async def history(
    settings: BusSettings, database_url: str, token: Path
) -> AsyncIterator[httpx2.AsyncClient]:
    """A client of a whole history service, with its administrator's token."""
    listener, stop = listen("127.0.0.1", 0, remedy=""), asyncio.Event()
    url = url_of(listener)
    async with (
        opened(
            HistorySettings(database_url=database_url), ApiSettings(), settings, listener, token
        ) as parts,
        asyncio.TaskGroup() as tasks,
    ):
        tasks.create_task(serve(*parts.loops, stop=stop, drains=parts.drains))
        text = await asyncio.to_thread(token.read_text)
        headers = {"Authorization": f"Bearer {text.strip()}"}
        async with httpx2.AsyncClient(
            base_url=f"{url}/api/v1", headers=headers, timeout=30
        ) as client:
            yield client
        stop.set()


async def test_a_job_is_restarted_and_stopped_and_the_record_says_by_whom(
    shared_nats: DevServer, sqlite_url: str, job: str, tmp_path: Path
) -> None:
    service = shared_nats.settings(SERVICE)
    async with (
        connect(shared_nats.settings(ADMIN), "agents") as bus,
        rendezvous(service, tmp_path / "spool"),
        history(service, sqlite_url, tmp_path / "token") as client,
        AsyncExitStack() as stack,
    ):
        agents = [Agent(bus, job, f"n{n}", spec(2, max_restarts=0)) for n in range(2)]
        for agent in agents:
            await stack.enter_async_context(agent.listening())
        await asyncio.gather(*(agent.join() for agent in agents))
        await asyncio.gather(*(agent.started() for agent in agents))

        answer = await client.post(f"jobs/{job}:restart", json={"reason": "stuck"})
        free = "another round follows, and does not count against the restart budget"
        assert (answer.status_code, answer.json()["text"]) == (202, f"round 1 ends; {free}")
        await asyncio.gather(*(agent.stopped() for agent in agents))
        await asyncio.gather(*(agent.join() for agent in agents))
        orders = await asyncio.gather(*(agent.started(after=1) for agent in agents))
        assert {order.round for order in orders} == {2}
        document = await agents[0].show()
        assert (document.restarts, document.incident) == (0, None)
        answer = await client.post(f"jobs/{job}:restart", json={"round": 1})
        assert answer.status_code == 409

        body = {"reason": "enough", "user": "ann@login-1", "save_first": False}
        assert (await client.post(f"jobs/{job}:stop", json=body)).status_code == 202
        gone = await asyncio.gather(*(agent.sent_away() for agent in agents))
        assert {order.exit_code for order in gone} == {93}

        async def acts() -> list[dict[str, Any]]:
            asked = {"job": job, "kind": "operator_acted"}
            found = (await client.get("facts", params=asked)).json()["items"]
            return [fact["body"] for fact in found]

        said = await until_async(acts, "all is on record", holds=lambda found: len(found) == 3)
        assert [(act["by"], act["action"], act["outcome"], act["origin"]) for act in said] == [
            ("first", "restart_job", "accepted", "rest"),
            ("first", "restart_job", "refused", "rest"),
            ("ann@login-1 (first)", "stop_job", "accepted", "rest"),
        ]
        assert said[2]["reason"] == "enough"
