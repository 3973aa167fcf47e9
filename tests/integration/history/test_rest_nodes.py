"""REST answers: which nodes can be trusted, what was found on them, and what is switched."""

import asyncio
from dataclasses import replace
from datetime import timedelta
from typing import Any

import httpx2
import pytest

from everstep.bus.requests import RefusalError
from everstep.messages import (
    CheckResult,
    ControlDocument,
    Done,
    ExcludeNode,
    Exclusion,
    IncludeNode,
    Message,
    NodeBeat,
    NodesDocument,
    NodeStanding,
    NodeStandings,
    ProbeBeat,
    RequestChecks,
    SetControl,
    ShowNodes,
)
from everstep.messages.codec import encode
from everstep.subjects import CLUSTER
from everstep_services.cli.pages.limits import control_page
from everstep_services.history.api.app import create_app
from everstep_services.history.beats import Beats
from tests.fakes.clock import FakeClock
from tests.integration.conftest import Api
from tests.integration.history.test_rest_lists import every_item, get
from tests.unit.history.facts import BEGAN, make

FAILED = CheckResult(check="gpu", state="failed", reason="XID 79", failure_class="reboot")
NAMES = ("n1", "n2", "n3", "n4")


class Health:
    """Stands for health: knows some strikes, and remembers what it was asked."""

    def __init__(self, **strikes: int) -> None:
        self.strikes = strikes
        self.asked: list[Message] = []
        self.refusal: RefusalError | None = None

    async def __call__(self, question: Message) -> Message:
        self.asked.append(question)
        if self.refusal is not None:
            raise self.refusal
        if not isinstance(question, ShowNodes):
            return Done(text="it is done")
        return NodeStandings(
            nodes=tuple(
                NodeStanding(node=name, state="suspect", strikes=strikes, failing=(FAILED,))
                for name, strikes in self.strikes.items()
                if not question.nodes or name in question.nodes
            )
        )


@pytest.fixture
async def nodes(api: Api) -> Api:
    await api.add(*(make("node_joined", node=name) for name in NAMES))
    return api


async def names(client: httpx2.AsyncClient, **query: Any) -> list[str]:
    found = await every_item(client, "nodes", limit=1, sort="strikes", **query)
    return [one["node"] for one in found]


async def test_the_nodes_with_the_most_strikes_come_first(
    nodes: Api, reader: httpx2.AsyncClient
) -> None:
    """The list of nodes is sorted by strikes (A10.6)."""
    assert await names(reader) == ["n1", "n2", "n3", "n4"]
    await nodes.add(
        make("node_suspected", node="n3", strikes=3, job=CLUSTER),
        make("node_suspected", node="n4", strikes=1, job=CLUSTER),
    )
    assert await names(reader) == ["n3", "n4", "n1", "n2"]
    assert await names(reader, order="desc") == ["n3", "n4", "n2", "n1"]
    async with nodes.bus.answer("health", {"nodes": Health(n2=2, n4=5)}):
        assert await names(reader) == ["n4", "n2", "n1", "n3"]
        found = await get(reader, "nodes")
        assert [one["strikes"] for one in found["items"]] == [0, 2, 0, 5]
    async with nodes.bus.answer("health", {"nodes": Health()}):
        assert await names(reader) == ["n1", "n2", "n3", "n4"]


async def test_a_list_goes_on_when_health_goes_away_between_two_pages(
    nodes: Api, reader: httpx2.AsyncClient
) -> None:
    async with nodes.bus.answer("health", {"nodes": Health(n3=2)}):
        first = await get(reader, "nodes", sort="strikes", limit=1)
    rest = await get(reader, "nodes", sort="strikes", cursor=first["next"])
    assert [one["node"] for one in first["items"]] == ["n3"]
    assert {one["node"] for one in rest["items"]} >= {"n1", "n2", "n4"}


