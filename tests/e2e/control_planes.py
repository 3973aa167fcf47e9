"""Bus and services for the agents of tests: in one process as people start them, or in five."""

import asyncio
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from everstep.bus import BusSettings
from everstep.bus.auth.accounts import Operator
from everstep.bus.auth.job_access import agents_login, login_file
from everstep.bus.auth.roles import ADMIN, SERVICE
from everstep.bus.server.config import ServerPlan, write_config
from everstep.bus.server.dev_server import find_program
from everstep_services.cli.machine.state import RunningServices, StateDir
from everstep_services.cli.stack.admission import agent_login
from tests.e2e.ports import free_port
from tests.e2e.processes import Process, environment, kill_all, python
from tests.waiting import WITHIN_S, until

PATIENT = {
    "EVERSTEP_HEALTH__SILENCE_LIMIT_S": "60",
    "EVERSTEP_HEALTH__HAILED_LIMIT_S": "60",
    "EVERSTEP_HEALTH__ALL_SILENT_LIMIT_S": "60",
    "EVERSTEP_API__ANSWER_WITHIN_S": "60",
}
"""For tests in which no node may be lost because its machine gave it no turn for a while.

That a node was killed is found all the same: by those who wait for it, and by a closed connection.
"""


class ControlPlane(Protocol):
    """What agents, and those who watch them, need to know of it."""

    @property
    def api(self) -> str:
        """Where REST is."""

    @property
    def token(self) -> str:
        """What REST asks for."""

    def login(self, job: str) -> dict[str, str]:
        """The environment with which an agent of a job finds it."""


class Up:
    """`everstep up`."""

    def __init__(self, folder: Path, **settings: str) -> None:
        self.folder = folder
        self.state = StateDir(folder / "state")
        self._environ = environment(folder, f"up-{folder.name}", **settings)
        self.process: Process | None = None

    @property
    def running(self) -> RunningServices:
        running = self.state.running()
        assert running is not None, "everstep up is not ready"
        return running

    @property
    def api(self) -> str:
        return self.running.api

    @property
    def token(self) -> str:
        return self.state.token_file.read_text().strip()

    def login(self, job: str) -> dict[str, str]:
        found = agent_login(self.state, self.running, job)
        assert found.credentials_file is not None
        return _bus(found.url, found.credentials_file)

    def start(self) -> None:
        """Start it, and wait until it is ready."""
        command = python("-m", "everstep_services.cli", "up", "--port", "0")
        environ = {**self._environ, "EVERSTEP_STATE_DIR": str(self.state.path)}
        self.process = Process(command, environ, self.folder / "up.log")
        until(self.state.running, "everstep up is ready")

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()


SERVICES = ("rendezvous", "history", "health", "catalog", "straggler")
ALL = ("nats", *SERVICES)


@contextmanager
def running_up(folder: Path, **settings: str) -> Iterator[Up]:
    """One from its start to its end."""
    up = Up(folder, **settings)
    try:
        up.start()
        yield up
    finally:
        up.stop()


class Pieces:
    """A server and five services, each a process of its own, to be killed and started again."""

    def __init__(self, folder: Path, host: str = "127.0.0.1", **settings: str) -> None:
        self.folder = folder
        self._host = host
        self._bus = folder / "nats"
        self.store = self._bus / "store"
        self._port, self._api_port = free_port(), free_port()
        self._settings = settings
        self.processes: dict[str, Process] = {}

    @property
    def api(self) -> str:
        return f"http://127.0.0.1:{self._api_port}"

    @property
    def token(self) -> str:
        return (self.folder / "token").read_text().strip()

    def login(self, job: str) -> dict[str, str]:
        operator, address = Operator.opened(self._bus), BusSettings(url=self._url)
        found = asyncio.run(agents_login(self._bus, operator, address, job))
        assert found.credentials_file is not None
        return _bus(self._url, found.credentials_file)

    def start(self, within_s: float = WITHIN_S) -> None:
        """Start all of it, and wait until it is ready."""
        operator = Operator.made(self._bus)
        for role in (ADMIN, SERVICE):
            login_file(self._bus, operator, role)
        plan = ServerPlan(store=self.store, host=self._host, port=self._port, log_folder=self._bus)
        write_config(self._bus / "nats.json", plan, operator)
        for name in ALL:
            self.revive(name)
        until((self.folder / "token").exists, "history has made its token", within_s=within_s)

    def revive(self, name: str) -> None:
        """Start one that is not running."""
        before = self.processes.get(name)
        assert before is None or before.poll() is not None
        log = self.folder / f"{name}.log"
        environ = environment(self.folder, f"pieces-{self.folder.name}", **self._settings)
        if name == "nats":
            command = [find_program(), "-c", str(self._bus / "nats.json")]
            self.processes[name] = Process(command, environ, log)
            until(lambda: _answers(self._host, self._port), "nats-server listens")
            return
        more = {
            **self._as(SERVICE),
            "EVERSTEP_BUS__SPOOL_DIR": str(self.folder / "spool" / name),
            "EVERSTEP_HISTORY__DATABASE_URL": f"sqlite:///{self.folder / 'history.db'}",
            "EVERSTEP_HISTORY__LEASE_TTL_S": "2",
            "EVERSTEP_HISTORY__FETCH_WITHIN_S": "0.5",
            "EVERSTEP_HISTORY__RETRY_MOST_S": "0.5",
            "EVERSTEP_API__PORT": str(self._api_port),
            "EVERSTEP_API__FIRST_TOKEN_FILE": str(self.folder / "token"),
            "EVERSTEP_OBSERVE__PORT": "0",
        }
        command = python("-m", f"everstep_services.{name}")
        self.processes[name] = Process(command, {**environ, **more, **self._settings}, log)

    def kill(self, *names: str) -> None:
        for name in names:
            self.processes[name].kill()

    def become(self, **settings: str) -> None:
        """What is started from now on has these variables, too."""
        self._settings |= settings

    def restart(self, *names: str) -> None:
        self.kill(*names)
        for name in names:
            self.revive(name)

    def stop(self) -> None:
        """End them, the server last: services say their last to it."""
        kill_all([one.pid for one in self.processes.values() if one.poll() is None])
        for process in self.processes.values():
            process.kill()

    def login_file(self, role: str) -> Path:
        return self._bus / f"{role}.creds"

    @property
    def _url(self) -> str:
        return f"nats://{self._host}:{self._port}"

    def _as(self, role: str) -> dict[str, str]:
        return _bus(self._url, self.login_file(role))


def _bus(url: str, login: Path) -> dict[str, str]:
    return {
        "EVERSTEP_BUS__URL": url,
        "EVERSTEP_BUS__CREDENTIALS_FILE": str(login),
        "EVERSTEP_BUS__RECONNECT_WAIT_S": "0.1",
        "EVERSTEP_BUS__RECONNECT_JITTER_S": "0.1",
    }


def _answers(host: str, port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((host, port)) == os.EX_OK
