"""Three real nats-servers with JetStream and TLS on loopback, to kill, stop and cut apart."""

import asyncio
import os
import shutil
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import trustme

from everstep.bus import BusSettings, connect, topology
from everstep.bus.auth.accounts import Operator
from everstep.bus.auth.job_access import admit, login_file
from everstep.bus.auth.roles import ADMIN, SERVICE, agents_name
from everstep.bus.errors import BusError
from everstep.bus.server.config import Peers, ServerPlan, ServerTls, write_config
from everstep.bus.server.dev_server import find_program
from tests.cluster.links import Link, LinkLoop
from tests.e2e.ports import free_port
from tests.stopping import stop
from tests.waiting import WITHIN_S, until, until_async

NAMES = ("a", "b", "c")
_ROUTES = 8
"""Of one server: three of its pool, and one of the system account, to each of the two others."""


class Server:
    """One of the three."""

    def __init__(self, folder: Path, plan: ServerPlan, front: Link) -> None:
        self.name = plan.name
        self.front = front
        """What its clients connect to."""
        self._folder = folder
        self._plan = plan
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"tls://{self.front.address}"

    def start(self) -> None:
        command = [find_program(), "-c", str(self._folder / "nats.json")]
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def kill(self) -> None:
        self._signal(signal.SIGKILL)
        assert self._process is not None
        self._process.wait()

    def stop(self) -> None:
        """Stop it as SIGSTOP does: it answers nobody, and closes nothing."""
        stop(self.pid)

    def go_on(self) -> None:
        """Start it if it was killed, and let it go on if it was stopped."""
        assert self._process is not None
        if self._process.poll() is None:
            self._signal(signal.SIGCONT)
        else:
            self.start()

    def restart(self) -> None:
        """End it in order, as a rolling upgrade does, and start it again."""
        self._signal(signal.SIGTERM)
        assert self._process is not None
        self._process.wait(WITHIN_S)
        self.start()

    def lose_disk(self) -> None:
        """Kill it, and remove all that it had stored."""
        self.kill()
        shutil.rmtree(self._plan.store)

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def monitored(self, page: str) -> dict[str, Any]:
        """A page of its monitoring; empty while it does not answer."""
        try:
            with urllib.request.urlopen(f"http://{self._plan.monitor}/{page}", timeout=5) as answer:
                found: dict[str, Any] = msgspec.json.decode(answer.read())
                return found
        except OSError:
            return {}


