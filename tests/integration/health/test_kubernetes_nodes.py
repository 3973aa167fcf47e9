"""The node watcher against an emulated API server, and health and rendezvous of a fake bus."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from everstep.clock import SystemClock
from everstep.messages import (
    ControlDocument,
    Done,
    DrainNode,
    ExcludeNode,
    Exclusion,
    IncludeNode,
    Message,
    NodeStanding,
    NodeStandings,
    Seat,
    ShowNodes,
)
from everstep.messages.codec import encode
from everstep.subjects import CLUSTER
from everstep_services.kubernetes.domain.nodes import CORDONED, TAINT
from everstep_services.kubernetes.service import NodeWatcher
from everstep_services.kubernetes.settings import KubernetesSettings
from tests.fakes.bus import MemoryBus, MemoryServer
from tests.fakes.kubernetes_api import TOKEN, EmulatedNodes, emulated_nodes
from tests.unit.rendezvous.documents import round_document
from tests.waiting import until_async

OURS = "kubernetes"


@dataclass
class Services:
    """Health and rendezvous: they note requests, and keep exclusions as health does."""

    bus: MemoryBus
    server: MemoryServer
    requests: list[Message] = field(default_factory=list)
    known: dict[str, NodeStanding] = field(default_factory=dict)
    exclusions: dict[str, Exclusion] = field(default_factory=dict)
    modes: dict[str, str] = field(default_factory=dict)
    is_braked: bool = False

    async def write(self) -> None:
        control = ControlDocument(
            settings={}, changed_by="x", reason="x", modes=self.modes, is_braked=self.is_braked,
            exclusions=tuple(self.exclusions.values()),
        )  # fmt: skip
        await self.bus.documents("CONTROL").put(CLUSTER, encode(control), revision=None)

    async def exclude(self, node: str, by: str = "health") -> None:
        self.exclusions[node] = Exclusion(node=node, by=by, reason="ECC errors", until=None)
        await self.write()

    async def include(self, node: str) -> None:
        del self.exclusions[node]
        await self.write()

    def knows(self, node: str, **standing: Any) -> None:
        values = {"state": "healthy", "silence_s": 0.5, **standing}
        self.known[node] = NodeStanding(node=node, **values)

    async def nodes(self, question: Message) -> Message:
        assert isinstance(question, ShowNodes)
        unknown = (NodeStanding(node=node, state="unknown") for node in question.nodes)
        return NodeStandings(nodes=tuple(self.known.get(each.node, each) for each in unknown))

    async def on_exclude(self, question: Message) -> Message:
        assert isinstance(question, ExcludeNode)
        self.requests.append(question)
        until = SystemClock().wall() + timedelta(seconds=question.ttl_s or 0)
        self.exclusions[question.node] = Exclusion(
            node=question.node, by=question.by, reason=question.reason, until=until
        )
        await self.write()
        return Done(text="excluded")

    async def on_include(self, question: Message) -> Message:
        assert isinstance(question, IncludeNode)
        self.requests.append(question)
        await self.include(question.node)
        return Done(text="included")

    async def on_drain(self, question: Message) -> Message:
        self.requests.append(question)
        return Done(text="it leaves")

    def asked(self, of: type[Message]) -> list[Any]:
        return [request for request in self.requests if isinstance(request, of)]


@dataclass
class World:
    cluster: EmulatedNodes
    services: Services
    start: Callable[..., Awaitable[NodeWatcher]]

    async def until(self, look: Callable[[], object], text: str) -> None:
        await until_async(look, text)

    def taints(self, name: str) -> list[str]:
        spec = self.cluster.nodes[name].get("spec", {})
        return [taint["key"] for taint in spec.get("taints") or []]


@asynccontextmanager
async def _running(watcher: NodeWatcher) -> AsyncIterator[None]:
    tasks = [asyncio.ensure_future(loop()) for loop in watcher.loops]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(end) for end in ends] == [asyncio.CancelledError] * len(tasks)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    token = tmp_path / "token"
    token.write_text(TOKEN)
    server = MemoryServer()
    bus = MemoryBus(server)
    services = Services(bus, server)
    async with AsyncExitStack() as stack:
        cluster = await stack.enter_async_context(emulated_nodes())
        handlers: dict[str, Any] = {
            "nodes": services.nodes,
            "exclude": services.on_exclude,
            "include": services.on_include,
        }
        await stack.enter_async_context(bus.answer("health", handlers))
        await stack.enter_async_context(bus.answer("rendezvous", {"drain": services.on_drain}))
        await services.write()

        async def start(**settings: Any) -> NodeWatcher:
            values: dict[str, Any] = {
                "api_url": cluster.url,
                "token_file": token,
                "look_every_s": 0.05,
                "retry_most_s": 0.1,
                **settings,
            }
            watcher = NodeWatcher(KubernetesSettings(**values), bus, SystemClock())
            await stack.enter_async_context(_running(watcher))
            await until_async(lambda: watcher.cache.is_current, "it has listed the nodes")
            return watcher

        yield World(cluster, services, start)


async def _train(world: World, job: str, *nodes: str, phase: str = "running") -> None:
    seats = tuple(Seat(node=node, slot=0, ranks=1, address=node) for node in nodes)
    made = replace(round_document(job, seats=0, name_characters=8), phase=phase, seats=seats)
    await world.services.bus.documents("ROUNDS").put(job, encode(made), revision=None)


async def test_a_cordoned_node_is_excluded_until_it_is_uncordoned(world: World) -> None:
    world.services.knows("n-1")
    await world.cluster.put("n.1")
    await world.start()
    await world.cluster.put("n.1", unschedulable=True)
    await world.until(lambda: world.services.asked(ExcludeNode), "it is excluded")
    (asked,) = world.services.asked(ExcludeNode)
    assert (asked.node, asked.by, asked.job, asked.ttl_s) == ("n-1", OURS, CLUSTER, 3600)
    assert asked.reason == "n.1 is cordoned in Kubernetes"
    assert not world.services.asked(DrainNode), "a cordon ends no round"
    await world.cluster.put("n.1", unschedulable=False)
    await world.until(lambda: world.services.asked(IncludeNode), "it is included")
    assert len(world.services.asked(ExcludeNode)) == 1


async def test_evidence_against_a_node_outlives_its_cordon(world: World) -> None:
    """An inclusion would drop the evidence; the exclusion ends with its time instead."""
    world.services.knows("n1", strikes=2)
    await world.cluster.put("n1", unschedulable=True)
    await world.start()
    await world.until(lambda: world.services.asked(ExcludeNode), "it is excluded")
    await world.cluster.put("n1", unschedulable=False)
    world.services.knows("n2")
    await world.cluster.put("n2", unschedulable=True)
    await world.until(lambda: len(world.services.asked(ExcludeNode)) == 2, "it has looked again")
    assert not world.services.asked(IncludeNode)


async def test_nodes_that_train_nothing_are_left_alone(world: World) -> None:
    await world.cluster.put("web-1", unschedulable=True)
    world.services.knows("n1")
    await world.cluster.put("n1", unschedulable=True)
    await world.start()
    await world.until(lambda: world.services.asked(ExcludeNode), "it has looked")
    assert [asked.node for asked in world.services.asked(ExcludeNode)] == ["n1"]


@pytest.mark.parametrize(
    "taint",
    [
        {"key": "ToBeDeletedByClusterAutoscaler", "effect": "NoSchedule"},
        {"key": "example.com/maintenance", "effect": "NoExecute", "value": "tonight"},
    ],
)
async def test_a_node_that_is_taken_away_is_drained_from_its_jobs(
    world: World, taint: dict[str, str]
) -> None:
    world.services.knows("n1")
    await _train(world, "llama", "n1", "n2")
    await _train(world, "other", "n2")
    await _train(world, "done", "n1", phase="done")
    await world.cluster.put("n1")
    watcher = await world.start(save_within_s=120)
    await world.cluster.put("n1", taints=[taint])
    await world.until(lambda: watcher.statistics()["drained_total"], "it is drained")
    (asked,) = world.services.asked(DrainNode)
    assert (asked.job, asked.node, asked.by, asked.within_s) == ("llama", "n1", OURS, 120)
    assert asked.reason == f"Kubernetes takes n1 away: taint {taint['key']}"
    assert [each.node for each in world.services.asked(ExcludeNode)] == ["n1"]


async def test_a_node_that_the_api_server_does_not_reach_is_left_to_health(world: World) -> None:
    world.services.knows("n1")
    world.services.knows("n2")
    unreachable = {"key": "node.kubernetes.io/unreachable", "effect": "NoExecute"}
    await world.cluster.put("n1", taints=[unreachable])
    await world.cluster.put("n2", unschedulable=True)
    await world.start()
    await world.until(lambda: world.services.asked(ExcludeNode), "it has looked")
    assert [asked.node for asked in world.services.asked(ExcludeNode)] == ["n2"]


async def test_conditions_count_where_they_are_named(world: World) -> None:
    for name in ("n1", "n2"):
        world.services.knows(name)
    bad = {"type": "GpuUnhealthy", "status": "True", "reason": "XID79"}
    await world.cluster.put("n1", conditions=[{**bad, "type": "Ready"}, bad])
    await world.cluster.put("n2", conditions=[{**bad, "status": "False"}])
    await world.start(conditions=("GpuUnhealthy",))
    await world.until(lambda: world.services.asked(ExcludeNode), "it is excluded")
    (asked,) = world.services.asked(ExcludeNode)
    assert asked.reason == "Kubernetes reports GpuUnhealthy (XID79) on n1"


async def test_by_default_no_node_is_marked(world: World, caplog: pytest.LogCaptureFixture) -> None:
    await world.cluster.put("n1")
    await world.services.exclude("n1")
    await world.start()
    await world.until(lambda: "node_would_be_marked" in caplog.text, "it is logged")
    assert world.cluster.patches == []
    assert not any(verb == "patch" for verb, _ in world.cluster.requests)


async def test_an_excluded_node_is_tainted_until_it_is_included(world: World) -> None:
    """Other taints stay; our own taint is not taken for a sign of the cluster."""
    world.services.knows("n1")
    theirs = {"key": "nvidia.com/gpu", "effect": "NoSchedule", "value": "present"}
    await world.cluster.put("n1", taints=[theirs])
    await world.start(marks="taint")
    await world.services.exclude("n1")
    await world.until(lambda: TAINT in world.taints("n1"), "it is tainted")
    assert world.cluster.nodes["n1"]["spec"]["taints"] == [
        theirs,
        {"key": TAINT, "effect": "NoSchedule"},
    ]
    await world.services.include("n1")
    await world.until(lambda: TAINT not in world.taints("n1"), "the taint is gone")
    assert world.cluster.nodes["n1"]["spec"]["taints"] == [theirs]
    assert world.services.requests == [], "no exclusion followed from our own mark"


async def test_our_cordon_is_no_reason_to_exclude_and_a_persons_cordon_stays(world: World) -> None:
    for name in ("n1", "n2"):
        world.services.knows(name, strikes=1)
        await world.cluster.put(name)
    await world.cluster.put("n2", unschedulable=True)
    watcher = await world.start(marks="cordon", on_cordon="ignore")
    await world.services.exclude("n1")
    await world.services.exclude("n2")
    await world.until(lambda: watcher.statistics()["marked_total"], "n1 is cordoned")
    n1 = world.cluster.nodes["n1"]
    assert n1["spec"]["unschedulable"] is True
    assert n1["metadata"]["annotations"] == {CORDONED: "health: ECC errors"}
    assert "annotations" not in world.cluster.nodes["n2"]["metadata"]
    await world.services.include("n1")
    await world.services.include("n2")
    await world.until(lambda: watcher.statistics()["unmarked_total"], "n1 is uncordoned")
    assert world.cluster.nodes["n1"]["spec"]["unschedulable"] is False
    assert world.cluster.nodes["n1"]["metadata"]["annotations"] == {}
    assert world.cluster.nodes["n2"]["spec"]["unschedulable"] is True
    assert world.services.requests == []


async def test_what_kubernetes_has_excluded_is_not_marked_in_kubernetes(world: World) -> None:
    world.services.knows("n1")
    await world.cluster.put("n1", unschedulable=True)
    await world.cluster.put("n2")
    await world.start(marks="taint")
    await world.until(lambda: world.services.asked(ExcludeNode), "it is excluded")
    await world.services.exclude("n2")
    await world.until(lambda: TAINT in world.taints("n2"), "the other is tainted")
    assert world.taints("n1") == []


@pytest.mark.parametrize("switch", ["brake", "observe"])
async def test_marks_respect_the_brake_and_the_mode(world: World, switch: str) -> None:
    """The brake freezes marks; while exclusions are only observed, there is nothing to mark."""
    for name in ("n1", "n2"):
        await world.cluster.put(name)
    watcher = await world.start(marks="taint")
    await world.services.exclude("n1")
    await world.until(lambda: TAINT in world.taints("n1"), "it is tainted")
    if switch == "brake":
        world.services.is_braked = True
    else:
        world.services.modes = {"exclude": "observe"}
    await world.services.exclude("n2")
    if switch == "observe":
        await world.until(lambda: TAINT not in world.taints("n1"), "the taint is gone")
        assert world.taints("n2") == []
        return
    await watcher.look()
    assert (world.taints("n1"), world.taints("n2")) == ([TAINT], [])


async def test_marks_have_a_limit(world: World, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(5):
        await world.cluster.put(f"n{number}")
        await world.services.exclude(f"n{number}")
    await world.start(marks="taint", marks_most=2)
    await world.until(lambda: "n4 is excluded and stays unmarked: 2 nodes" in caplog.text, "logged")
    await world.until(lambda: TAINT in world.taints("n1"), "two are tainted")
    assert [name for name in world.cluster.nodes if TAINT in world.taints(name)] == ["n0", "n1"]


async def test_a_conflict_is_decided_again_by_what_the_node_is_now(world: World) -> None:
    await world.cluster.put("n1")
    await world.start(marks="taint")
    world.cluster.conflicts = 3
    await world.services.exclude("n1")
    await world.until(lambda: TAINT in world.taints("n1"), "it is tainted")
    assert world.cluster.nodes["n1"]["metadata"]["labels"] == {"changed-by": "another-0"}


async def test_missing_rights_are_logged_once_and_the_rest_goes_on(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("n1", "n2"):
        world.services.knows(name)
        await world.cluster.put(name)
    world.cluster.rights.discard("patch")
    watcher = await world.start(marks="taint")
    await world.services.exclude("n1")
    await world.until(lambda: watcher.statistics()["failed_total"] >= 3, "it has tried again")
    await world.cluster.put("n2", unschedulable=True)
    await world.until(lambda: world.services.asked(ExcludeNode), "n2 is excluded nevertheless")
    lines = [r.getMessage() for r in caplog.records if "refuses it" in r.getMessage()]
    assert len(lines) == 1
    assert "cannot patch resource; see the ClusterRole in deploy/kubernetes" in lines[0]
    world.cluster.rights.add("patch")
    await world.until(lambda: TAINT in world.taints("n1"), "it works once the rights are there")


async def test_an_expired_version_lists_again_and_misses_nothing(world: World) -> None:
    world.services.knows("n1")
    await world.cluster.put("n1")
    watcher = await world.start()
    await world.until(lambda: ("watch", "/api/v1/nodes") in world.cluster.requests, "it watches")
    await world.cluster.forget()
    await world.cluster.put("n1", unschedulable=True)
    await world.until(lambda: world.services.asked(ExcludeNode), "the change is seen")
    assert watcher.statistics()["listed_total"] >= 2


async def test_a_bookmark_saves_a_list(world: World) -> None:
    """After a quiet time the version of a bookmark can still be watched."""
    world.services.knows("n1")
    await world.cluster.put("n1")
    watcher = await world.start()
    await world.until(lambda: ("watch", "/api/v1/nodes") in world.cluster.requests, "it watches")
    await world.cluster.bookmark()
    await world.until(lambda: watcher.cache.version == str(world.cluster.version), "it is read")
    world.cluster.forgotten = world.cluster.version
    await world.cluster.cut()
    await world.cluster.put("n1", unschedulable=True)
    await world.until(lambda: world.services.asked(ExcludeNode), "the change is seen")
    assert watcher.statistics()["listed_total"] == 1


async def test_an_api_server_that_is_away_is_logged_once_and_comes_back(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is decided by what was true before; Everstep goes on without it."""
    caplog.set_level(logging.INFO)
    world.services.knows("n1")
    await world.cluster.put("n1")
    watcher = await world.start()
    world.cluster.is_up = False
    await world.cluster.cut()
    await world.until(lambda: not watcher.cache.is_current, "it is away")
    refused = len(world.cluster.requests)
    await world.services.exclude("n1")
    await watcher.look()
    assert not world.services.requests
    world.cluster.is_up = True
    await world.cluster.put("n1", unschedulable=True)
    await world.until(lambda: watcher.cache.is_current, "it is back")
    assert len(world.cluster.requests) >= refused
    texts = [record.getMessage() for record in caplog.records]
    assert sum("api_server_away" in text for text in texts) == 1
    assert sum("api_server_back" in text for text in texts) == 1