async def test_a_node_says_how_it_stands_and_what_was_found_last(
    nodes: Api, reader: httpx2.AsyncClient
) -> None:
    await nodes.add(
        make(
            "node_check_finished", node="n1", is_healthy=False, results=(FAILED,), checks=("gpu",)
        ),
        make("node_excluded", node="n1", mode="observe", reason="3 strikes, only observing"),
    )
    found = await get(reader, "nodes/n1")
    assert (found["standing"], found["now"]) == (None, None)
    assert "health cannot be asked: nobody answers health.nodes" in found["standing_missing"]
    assert (found["is_excluded"], found["spared_reason"]) == (None, "3 strikes, only observing")
    (result,) = found["last_check"]["results"]
    assert (result["check"], result["reason"], result["failure_class"]) == (
        "gpu",
        "XID 79",
        "reboot",
    )
    async with nodes.bus.answer("health", {"nodes": Health(n1=2)}):
        found = await get(reader, "nodes/n1")
        other = await get(reader, "nodes/n2")
    assert (found["standing"]["state"], found["strikes"]) == ("suspect", 2)
    assert found["standing"]["failing"][0]["reason"] == "XID 79"
    assert (other["standing"], other["standing_missing"]) == (None, "health does not know n2")


async def test_the_probes_of_a_node_are_shown_with_interval_policy_and_failures(
    nodes: Api, reader: httpx2.AsyncClient
) -> None:
    """In the list, and of each recorded run what followed from it."""
    probe = ProbeBeat(
        check="nic", every_s=10.0, policy="exclude", state="failed", failures=2, failures_limit=3
    )
    nodes.context.beats.hear(
        NodeBeat(job="j", node="n1", sequence=1, at=BEGAN, state="running", probes=(probe,))
    )
    await nodes.add(
        make("node_joined", node="n1", nvlink_domain="nvlink-f2c1"),
        make("node_check_finished", node="n1", occasion="join", policy="", checks=("nic",)),
        make(
            "node_check_finished", node="n1", occasion="probe", policy="exclude", failures=3,
            is_acted_on=True, checks=("nic",),
        ),
    )  # fmt: skip
    listed = {one["node"]: one for one in await every_item(reader, "nodes")}
    assert listed["n1"]["probes"] == [
        {
            "check": "nic", "every_s": 10.0, "policy": "exclude", "state": "failed", "failures": 2,
            "failures_limit": 3, "has_failed": False,
        }
    ]  # fmt: skip
    assert listed["n2"]["probes"] == []
    assert listed["n1"]["nvlink_domain"] == "nvlink-f2c1"
    assert (await get(reader, "nodes/n1"))["probes"] == listed["n1"]["probes"]
    probed, joined = await every_item(reader, "nodes/n1/checks")
    acted = (probed["policy"], probed["failures"], probed["is_acted_on"])
    assert acted == ("exclude", 3, True)
    assert (joined["policy"], joined["failures"], joined["is_acted_on"]) == (None, None, None)


async def test_a_wrong_clock_is_shown_by_the_node_and_by_the_status(nodes: Api) -> None:
    """It is evidence only: the node is neither suspect nor excluded by it."""
    clock = FakeClock()
    beats = Beats(nodes.bus, clock, clock_offset_limit_s=10.0)
    nodes.context = replace(nodes.context, beats=beats)
    nodes.app = create_app(nodes.context)
    for sequence in range(2):
        for node, offset_s in (("n1", 0.1), ("n2", 12.5), ("n3", -90.0), ("n4", 9.9)):
            at = clock.wall() + timedelta(seconds=offset_s)
            beats.hear(NodeBeat(job="j", node=node, sequence=sequence, at=at, state="running"))
        await clock.advance(0 if sequence else 31)
    async with nodes.client(await nodes.token()) as client:
        listed = {one["node"]: one for one in await every_item(client, "nodes")}
        found = {
            name: (one["clock_offset_s"], one["is_clock_wrong"]) for name, one in listed.items()
        }
        assert found == {
            "n1": (0.1, False), "n2": (12.5, True), "n3": (-90.0, True), "n4": (9.9, False),
        }  # fmt: skip
        assert not any(one["is_suspect"] or one["is_excluded"] for one in listed.values())
        one = await get(client, "nodes/n3")
        assert (one["clock_offset_s"], one["is_clock_wrong"]) == (-90.0, True)
        assert (await get(client, "status"))["wrong_clocks"] == [
            {"node": "n3", "offset_s": -90.0}, {"node": "n2", "offset_s": 12.5},
        ]  # fmt: skip


