"""Services and agents on a cluster of servers; each begins at a server that the test chooses."""

import asyncio
import signal
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from tests.cluster.servers import Cluster
from tests.e2e.ports import free_port
from tests.e2e.processes import Process, environment, kill_all, python
from tests.waiting import until

SERVICES = ("rendezvous", "health", "attribution")
"""With a replica at each of two servers; history, with SQLite, has one."""


class Services:
    """Use `services_of`. The control plane of `tests.e2e.cluster.Cluster`, with one server more."""

    def __init__(self, cluster: Cluster, folder: Path, **settings: str) -> None:
        self.cluster = cluster
        self.agents_at = "a"
        """The server at which the next agent begins."""
        self._folder = folder
        self._settings = settings
        self._api_port = free_port()
        self._ports: dict[str, int] = {}
        self.processes: dict[str, Process] = {}

    @property
    def api(self) -> str:
        return f"http://127.0.0.1:{self._api_port}"

    @property
    def token(self) -> str:
        return (self._folder / "token").read_text().strip()

    @property
    def observed(self) -> list[str]:
        """Where the metrics of each replica are."""
        return [f"127.0.0.1:{port}" for port in self._ports.values()]

    def login(self, job: str) -> dict[str, str]:
        return self._bus(asyncio.run(self.cluster.grant(job)).credentials_file, self.agents_at)

    def _bus(self, login: Path | None, at: str) -> dict[str, str]:
        """A client that knows one server learns the others from it."""
        return {
            "EVERSTEP_BUS__URL": self.cluster.servers[at].url,
            "EVERSTEP_BUS__CREDENTIALS_FILE": str(login),
            "EVERSTEP_BUS__CA_FILE": str(self.cluster.settings("service").ca_file),
            "EVERSTEP_BUS__REPLICAS": "3",
            "EVERSTEP_BUS__RECONNECT_WAIT_S": "0.1",
            "EVERSTEP_BUS__RECONNECT_JITTER_S": "0.1",
        }

    def start(self, history_at: str, replicas_at: tuple[str, str]) -> None:
        """Start all of it, and wait until it is ready."""
        self._start("history", history_at)
        for service in SERVICES:
            for server in replicas_at:
                self._start(service, server)
        self.until_well()

    def until_well(self) -> None:
        for name, port in self._ports.items():
            until(partial(_is_well, port), f"{name} is ready")

    def restart(self, name: str) -> None:
        """End a replica in order, as a rolling upgrade does, and start it again."""
        self.processes[name].terminate()
        self._start(*name.split("-"))
        self.until_well()

    def heal(self) -> None:
        """Let those go on that were stopped, start those that were killed."""
        for name, process in list(self.processes.items()):
            if process.poll() is None:
                process.send(signal.SIGCONT)
            else:
                self._start(*name.split("-"))
        self.until_well()

    def _start(self, service: str, at: str) -> None:
        name = f"{service}-{at}"
        self._ports.setdefault(name, free_port())
        more = {
            **self._bus(self.cluster.settings("service").credentials_file, at),
            "EVERSTEP_BUS__SPOOL_DIR": str(self._folder / "spool" / name),
            "EVERSTEP_HISTORY__DATABASE_URL": f"sqlite:///{self._folder / 'history.db'}",
            "EVERSTEP_API__PORT": str(self._api_port),
            "EVERSTEP_API__FIRST_TOKEN_FILE": str(self._folder / "token"),
            "EVERSTEP_OBSERVE__PORT": str(self._ports[name]),
        }
        environ = environment(self._folder, f"services-{self._folder.name}", **self._settings)
        command = python("-m", f"everstep_services.{service}")
        self.processes[name] = Process(
            command, {**environ, **more}, self._folder / f"{name}.log", self._folder
        )

    def stop(self) -> None:
        kill_all([it.pid for it in self.processes.values() if it.poll() is None])
        for process in self.processes.values():
            process.kill()


def _is_well(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=10):
            return True
    except OSError:
        return False


@contextmanager
def services_of(cluster: Cluster, folder: Path, **settings: str) -> Iterator[Services]:
    services = Services(cluster, folder, **settings)
    try:
        yield services
    finally:
        services.stop()