async def test_a_wrong_token_is_one_line_and_a_new_one_is_read(
    world: World, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    token = tmp_path / "rotated"
    token.write_text("old")
    settings = KubernetesSettings(api_url=world.cluster.url, token_file=token, retry_most_s=0.1)
    watcher = NodeWatcher(settings, world.services.bus, SystemClock())
    async with _running(watcher):
        await world.until(lambda: "the API server refuses it: Unauthorized" in caplog.text, "said")
        token.write_text(TOKEN)
        await world.until(lambda: watcher.cache.is_current, "it reads the new token")


async def test_pages_of_a_large_cluster(world: World) -> None:
    world.cluster.page = 2
    for number in range(5):
        await world.cluster.put(f"n{number}")
    watcher = await world.start()
    assert len(watcher.cache.nodes) == 5


async def test_nodes_whose_ids_are_the_same_are_left_alone(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.services.knows("a-b")
    for name in ("a.b", "a-b"):
        await world.cluster.put(name, unschedulable=True)
    await world.start(marks="taint")
    await world.until(lambda: "have the same id in Everstep, a-b" in caplog.text, "it is logged")
    assert world.services.requests == []
    await world.cluster.remove("a.b")
    await world.until(lambda: world.services.asked(ExcludeNode), "it is excluded now")


async def test_the_bus_may_be_away(world: World) -> None:
    world.services.knows("n1")
    await world.cluster.put("n1")
    watcher = await world.start()
    await world.services.server.set_up(False)
    await world.cluster.put("n1", unschedulable=True)
    await world.until(lambda: watcher.cache.nodes["n1"].spec.unschedulable, "the node is seen")
    await world.services.server.set_up(True)
    await world.until(lambda: world.services.asked(ExcludeNode), "it is excluded")