async def test_checks_of_a_node_are_listed_newest_first(
    nodes: Api, reader: httpx2.AsyncClient
) -> None:
    await nodes.add(
        *(
            make("node_check_finished", node="n1", occasion=f"o{n}", is_healthy=n % 2 == 0)
            for n in range(4)
        ),
        make("node_check_finished", node="n2"),
    )
    found = await every_item(reader, "nodes/n1/checks", limit=3)
    assert [one["occasion"] for one in found] == ["o3", "o2", "o1", "o0"]
    found = await every_item(reader, "nodes/n1/checks", healthy=False)
    assert [one["occasion"] for one in found] == ["o3", "o1"]
    assert (await reader.get("nodes/nowhere/checks")).status_code == 404


async def test_what_people_want_of_nodes_is_asked_of_who_decides(nodes: Api) -> None:
    """One POST includes a node, and one sets the brake (A10.3, A15.4)."""
    health, rendezvous = Health(), Health()
    await nodes.add(make("round_formed", job="j", round=1, members=()))
    bus = nodes.bus
    async with (
        nodes.client(await nodes.token("operate")) as operator,
        bus.answer("health", dict.fromkeys(("exclude", "include", "control"), health)),
        bus.answer("rendezvous", {"check": rendezvous}),
    ):
        why = {"reason": "the fan is loud", "user": "ann@login-1"}
        answer = await operator.post("nodes/n1:exclude", json={**why, "ttl_s": 60})
        by = "ann@login-1 (a operate)"
        assert (answer.status_code, answer.json()) == (
            202,
            {"job": None, "action": "exclude", "node": "n1", "by": by, "text": "it is done"},
        )
        for path, body in (
            ("nodes/n1:include", why),
            ("brake", {**why, "is_on": True}),
            ("control", {**why, "job": "j", "changes": {"modes.exclude": "enforce"}}),
            ("nodes/n1:check", {**why, "checks": ["gpu"]}),
        ):
            answer = await operator.post(path, json=body)
            assert answer.status_code == 202, answer.text
        health.refusal = RefusalError("422", "n1 is not excluded")
        answer = await operator.post("nodes/n1:include", json={})
        detail = "include of n1 refused: n1 is not excluded"
        assert (answer.status_code, answer.json()["detail"]) == (409, detail)
    asked = {"by": by, "reason": "the fan is loud", "origin": "rest"}
    assert health.asked[:4] == [
        ExcludeNode(job=CLUSTER, node="n1", ttl_s=60.0, **asked),
        IncludeNode(job=CLUSTER, node="n1", **asked),
        SetControl(job=CLUSTER, changes={"brake": "on"}, **asked),
        SetControl(job="j", changes={"modes.exclude": "enforce"}, **asked),
    ]
    assert rendezvous.asked == [RequestChecks(job="j", nodes=("n1",), checks=("gpu",), **asked)]


async def test_a_node_that_nobody_has_heard_of_is_excluded_only_by_force(nodes: Api) -> None:
    """One POST excludes a node (A10.3); a name that was mistyped excludes nothing."""
    health = Health()
    async with (
        nodes.client(await nodes.token("operate")) as operator,
        nodes.bus.answer("health", {"exclude": health}),
    ):
        answer = await operator.post("nodes/n11:exclude", json={})
        assert (answer.status_code, answer.json()["code"]) == (422, "unknown_node")
        assert answer.json()["detail"] == (
            "no node is called 'n11'; did you mean n1? With force, a node is excluded before it "
            "first joins"
        )
        assert health.asked == []
        answer = await operator.post("nodes/n11:exclude", json={"force": True})
        assert answer.status_code == 202
        nodes.context.beats.hear(
            NodeBeat(job="j", node="n12", sequence=1, at=BEGAN, state="waiting")
        )
        answer = await operator.post("nodes/n12:exclude", json={})
        assert answer.status_code == 202, "its agent is heard, before its join is on record"
    assert [question.node for question in health.asked if isinstance(question, ExcludeNode)] == [
        "n11",
        "n12",
    ]


