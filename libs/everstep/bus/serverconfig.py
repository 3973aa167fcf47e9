"""The NATS server's own configuration: JetStream, users by role, limits.

Written for the dev server, and for production by whoever sets it up (`deploy/docker` does).
The files: `nats.json` for the server, and a password file a user for the clients, all 0600.
"""

import fcntl
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from everstep.bus.login import read_secret
from everstep.bus.roles import User, by_name, new_password

MAX_PAYLOAD_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True)
class ServerPlan:
    """What differs between one server and another."""

    store: Path
    host: str = "127.0.0.1"
    port: int = 4222
    sync: str = "2m"
    """How often the store is fsync'd; `always` survives power cuts, at a price."""
    max_file_bytes: int = 20 * 1024 * 1024 * 1024
    beside: Path | None = None
    """Where to write the log and the file that names the ports; by default nowhere."""
    monitor: str | None = None
    """HOST:PORT of the server's own monitoring, which knows no passwords: keep it private."""


def ensure_users(folder: Path, names: Iterable[str]) -> None:
    """Make a password for each user that has none yet."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for name in names:
        by_name(name)  # only users that we know how to confine
        path = password_file(folder, name)
        if not path.exists():
            write_private(path, new_password() + "\n")


def password_file(folder: Path, name: str) -> Path:
    return folder / f"{name}.password"


def users(folder: Path) -> list[str]:
    """Everybody who has a password here."""
    return sorted(path.name.removesuffix(".password") for path in folder.glob("*.password"))


def write_config(path: Path, plan: ServerPlan, passwords: Path) -> None:
    """Write the server's configuration with every user that has a password."""
    config: dict[str, Any] = {
        "listen": f"{plan.host}:{plan.port}",
        "server_name": "everstep",
        "max_payload": MAX_PAYLOAD_BYTES,
        "write_deadline": "10s",
        "jetstream": {
            "store_dir": str(plan.store),
            "sync_interval": plan.sync,
            "max_file_store": plan.max_file_bytes,
        },
        "authorization": _authorization(passwords),
    }
    if plan.beside is not None:
        config |= {
            "ports_file_dir": str(plan.beside),
            "log_file": str(plan.beside / "nats.log"),
            "log_size_limit": 8 * 1024 * 1024,
        }
    if plan.monitor is not None:
        config["http"] = plan.monitor
    _write(path, config)


def admit(path: Path, passwords: Path, name: str) -> None:
    """Add a user to a configuration; the server reads it again on SIGHUP.

    Several processes may do so at once.
    """
    ensure_users(passwords, [name])
    with writing_alone(passwords):
        config = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        _write(path, config | {"authorization": _authorization(passwords)})


@contextmanager
def writing_alone(passwords: Path) -> Iterator[None]:
    """Nobody else writes the configuration with these users meanwhile."""
    with (passwords / ".admitting").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _write(path: Path, config: dict[str, Any]) -> None:
    # The server's configuration language takes JSON; quoted, a `$` is no variable there.
    write_private(path, msgspec.json.format(msgspec.json.encode(config), indent=1).decode() + "\n")


def _authorization(passwords: Path) -> dict[str, Any]:
    entries = [
        _entry(by_name(name), read_secret(password_file(passwords, name), "password_file"))
        for name in users(passwords)
    ]
    return {"timeout": 10, "users": entries}


def _entry(user: User, password: str) -> dict[str, Any]:
    return {
        "user": user.name,
        "password": password,
        "permissions": {
            "publish": {"allow": list(user.publish)},
            "subscribe": {"allow": list(user.subscribe)},
            # a service may answer whoever asked it, and only that
            "allow_responses": {"max": 1, "ttl": "1m"},
        },
    }


def write_private(path: Path, text: str) -> None:
    """Replace a file at once, readable by us only from its first byte."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
