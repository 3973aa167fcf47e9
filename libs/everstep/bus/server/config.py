"""The NATS server's own configuration: JetStream, the operator whom it trusts, limits.

The dev server uses it, and `everstep bus setup` writes it for production. The server knows public
keys of logins only, and receives the accounts of jobs while it runs. The only secret is the
password between the servers of a cluster.
"""

import logging
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from everstep.bus.auth.accounts import Operator
from everstep.bus.auth.keys import claims_of
from everstep.bus.auth.login import write_private
from everstep.bus.errors import BusConfigError
from everstep.evidence.files import read_regular

log = logging.getLogger(__name__)

MAX_PAYLOAD_BYTES = 1024 * 1024
_OLD_ACCOUNT = "$G"
_ROUTES_USER = "server"


MOST_PENDING_BYTES = 512 * 1024 * 1024
"""Limit of messages that wait for one client; beyond it the server ends the connection. The timings
of 100 000 ranks, which arrive at once, are 250 MB."""


@dataclass(frozen=True, slots=True)
class ServerTls:
    """The files of a server's certificate, which also proves it to the other servers."""

    cert: Path
    key: Path
    ca: Path

    def config(self) -> dict[str, Any]:
        """The server's block `tls`, for clients."""
        return {"cert_file": str(self.cert), "key_file": str(self.key)}

    def between_servers(self) -> dict[str, Any]:
        """The same for routes: each end must show a certificate of the same authority."""
        return self.config() | {"ca_file": str(self.ca), "verify": True, "timeout": 5}


@dataclass(frozen=True, slots=True)
class Peers:
    """How a server of a cluster meets the others."""

    listen: str
    """HOST:PORT for the other servers."""
    routes: Sequence[str]
    """HOST:PORT of the other servers."""
    password: str
    advertise: str | None = None
    """HOST:PORT at which the other servers reach this one, if that is not `listen`."""

    def config(self, tls: ServerTls | None) -> dict[str, Any]:
        """The server's block `cluster`."""
        login = {"user": _ROUTES_USER, "password": self.password, "timeout": 5}
        config: dict[str, Any] = {
            "name": "everstep",
            "listen": self.listen,
            "authorization": login,
            # A route that hangs ends after three pings; clients then leave a server without routes.
            "ping_interval": "2s",
            "ping_max": 2,
            "routes": [
                f"nats-route://{_ROUTES_USER}:{self.password}@{route}" for route in self.routes
            ],
        }
        if self.advertise is not None:
            config["advertise"] = self.advertise
        if tls is not None:
            config["tls"] = tls.between_servers()
        return config


@dataclass(frozen=True, slots=True)
class ServerPlan:
    """The settings that differ between servers."""

    store: Path
    name: str = "everstep"
    """Of this server; servers of a cluster close the routes to another one of the same name."""
    host: str = "127.0.0.1"
    port: int = 4222
    sync: str = "2m"
    """How often the store is fsync'd; `always` survives power cuts, at a price."""
    max_file_bytes: int = 20 * 1024 * 1024 * 1024
    log_folder: Path | None = None
    """Folder of the log and of the file that names the ports; by default neither is written."""
    monitor: str | None = None
    """HOST:PORT of the server's own monitoring, which has no logins: keep it private."""
    tls: ServerTls | None = None
    peers: Peers | None = None
    advertise: str | None = None
    """HOST:PORT that the server gives to clients, if it is not `host` and `port`."""

    @property
    def accounts(self) -> Path:
        """The folder in which the server keeps the accounts that it has received."""
        return self.store / "accounts"


_ROUTES_ABOVE = 2000
_MONITOR_ABOVE = 4000


