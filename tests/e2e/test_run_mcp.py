"""Changes by a real MCP client, from the call of a tool to the node that leaves its job.

Acceptance: A11.1 (who did what, and why) for what an assistant does.
"""

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.e2e.cluster import Cluster
from tests.e2e.operators import command, operator
from tests.e2e.processes import environment
from tests.waiting import until

pytest.importorskip("mcp")
from mcp import Client, StdioServerParameters
from mcp.client.stdio import stdio_client
from mcp.client.streamable_http import streamable_http_client

_REQUEST_S = 120
_DATA = re.compile(
    r"===== BEGIN (UNTRUSTED DATA \w{16}) =====\n(.*)\n===== END \1 =====", re.DOTALL
)


def token_file(cluster: Cluster, name: str, scope: str) -> Path:
    """A token, made as the guide says."""
    environ = operator(cluster.plane, cluster.folder)
    words = ("token", "create", name, "--scope", scope, "--expires", "1d")
    made = command(environ, *words, "--api", cluster.plane.api)
    assert made.returncode == 0, made.stderr
    path = cluster.folder / f"{name}.token"
    path.touch(0o600)
    path.write_text(made.stdout)
    return path


def server(cluster: Cluster, *words: str) -> list[str]:
    return ["-m", "everstep_services.cli", "mcp", "--api", cluster.plane.api, *words]


def environ_of_server(cluster: Cluster) -> dict[str, str]:
    state = str(cluster.folder / "nothing-here")
    return environment(cluster.folder, cluster.tag, EVERSTEP_STATE_DIR=state)


def calls(opened: AbstractAsyncContextManager[Client], *wanted: tuple[str, Any]) -> list[Any]:
    """The answers to some calls of tools by one client; with no call, its tools."""

    async def main() -> list[Any]:
        async with opened as client:
            if not wanted:
                return list((await client.list_tools()).tools)
            return [await client.call_tool(name, arguments) for name, arguments in wanted]

    return asyncio.run(main())


def by_stdio(cluster: Cluster, token: Path) -> Client:
    words = server(cluster, "--token-file", str(token), "--allow-changes")
    environ = environ_of_server(cluster)
    return Client(
        stdio_client(StdioServerParameters(command=sys.executable, args=words, env=environ))
    )


