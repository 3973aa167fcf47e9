"""Agents are let in when we say so, whatever becomes of the server and of who tells it."""

import asyncio
import os
import signal
import subprocess
from pathlib import Path

import pytest

from everstep.bus import connect
from everstep.bus.admitting import Admission
from everstep.bus.devserver import DevServer
from everstep.bus.errors import BusUnreachableError
from everstep.bus.roles import user_for
from everstep.bus.serverconfig import admit
from everstep_services.cli.stack.admission import agent_login
from everstep_services.cli.state import Running, StateDir
from tests.waiting import until_async


def announced(nats: DevServer) -> Running:
    return Running(
        pid=1, version="1", api="", observe="", token_file="", bus=nats.url, bus_version="2",
        bus_pid=nats.pid, services=[],
    )  # fmt: skip


async def test_an_agent_can_log_in_once_it_was_granted(nats: DevServer, job: str) -> None:
    async with connect(await nats.grant(job), "agent"):
        pass


async def test_whom_the_server_was_never_told_of_it_is_told_of_now(
    nats: DevServer, tmp_path: Path, job: str
) -> None:
    """Whoever had written it was stopped before the signal."""
    folder, name = tmp_path / "own-nats" / "nats", user_for("agent", job).name
    await asyncio.to_thread(admit, folder / "nats.json", folder, name)
    state = StateDir(tmp_path / "own-nats")
    login = await asyncio.to_thread(agent_login, state, announced(nats), job)
    async with connect(login, "agent"):
        pass


async def test_a_server_that_was_started_again_lets_agents_in(
    nats: DevServer, tmp_path: Path, job: str
) -> None:
    running = announced(nats)
    os.kill(nats.pid, signal.SIGKILL)
    await until_async(lambda: nats.restarts, "it has been started again")
    state = StateDir(tmp_path / "own-nats")
    login = await asyncio.to_thread(agent_login, state, running, job)
    async with connect(login, "agent"):
        pass


async def test_nobody_is_let_into_a_server_that_was_stopped(nats: DevServer, job: str) -> None:
    await nats.stop()
    with pytest.raises(BusUnreachableError, match="it was stopped"):
        await nats.grant(job)


def test_another_process_with_the_pid_of_a_killed_server_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "nats.json").write_text("{}")
    with subprocess.Popen(["sleep", "1000000"]) as stranger:
        (tmp_path / f"nats-server_{stranger.pid}.ports").touch()
        try:
            nobody = Admission(tmp_path, "nats://127.0.0.1:1", user_for("agent", "j").name)
            assert not nobody.is_let_in()
        finally:
            stranger.terminate()  # a SIGHUP from before would be what it died of
    assert stranger.returncode == -signal.SIGTERM
