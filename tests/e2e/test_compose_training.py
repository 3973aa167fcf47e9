"""The toy training of compose.yaml: it comes back from a lost node, and needs no bus to go on."""

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from tests.e2e.compose_cluster import (
    AGENTS,
    NEEDS_CLUSTER,
    call,
    compose,
    in_container,
    inspect,
    opened_api,
    opened_pages,
)
from tests.waiting import until

CHECKPOINT = "/var/lib/training/latest.pt"
WITHIN_S = 120.0  # a container starts anew, and imports torch, on a machine that has much to do

pytestmark = NEEDS_CLUSTER


@pytest.fixture
def api() -> Iterator[httpx2.Client]:
    with opened_api() as client:
        yield client


def told(api: httpx2.Client, path: str) -> Any:
    answer = api.get(path)
    answer.raise_for_status()
    return answer.json()


def last_round(api: httpx2.Client) -> dict[str, Any]:
    last: dict[str, Any] = told(api, "/jobs/toy/rounds?limit=1")["items"][0]
    return last


def trained_round(api: httpx2.Client, after: int = 0) -> int:
    """The number of the running round, later than `after`, once it has made its first step."""

    def look() -> int | None:
        last = last_round(api)
        is_so = last["state"] == "running" and last["first_step_at"] and last["round"] > after
        return int(last["round"]) if is_so else None

    return until(look, f"the first step of a round after {after}", within_s=WITHIN_S)


def saved_at() -> str:
    """When the training has saved last; it does so every 20 steps."""
    return in_container("agent-1", "stat", "--format=%.9Y", CHECKPOINT)


def saved_after(moment: str) -> str:
    return until(saved_at, "a checkpoint", holds=lambda seen: seen != moment, within_s=WITHIN_S)


def began_at() -> int:
    """The step from which the training went on at its last start, as its rank 0 says."""
    logged = compose("logs", "--no-color", *AGENTS).splitlines()
    return int([line for line in logged if "going on from step" in line][-1].split()[-1])


def times_back(agent: str) -> int:
    return compose("logs", "--no-color", agent).count("the bus is back")


def test_two_nodes_train(api: httpx2.Client) -> None:
    number = trained_round(api)
    assert told(api, "/jobs/toy")["state"] == "running"
    members = told(api, f"/jobs/toy/rounds/{number}/members")["items"]
    assert {member["node"] for member in members} == AGENTS


def test_a_lost_node_comes_back_and_the_training_goes_on(api: httpx2.Client) -> None:
    before = trained_round(api)
    saved_after("")
    started = inspect("agent-2")["RestartCount"]
    call("docker", "exec", inspect("agent-2")["Id"], "sh", "-c", "kill -9 -1")
    after = trained_round(api, before)
    assert inspect("agent-2")["RestartCount"] == started + 1
    members = told(api, f"/jobs/toy/rounds/{after}/members")["items"]
    assert {member["node"] for member in members} == AGENTS
    (incident,) = (
        one for one in told(api, "/jobs/toy/incidents")["items"] if one["round"] == before
    )
    assert (incident["outcome"], incident["next_round"]) == ("recovered", after)
    assert began_at() > 0


KILL_THE_RANK = """
import os, pathlib, signal
for entry in pathlib.Path("/proc").glob("[0-9]*"):
    program, *arguments = (entry / "cmdline").read_bytes().split(b"\\0")
    if arguments[:2] == [b"-m", b"everstep_services.cli.demonstration.train"]:
        os.kill(int(entry.name), signal.SIGKILL)
"""


def test_a_killed_rank_has_a_verdict_in_rest_and_on_its_page(api: httpx2.Client) -> None:
    """The injected failure is in REST with its verdict, and on the pages (A1.2)."""
    before = trained_round(api)
    in_container("agent-2", "python", "-c", KILL_THE_RANK)
    trained_round(api, before)
    (incident,) = (
        one for one in told(api, "/jobs/toy/incidents")["items"] if one["round"] == before
    )
    verdict = until(
        lambda: told(api, f"/incidents/{incident['incident']}")["verdict"],
        "a verdict",
        within_s=WITHIN_S,
    )
    assert incident["node"] == "agent-2"
    assert verdict["culprit_ranks"] == [incident["rank"]]
    with opened_pages() as pages:
        assert incident["incident"] in pages.get("/jobs/toy").text
        page = pages.get(f"/incidents/{incident['incident']}").text
    assert "SIGKILL" in page
    assert "agent-2" in page


def test_the_training_goes_on_without_the_bus(api: httpx2.Client) -> None:
    """NATS is killed: the round goes on, and both agents reconnect (A14.1)."""
    before = trained_round(api)
    were_back = {agent: times_back(agent) for agent in AGENTS}
    container = inspect("nats")["Id"]
    call("docker", "kill", container)
    try:
        saved_after(saved_after(saved_at()))
    finally:
        call("docker", "start", container)
    until(
        lambda: all(times_back(agent) > were for agent, were in were_back.items()),
        "both agents are on the bus again",
        within_s=WITHIN_S,
    )
    saved_after(saved_after(saved_at()))
    assert last_round(api)["round"] == before
    assert last_round(api)["state"] == "running"


SAVE = """
import torch
from trainer_sdk.checkpoint import Checkpointer
saves = Checkpointer("/var/lib/training/ckpt", job="toy")
saves.save(7, {"weight": torch.ones(1000)}, wait=True)
saves.close()
"""


def test_the_catalog_reads_back_what_was_saved_on_a_node() -> None:
    in_container("agent-1", "python", "-c", SAVE)
    scan = ("ckpt", "scan", "toy", "--root", "/var/lib/training/ckpt")
    assert "1 checkpoints of toy, 1 of them new" in in_container("history", "everstep", *scan)

    def state() -> str:
        found = json.loads(in_container("history", "everstep", "ckpt", "ls", "toy", "-o", "json"))
        (one,) = found["items"]
        return f"{one['step']} {one['is_verified']}"

    until(state, "it is read back", holds=lambda seen: seen == "7 True", within_s=WITHIN_S)