def cluster_plans(
    plan: ServerPlan, members: Sequence[tuple[str, int]], password: str
) -> list[ServerPlan]:
    """The plans of the servers of a cluster, given the address of each and what they share.

    Ports are those of a single server: 4222 for clients, 6222 for servers, 8222 for monitoring.
    Servers on one host have different ports, and folders below the store.
    """
    if len(members) not in {3, 5} or len(set(members)) < len(members):
        raise BusConfigError(
            f"a cluster has 3 or 5 different servers, not {len(members)}: only then do most of "
            f"them remain when one is lost"
        )
    hosts = [host for host, _ in members]
    routes = {member: f"{member[0]}:{member[1] + _ROUTES_ABOVE}" for member in members}
    plans = []
    for member in members:
        host, port = member
        is_alone = hosts.count(host) == 1
        name = host if is_alone else f"{host}-{port}"
        peers = Peers(
            listen=f"{plan.host}:{port + _ROUTES_ABOVE}",
            routes=[route for other, route in routes.items() if other != member],
            password=password,
            advertise=routes[member],
        )
        store = plan.store if is_alone else plan.store / name
        monitor = plan.monitor or f"127.0.0.1:{port + _MONITOR_ABOVE}"
        own = replace(plan, name=name, port=port, store=store, monitor=monitor)
        plans.append(replace(own, peers=peers, advertise=f"{host}:{port}"))
    return plans


def write_config(path: Path, plan: ServerPlan, operator: Operator) -> None:
    """Write the server's configuration."""
    config: dict[str, Any] = {
        "listen": f"{plan.host}:{plan.port}",
        "server_name": plan.name,
        "max_payload": MAX_PAYLOAD_BYTES,
        "write_deadline": "10s",
        "max_pending": MOST_PENDING_BYTES,
        "jetstream": {
            "store_dir": str(plan.store),
            "sync_interval": plan.sync,
            "max_file_store": plan.max_file_bytes,
        },
        "operator": operator.itself(),
        "system_account": operator.system.public,
        "resolver": {"type": "full", "dir": str(plan.accounts), "allow_delete": True},
        "resolver_preload": operator.preloaded(),
        "authorization": {"timeout": 10},
    }
    if plan.log_folder is not None:
        config |= {
            "ports_file_dir": str(plan.log_folder),
            "log_file": str(plan.log_folder / "nats.log"),
            "log_size_limit": 8 * 1024 * 1024,
        }
    if plan.monitor is not None:
        config["http"] = plan.monitor
    if plan.tls is not None:
        config["tls"] = plan.tls.config()
    if plan.peers is not None:
        config["cluster"] = plan.peers.config(plan.tls)
    if plan.advertise is not None:
        config["client_advertise"] = plan.advertise
    # The server's configuration language takes JSON; a quoted `$` is not a variable there.
    write_private(path, msgspec.json.format(msgspec.json.encode(config), indent=1).decode() + "\n")


def move_streams(plan: ServerPlan, operator: Operator, host: str | None = None) -> bool:
    """Move streams from before accounts existed to the control plane's account.

    Returns whether there were any. The server must not run; `host` is its address.
    """
    jetstream = plan.store / "jetstream"
    old, new = jetstream / _OLD_ACCOUNT, jetstream / operator.control.public
    if not (old / "streams").is_dir():
        return False
    if (new / "streams").is_dir():
        raise BusConfigError(
            f"both {old} and {new} hold streams: the server has run with accounts already. Keep "
            f"the folder that you need, and move the other one away"
        )
    host = host or ("127.0.0.1" if plan.host == "0.0.0.0" else plan.host)  # noqa: S104
    if plan.port > 0 and _answers(host, plan.port):
        raise BusConfigError(
            f"something listens at {host}:{plan.port}: stop the server before its streams in "
            f"{old} are moved to the control plane's account"
        )
    old.replace(new)
    log.warning("streams_moved from=%s to=%s", old, new)
    return True


def _answers(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=2):
            return True
    except OSError:
        return False


def keep_account(folder: Path, operator: Operator, job: str) -> None:
    """Write a job's account for a server that is not running yet, unless it is there."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder / f"{operator.account_of(job)}.jwt"
    if not path.exists():
        write_private(path, operator.job_account(job))


def renew_accounts(folder: Path, operator: Operator) -> int:
    """Update accounts that an older release has made, and return their number.

    The server must not run.
    """
    changed = 0
    for path in folder.glob("*.jwt"):
        account = claims_of(read_regular(path).decode())
        token = None if account is None else operator.renewed(account)
        if token is not None:
            write_private(path, token)
            changed += 1
    return changed