@pytest.fixture
def url(cluster: Cluster) -> Iterator[str]:
    """The address of `everstep mcp --http --allow-changes`, which has no token of its own."""
    words = server(cluster, "--http", "--port", "0", "--allow-changes")
    with subprocess.Popen(
        [sys.executable, *words], env=environ_of_server(cluster), stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        try:
            yield process.stderr.readline().split()[-1]
        finally:
            process.terminate()
            process.stderr.read()


@asynccontextmanager
async def by_http(url: str, token: str) -> AsyncIterator[Client]:
    headers = {"Authorization": f"Bearer {token}"}
    async with (
        httpx2.AsyncClient(headers=headers, timeout=_REQUEST_S, trust_env=False) as http,
        Client(streamable_http_client(url, http_client=http)) as client,
    ):
        yield client


def text(answer: Any) -> str:
    return "\n".join(part.text for part in answer.content)


def data(answer: Any) -> Any:
    """What stands between the marks, after the sentence that something was decided."""
    assert not answer.is_error, text(answer)
    assert text(answer).startswith("Decided: ")
    found = _DATA.search(text(answer))
    assert found is not None, text(answer)
    return json.loads(found[2])


def node(cluster: Cluster, name: str) -> dict[str, Any]:
    return dict(cluster.api.get(f"nodes/{name}"))


def acts(cluster: Cluster, name: str) -> list[tuple[str, str, str]]:
    """What was done about a node, by whom and why, as REST has it for auditors."""
    facts = cluster.api.pages("facts", {"kind": "operator_acted"}, most=None)
    bodies = [fact["body"] for fact in facts]
    return [(body["action"], body["by"], body["reason"]) for body in bodies
            if name in json.dumps(body)]  # fmt: skip


def test_an_assistant_drains_a_node_and_the_training_goes_on_without_it(cluster: Cluster) -> None:
    """By stdio: the tool is offered as destructive, and the record shows whose token it was."""
    options = ("--nnodes", "2", "--spares", "1", "--nproc-per-node", "1")
    # Names of their own: a node that takes part in several jobs cannot be drained without a job.
    first, second, spare = (f"{cluster.job}-{number}" for number in (1, 2, 3))
    for name in (first, second):
        cluster.steady(*options, node=name)
    cluster.until_stepping(1)
    cluster.steady(*options, node=spare)
    cluster.until_fact("node_joined", lambda body: body["node"] == spare)
    leaving = cluster.members(1)[1]
    token = token_file(cluster, f"assistant-{cluster.job}", "operate")
    tools = {tool.name: tool for tool in calls(by_stdio(cluster, token))}
    assert tools["drain_node"].annotations.destructive_hint, "so that assistants ask a person first"
    drained, refused = calls(
        by_stdio(cluster, token),
        ("drain_node", {"node": leaving, "reason": "its fan is loud"}),
        ("drain_node", {"node": f"{leaving}x", "reason": "typo"}),
    )
    assert (data(drained)["job"], data(drained)["node"]) == (cluster.job, leaving)
    assert refused.is_error
    assert "\n" not in text(refused)
    cluster.until_stepping(2)
    assert cluster.members(2) == {**cluster.members(1), 1: spare}
    assert next(agent for agent in cluster.agents if agent.node == leaving).wait() == 0
    act = cluster.until_fact("operator_acted")
    assert (act["action"], act["reason"], act["origin"]) == (
        "drain_node",
        "its fan is loud",
        "rest",
    )
    assert f"assistant-{cluster.job}" in act["by"], "the token"
    assert "by MCP" in act["by"], "and the way"
    cluster.finish()
    cluster.until_done()


def test_over_http_the_scope_of_the_caller_decides(cluster: Cluster, url: str) -> None:
    """The same server excludes a node for one caller and refuses another; REST shows the first."""
    name = f"{cluster.job}-1"
    cluster.steady("--nproc-per-node", "1", node=name)
    cluster.until_stepping(1)
    reader, owner = (
        token_file(cluster, f"{user}-{cluster.job}", scope).read_text().strip()
        for user, scope in (("reader", "read"), ("ops", "operate"))
    )
    arguments = {"node": name, "reason": "ECC errors", "hours": 2}
    (refused,) = calls(by_http(url, reader), ("exclude_node", arguments))
    assert refused.is_error
    assert "this needs a token with the scope operate; yours has read" in text(refused)
    assert not acts(cluster, name), "nothing was done"

    unknown, excluded = calls(
        by_http(url, owner),
        ("exclude_node", {**arguments, "node": f"{name}x"}),
        ("exclude_node", arguments),
    )
    assert unknown.is_error, "an assistant may have misread the name"
    assert f"{name}x" in text(unknown)
    assert data(excluded)["text"].startswith(f"{name} joins no round for 7200 s")
    until(lambda: node(cluster, name)["is_excluded"], "REST shows the exclusion")
    shown, included = calls(
        by_http(url, owner),
        ("get_node", {"node": name}),
        ("include_node", {"node": name, "reason": "replaced"}),
    )
    assert "ECC errors" in text(shown)
    assert data(included)["text"]
    until(lambda: not node(cluster, name)["is_excluded"], "it may join again")
    until(lambda: len(acts(cluster, name)) == 2, "both are on record")
    (exclude, by, reason), (include, _, _) = acts(cluster, name)
    assert (exclude, include, reason) == ("exclude_node", "include_node", "ECC errors")
    assert f"ops-{cluster.job}" in by
    cluster.finish()
    cluster.until_done()
    assert [body["round"] for body in cluster.facts("round_formed")] == [1], "its round went on"