async def test_without_health_nothing_is_done(nodes: Api) -> None:
    """REST answers 503, and names what is away (A10.4)."""
    async with nodes.client(await nodes.token("operate")) as operator:
        answer = await operator.post("nodes/n1:exclude", json={})
    body = answer.json()
    assert (answer.status_code, body["code"]) == (503, "health_unavailable")
    assert "health cannot be asked" in body["detail"]


async def test_who_may_only_read_switches_nothing(nodes: Api, reader: httpx2.AsyncClient) -> None:
    for path in ("nodes/n1:exclude", "nodes/n1:include", "nodes/n1:check", "control", "brake"):
        assert (await reader.post(path, json={})).status_code == 403, path


async def test_switches_are_shown_as_the_bus_holds_them(
    nodes: Api, reader: httpx2.AsyncClient
) -> None:
    found = await get(reader, "control")
    assert (found["cluster"]["is_braked"], found["cluster"]["revision"], found["jobs"]) == (
        False,
        0,
        [],
    )
    exclusion = Exclusion(node="n1", by="ann", reason="XID 79", until=BEGAN)
    cluster = ControlDocument(
        settings={}, changed_by="ann", reason="one node", is_braked=True, modes={},
        braked_by="bob", brake_reason="a storm", exclusions=(exclusion,),
    )  # fmt: skip
    of_job = ControlDocument(settings={}, changed_by="bob", reason="x", modes={"stop": "enforce"})
    control = nodes.bus.documents("CONTROL")
    await control.put(CLUSTER, encode(cluster), revision=None)
    await control.put("j", encode(of_job), revision=None)
    remembered = NodesDocument(distrusted=("nic",), breaker_opened_at=BEGAN)
    await nodes.bus.documents("NODES").put(CLUSTER, encode(remembered), revision=None)
    found = await get(reader, "control")
    assert (found["cluster"]["is_braked"], found["cluster"]["reason"]) == (True, "one node")
    assert (found["cluster"]["braked_by"], found["cluster"]["brake_reason"]) == ("bob", "a storm")
    lines = await asyncio.to_thread(lambda: list(control_page(found)))  # rich reads the disk
    assert lines[0] == "all jobs: the brake is on (by bob: a storm): only what failed is restarted"
    assert "j: no brake" in lines
    assert found["cluster"]["exclusions"][0]["node"] == "n1"
    assert [(one["job"], one["modes"]) for one in found["jobs"]] == [("j", {"stop": "enforce"})]
    assert (found["breaker_opened_at"] is not None, found["distrusted_checks"]) == (True, ["nic"])
    await nodes.bus._server.set_up(up=False)
    answer = await reader.get("control")
    assert (answer.status_code, answer.json()["code"]) == (503, "bus_unavailable")


async def test_nodes_of_a_job_that_is_over_have_left_it(
    api: Api, reader: httpx2.AsyncClient
) -> None:
    """Their agents end with the job, and say nothing more."""
    await api.add(
        make("job_started", job="over", round=None),
        make("job_started", job="on", round=None),
        make("node_joined", job="over", node="n1"),
        make("node_joined", job="on", node="n2"),
        make("job_ended", job="over", round=None, state="done"),
    )
    states = {one["node"]: one["state"] for one in await every_item(reader, "nodes")}
    assert states == {"n1": "left", "n2": "joined"}
    assert (await get(reader, "nodes/n1"))["state"] == "left"
    assert [one["node"] for one in await every_item(reader, "nodes", state="joined")] == ["n2"]
    assert [one["node"] for one in await every_item(reader, "nodes", state="left")] == ["n1"]
    await api.add(make("allocation_started", job="over", round=None))
    assert (await get(reader, "nodes/n1"))["state"] == "joined", "another allocation goes on"
