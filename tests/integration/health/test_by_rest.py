"""The real bus, rendezvous, health and history: people see ranks and nodes, and change them."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx2
import pytest

from everstep import subjects
from everstep.bus import connect
from everstep.bus.auth.roles import ADMIN, SERVICE
from everstep.bus.ports import Bus
from everstep.bus.server.dev_server import DevServer
from everstep.ids import new_id
from everstep.messages import (
    CheckResult,
    NodeBeat,
    NodeCheckFinished,
    NodeStandings,
    RankBeat,
    RunChecks,
    ShowNodes,
    WatchChanged,
)
from everstep_services.cli.__main__ import main
from everstep_services.cli.errors import Exit
from everstep_services.health.settings import HealthSettings
from tests.integration.health.replicas import at_work
from tests.integration.history.test_rest_operators import history, rendezvous
from tests.integration.rendezvous.agents import Agent
from tests.unit.rendezvous.world import spec
from tests.waiting import until_async


@dataclass
class Stack:
    """All services at work, and one agent with two ranks."""

    client: httpx2.AsyncClient
    bus: Bus
    agent: Agent
    token: Path

    async def get(self, path: str, **query: Any) -> Any:
        answer = await self.client.get(path, params=query)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def command(self, *arguments: str) -> int:
        api = ["--api", str(self.client.base_url).removesuffix("/api/v1/")]
        return await asyncio.to_thread(main, [*arguments, *api, "--token-file", str(self.token)])


@pytest.fixture
async def stack(
    shared_nats: DevServer,
    sqlite_url: str,
    job: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[Stack]:
    monkeypatch.setenv("EVERSTEP_STATE_DIR", str(tmp_path / "state"))
    async with made(shared_nats, sqlite_url, job, tmp_path) as running:
        yield running


@asynccontextmanager
async def made(nats: DevServer, url: str, job: str, folder: Path) -> AsyncIterator[Stack]:
    service, token = nats.settings(SERVICE), folder / "token"
    async with AsyncExitStack() as opened:
        enter = opened.enter_async_context
        bus = await enter(connect(nats.settings(ADMIN), "agents", spool=folder / "agents"))
        ours = await enter(connect(service, "health", spool=folder / "health"))
        await enter(at_work(ours, HealthSettings()))
        await enter(rendezvous(service, folder / "rendezvous"))
        client = await enter(history(service, url, token))
        agent = Agent(bus, job, f"node-of-{job}", spec(1))
        await enter(agent.listening())
        await agent.join()
        await agent.started()
        running = Stack(client, bus, agent, token)
        await until_async(lambda: known(running), "the round runs, as the record says")
        yield running


async def known(stack: Stack) -> bool:
    answer = await stack.client.get(f"jobs/{stack.agent.job}")
    return answer.status_code == 200 and answer.json()["state"] == "running"


async def test_ranks_are_seen_live_and_a_watch_is_on_record(stack: Stack) -> None:
    agent = stack.agent
    ranks = (
        RankBeat(rank=0, state="stalled", section="data", section_age_s=31.0, limit_s=30.0),
        RankBeat(rank=1),
    )
    beat = NodeBeat(
        job=agent.job, node=agent.node, sequence=1, at=datetime.now(UTC), state="running", round=1,
        slot=0, ranks=ranks, watch="armed",
    )  # fmt: skip

    async def shown() -> Any:
        stack.bus.send(subjects.beat(agent.job, agent.node), beat)
        return await stack.get(f"jobs/{agent.job}/ranks")

    found = await until_async(shown, "both ranks", holds=lambda answer: len(answer["items"]) == 2)
    assert (found["round"], found["states"]) == (1, {"stalled": 1, "running": 1})
    assert (found["is_stale"], found["note"]) == (False, None)
    assert (await stack.get(f"jobs/{agent.job}"))["watch"]["state"] == "armed"
    paused = WatchChanged(
        id=new_id(), job=agent.job, at=datetime.now(UTC), source="test", round=1, node=agent.node,
        state="paused", reason="the script paused it",
    )  # fmt: skip
    await stack.bus.record(paused)

    async def watch() -> Any:
        return (await stack.get(f"jobs/{agent.job}"))["watch"]

    said = await until_async(watch, "it is paused", holds=lambda one: one["state"] == "paused")
    assert said["reason"] == "the script paused it"


async def test_a_limit_that_is_set_holds_in_health_and_is_given_back(
    stack: Stack, capsys: pytest.CaptureFixture[str]
) -> None:
    job = stack.agent.job
    assert await stack.command("limits", job, "--set", "data=30s", "--reason", "slow disk") == 0
    found = await stack.get(f"jobs/{job}/limits")
    assert found["is_live"]
    limits = {one["section"]: (one["limit_s"], one["source"]) for one in found["limits"]}
    assert limits["data"] == (30.0, "configured")
    assert await stack.command("limits", job, "--set", "data=auto") == 0
    found = await stack.get(f"jobs/{job}/limits")
    assert "data" not in [one["section"] for one in found["limits"]]
    capsys.readouterr()

    async def acts() -> list[dict[str, Any]]:
        found = await stack.get("facts", job=job, kind="operator_acted")
        return [fact["body"] for fact in found["items"]]

    said = await until_async(acts, "both are on record", holds=lambda found: len(found) == 2)
    assert [(act["action"], act["origin"]) for act in said] == [("set_limit", "rest")] * 2
    assert said[0]["reason"] == "slow disk"


async def test_a_node_is_kept_out_and_let_in_again(
    stack: Stack, capsys: pytest.CaptureFixture[str]
) -> None:
    """One command excludes a node, and one includes it (A10.3)."""
    node = stack.agent.node
    assert await stack.command("node", "exclude", node, "--for", "1h", "--reason", "fan") == 0

    async def excluded() -> Any:
        return await stack.get(f"nodes/{node}")

    found = await until_async(excluded, "it is excluded", holds=lambda one: one["is_excluded"])
    assert (found["excluded_reason"], found["standing"]["state"]) == ("fan", "excluded")
    listed = (await stack.get("nodes", excluded="true", q=node))["items"]
    assert [one["node"] for one in listed] == [node]
    control = (await stack.get("control"))["cluster"]
    assert node in [one["node"] for one in control["exclusions"]]
    assert await stack.command("node", "include", node, "--reason", "a new fan") == 0
    found = await until_async(excluded, "it is not", holds=lambda one: one["is_excluded"] is False)
    assert found["standing"]["state"] != "excluded"
    assert node in capsys.readouterr().out


async def is_known(stack: Stack) -> bool:
    """Health has heard of the agent's node."""
    question = ShowNodes(job=subjects.CLUSTER, nodes=(stack.agent.node,))
    answer = await stack.bus.ask(
        "health", "nodes", question, NodeStandings, job=subjects.CLUSTER, within_s=30
    )
    return answer.nodes[0].silence_s is not None