class Cluster:
    """Use `cluster_of_three`. Servers reach each other, and clients reach servers, by links."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.operator = Operator.made(folder / "keys")
        for name in (ADMIN, SERVICE):
            login_file(folder / "keys", self.operator, name)
        self.loop = LinkLoop()
        self.authority = trustme.CA()
        self.authority.cert_pem.write_to_path(folder / "ca.pem")
        clients = {name: free_port() for name in NAMES}
        routes = {name: free_port() for name in NAMES}
        self.routes = {
            (source, target): self.loop.link(routes[target])
            for source, target in zip(NAMES, NAMES[1:] + NAMES[:1], strict=True)
        }
        """Between each two servers, in a ring: from the one that opens the connection."""
        self.servers = {name: self._made(name, clients[name], routes[name]) for name in NAMES}

    def _made(self, name: str, port: int, route_port: int) -> Server:
        folder = self._folder / name
        folder.mkdir()
        front = self.loop.link(port)
        peers = Peers(
            f"127.0.0.1:{route_port}",
            # One of two servers opens their routes: where both do, routes come and go for a second.
            [link.address for (source, _), link in self.routes.items() if source == name],
            self.operator.password_of_routes,
            advertise="127.0.0.1:1",  # no server opens a route that no link of ours cuts
        )
        plan = ServerPlan(
            folder / "store", name, port=port, log_folder=folder, tls=self._issued(folder),
            monitor=f"127.0.0.1:{free_port()}", peers=peers, advertise=front.address,
        )  # fmt: skip
        write_config(folder / "nats.json", plan, self.operator)
        return Server(folder, plan, front)

    def _issued(self, folder: Path) -> ServerTls:
        issued = self.authority.issue_cert("127.0.0.1")
        issued.private_key_pem.write_to_path(folder / "server.key")
        for pem in issued.cert_chain_pems:
            pem.write_to_path(folder / "server.pem", append=True)
        return ServerTls(folder / "server.pem", folder / "server.key", self._folder / "ca.pem")

    def settings(self, role: str, *names: str, **changed: Any) -> BusSettings:
        """How a role logs in, at these servers or at all."""
        found = BusSettings(
            url=",".join(self.servers[name].url for name in names or NAMES),
            credentials_file=self._folder / "keys" / f"{role}.creds",
            ca_file=self._folder / "ca.pem",
            connect_within_s=WITHIN_S,
            replicas=3,
        )
        return msgspec.structs.replace(found, **changed)

    async def grant(self, job: str) -> BusSettings:
        """Admit the agents of a job, and return how they log in."""
        name = agents_name(job)
        await admit(self.operator, self.settings(ADMIN), job)
        await asyncio.to_thread(login_file, self._folder / "keys", self.operator, name)
        return self.settings(name)

    def isolate(self, name: str, how: str = "hang") -> None:
        """Cut a server off from the two others; its clients still reach it."""
        for pair, link in self.routes.items():
            if name in pair:
                getattr(link, how)()

    def leader(self, stream: str = "") -> str:
        """The server that leads a stream, or the meta group; empty while none is known."""
        pages = [server.monitored("jsz?accounts=1&streams=1") for server in self.servers.values()]
        groups = [page.get("meta_cluster", {}) for page in pages]
        if stream:
            groups = [
                detail.get("cluster", {})
                for page in pages
                for account in page.get("account_details", [])
                for detail in account.get("stream_detail", [])
                if detail["name"] == stream
            ]
        return next((str(group["leader"]) for group in groups if group.get("leader")), "")

    def _meta(self, server: Server) -> dict[str, Any]:
        found: dict[str, Any] = server.monitored("jsz").get("meta_cluster", {})
        return found

    def is_whole(self) -> bool:
        """Whether all servers have all routes, the same leader, and streams that are current."""
        groups = {name: self._meta(server) for name, server in self.servers.items()}
        leaders = {group.get("leader", "") for group in groups.values()}
        peers = groups.get(min(leaders), {}).get("replicas", ())
        return (
            len(leaders) == 1
            and len(peers) == len(NAMES) - 1
            and all(peer["current"] and not peer.get("offline") for peer in peers)
            and all(
                server.monitored("routez").get("num_routes", 0) >= _ROUTES
                and server.monitored("healthz").get("status") == "ok"
                for server in self.servers.values()
            )
        )

    def start(self) -> None:
        for link in self.routes.values():
            link.hang()  # a server that is refused tries again after a second
        for server in self.servers.values():
            server.start()
        for server in self.servers.values():
            until(partial(server.monitored, "varz"), "the server listens")
        for link in self.routes.values():
            link.mend()
        until(self.is_whole, "the servers have found each other")
        asyncio.run(self._make_streams())

    async def _make_streams(self) -> None:
        async with connect(self.settings(ADMIN), "setup") as bus:
            # Routes that both ends open at the same time come and go for a moment.
            await until_async(
                lambda: topology.init(bus.jetstream, replicas=len(NAMES)),
                "the streams are made", despite=(BusError,),
            )  # fmt: skip

    def heal(self) -> None:
        """Mend all links, start all servers, and wait until nothing of the cuts is left."""
        for link in (*self.routes.values(), *(server.front for server in self.servers.values())):
            link.mend()
        for server in self.servers.values():
            server.go_on()
        until(self.is_whole, "the cluster is whole again")

    def stop(self) -> None:
        for server in self.servers.values():
            with suppress(AssertionError):  # never started
                server.kill()
        self.loop.close()


@contextmanager
def cluster_of_three(folder: Path) -> Iterator[Cluster]:
    cluster = Cluster(folder)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
