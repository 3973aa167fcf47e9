"""The real bus and history: who is slow is asked of straggler, and what was found is on record."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest

from everstep import subjects
from everstep.bus import connect
from everstep.bus.auth.roles import ADMIN, SERVICE
from everstep.bus.ports import Bus
from everstep.bus.server.dev_server import DevServer
from everstep.messages import Fact
from everstep_services.cli.__main__ import main
from everstep_services.cli.errors import Exit
from everstep_services.straggler.domain.job import JobJudge
from tests.integration.history.test_rest_operators import history
from tests.integration.history.test_rest_stragglers import OWN
from tests.integration.straggler.replicas import at_work, judged
from tests.unit.history.facts import make
from tests.unit.straggler.windows import Delay, Simulation, Training
from tests.waiting import until_async


@dataclass
class Stack:
    """History at work, a login of straggler's, and a job with a rank that was found slow."""

    job: str
    client: httpx2.AsyncClient
    agents: Bus
    straggler: Bus
    found: Fact
    token: Path
    capsys: pytest.CaptureFixture[str]

    async def command(self, *words: str) -> tuple[int, str, str]:
        """`everstep stragglers JOB` with these words: its exit code, and what it prints."""
        api = ["--api", str(self.client.base_url).removesuffix("/api/v1/")]
        said = ["stragglers", self.job, *words, *api, "--token-file", str(self.token)]
        code = await asyncio.to_thread(main, said)
        out, err = self.capsys.readouterr()
        return code, out, err

    async def findings(self) -> list[Any]:
        """On record; none while the job is not known yet."""
        answer = await self.client.get(f"jobs/{self.job}/stragglers")
        items: list[Any] = answer.json()["items"] if answer.status_code == 200 else []
        return items


@pytest.fixture
async def stack(
    shared_nats: DevServer,
    sqlite_url: str,
    job: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> AsyncIterator[Stack]:
    service, token = shared_nats.settings(SERVICE), tmp_path / "token"
    async with AsyncExitStack() as opened:
        enter = opened.enter_async_context
        agents = await enter(connect(shared_nats.settings(ADMIN), "agents", spool=tmp_path / "a"))
        ours = await enter(connect(service, "straggler", spool=tmp_path / "s"))
        client = await enter(history(service, sqlite_url, token))
        found = make("straggler_found", job=job, round=1, rank=3, node="n2", scores=(OWN,))
        await agents.record(make("round_formed", job=job, round=1))
        await ours.record(found)
        running = Stack(job, client, agents, ours, found, token, capsys)
        await until_async(running.findings, "the finding is on record")
        yield running


async def test_what_was_found_is_on_record_until_it_is_cleared(stack: Stack) -> None:
    """The finding and its end each come once, with what the job lost (A6.1)."""
    (shown,) = await stack.findings()
    assert (shown["rank"], shown["node"], shown["state"]) == (3, "n2", "open")
    cleared = make("straggler_cleared", job=stack.job, round=1, finding=stack.found.id, lost_s=2.5)
    await stack.straggler.record(cleared)
    await until_async(
        stack.findings, "it keeps up again", holds=lambda items: items[0]["state"] == "cleared"
    )
    code, out, _ = await stack.command("--history")
    assert (code, out.split("\t")[3], out.split("\t")[7]) == (0, "cleared", "2.5 s")


async def test_while_straggler_is_away_one_line_says_so(stack: Stack) -> None:
    code, out, err = await stack.command()
    assert (code, out, err.count("\n")) == (Exit.UNREACHABLE, "", 1)
    assert err.startswith("everstep: straggler cannot be asked: ")


async def test_a_rank_that_loads_slowly_is_named_by_the_service_and_cleared(stack: Stack) -> None:
    """What nodes send is judged, and people see rank, cause and price, live and later (A6.1)."""
    plan = Training(job=stack.job, round=2, delays=(Delay(5, 0.03, "data", last=6 * 16),))
    training = Simulation(plan)

    def send(windows: int) -> None:
        for _ in range(windows):
            for timings in training.window():
                stack.agents.send(subjects.timing(stack.job, timings.node), timings)

    def newest(state: str) -> Callable[[Any], bool]:
        return lambda items: (items[0]["rank"], items[0]["state"]) == (5, state)

    async with at_work(stack.straggler, make_judge=JobJudge):
        send(6)
        found = await until_async(stack.findings, "rank 5 is found", holds=newest("open"))
        assert (found[0]["cause"], found[0]["section"]) == ("input", "data")
        await judged(stack.straggler, stack.job, 6 * 16)
        assert found[0]["slowdown_ratio"] == pytest.approx(0.3, rel=0.2)

        code, out, err = await stack.command()
        first, *others = (line.split("\t") for line in out.splitlines())
        assert (code, len(others), first[0], first[7]) == (0, 7, "5", "input (data)")
        assert "without it the job would be" in err
        code, out, _ = await stack.command("--timings", "-o", "json")
        table = json.loads(out)
        assert (code, len(table["windows"]), len(table["rows"])) == (0, 6, 8)
        code, out, _ = await stack.command("--section", "data", "-o", "json")
        data = {one["rank"]: one["values"][-1] for one in json.loads(out)["rows"]}
        assert max(data, key=lambda rank: data[rank]) == 5

        send(12)
        await until_async(stack.findings, "it keeps up again", holds=newest("cleared"))
    code, out, _ = await stack.command("--history", "--rank", "5")
    assert (code, [line.split("\t")[3] for line in out.splitlines()]) == (0, ["cleared"])