async def test_a_mistyped_node_is_not_excluded(
    stack: Stack,
    shared_nats: DevServer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Neither by the API nor over the bus; --force excludes a node before it first joins."""
    beat = NodeBeat(
        job=stack.agent.job, node=stack.agent.node, sequence=1, at=datetime.now(UTC),
        state="running", round=1, slot=0,
    )  # fmt: skip
    stack.bus.send(subjects.beat(beat.job, beat.node), beat)
    await until_async(lambda: is_known(stack), "health has heard the node")
    wrong, unjoined = f"{stack.agent.node}x", f"{stack.agent.job}-yet-to-join"
    refused = (
        f"everstep: no node is called '{wrong}'; did you mean {stack.agent.node}? With force, a "
        "node is excluded before it first joins\n"
    )
    assert await stack.command("node", "exclude", wrong) == Exit.USAGE
    assert capsys.readouterr().err == refused
    login = shared_nats.settings(ADMIN)
    assert login.credentials_file is not None
    monkeypatch.setenv("EVERSTEP_BUS__URL", login.url)
    monkeypatch.setenv("EVERSTEP_BUS__CREDENTIALS_FILE", str(login.credentials_file))

    async def over_the_bus(*arguments: str) -> int:
        return await asyncio.to_thread(main, ["node", "exclude", *arguments])

    assert await over_the_bus(wrong) == Exit.USAGE
    assert capsys.readouterr().err == refused
    assert await over_the_bus(stack.agent.node) == 0
    assert await over_the_bus(unjoined, "--force", "--for", "1h") == 0
    control = (await stack.get("control"))["cluster"]
    names = [item["node"] for item in control["exclusions"]]
    assert stack.agent.node in names
    assert unjoined in names
    assert wrong not in names
    for node in (stack.agent.node, unjoined):
        assert await stack.command("node", "include", node) == 0


async def test_a_check_is_ordered_and_its_result_is_printed(
    stack: Stack, capsys: pytest.CaptureFixture[str]
) -> None:
    agent = stack.agent

    async def examine() -> RunChecks:
        while not isinstance(order := await agent.orders.get(), RunChecks):
            pass
        result = CheckResult(check="gpu", state="failed", reason="XID 79")
        await stack.bus.record(
            NodeCheckFinished(
                id=new_id(), job=agent.job, at=datetime.now(UTC), source="test", node=agent.node,
                occasion=order.occasion, is_healthy=False, took_s=0.1, results=(result,),
                checks=order.checks,
            )
        )  # fmt: skip
        return order

    async with asyncio.TaskGroup() as tasks:
        ordered = tasks.create_task(examine())
        asked = ("node", "check", agent.node, "gpu", "--job", agent.job, "-o", "json")
        code = await stack.command(*asked, "--within", "30", "--reason", "slow")
    record = json.loads(capsys.readouterr().out)
    assert (code, record["schema"], record["is_healthy"]) == (1, "everstep.node_check/v1", False)
    assert record["results"][0]["reason"] == "XID 79"
    assert ordered.result().checks == ("gpu",)
    assert await stack.command("node", "check", agent.node, "--within", "0.1") == 5
    assert f"nothing was heard of the checks of {agent.node}" in capsys.readouterr().err
