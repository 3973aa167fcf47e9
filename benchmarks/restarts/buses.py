"""A bus of one server or of three on loopback, and its services, as an operator sets them up."""

import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import trustme

from benchmarks.restarts.ports import free_port
from everstep.bus.server.dev_server import find_program

SERVICES = ("history", "rendezvous", "health", "catalog", "straggler", "attribution", "logins")
_WITHIN_S = 60.0
_LOOK_EVERY_S = 0.1


@dataclass
class Servers:
    """The servers of a bus, with TLS and their streams."""

    keys: Path
    environ: Mapping[str, str]
    """How a client finds them, but for its login."""
    _configs: Sequence[Path]
    _stack: ExitStack
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self) -> None:
        program = find_program()
        self.processes = [
            _start(self._stack, config.with_suffix(".log"), [program, "-c", str(config)], {})
            for config in self._configs
        ]

    def restart(self) -> None:
        """Kill all of them, and start them again."""
        for process in self.processes:
            process.kill()
            process.wait()
        self.start()

    def login(self, role: str) -> dict[str, str]:
        """The environment of a client."""
        return {**self.environ, "EVERSTEP_BUS__CREDENTIALS_FILE": str(self.keys / f"{role}.creds")}


@contextmanager
def servers_alone(folder: Path, count: int) -> Iterator[Servers]:
    """One server, or three, as `bus setup` writes them."""
    folder.mkdir(parents=True)
    keys, bus_file = folder / "keys", folder / "nats.json"
    members = [f"127.0.0.1:{free_port()}" for _ in range(count)]
    named = ["--cluster", ",".join(members)] if count > 1 else ["--listen", members[0]]
    _everstep(
        *("bus", "setup", "--keys", str(keys), "--write", str(bus_file)),
        *("--store", str(folder / "store"), "--tls", str(certificates(folder / "tls")), *named),
    )  # fmt: skip
    bus = {
        "EVERSTEP_BUS__URL": ",".join(f"tls://{member}" for member in members),
        "EVERSTEP_BUS__CA_FILE": str(folder / "tls" / "ca.pem"),
        "EVERSTEP_BUS__REPLICAS": str(count),
    }
    with ExitStack() as stack:
        servers = Servers(keys, bus, sorted(folder.glob("nats*.json")), stack)
        servers.start()
        admin = servers.login("admin")
        _until(lambda: _everstep("bus", "init", "--replicas", str(count), **admin), "streams")
        yield servers


@contextmanager
def running(folder: Path, servers: int, job: str) -> Iterator[Path]:
    """Yield the settings of a node of the job; all of it ends with the context."""
    with servers_alone(folder, servers) as bus, ExitStack() as stack:
        for name in SERVICES:
            _serve(stack, folder, name, bus.login("service"))
        login = folder / f"{job}.creds"
        words = ("bus", "login", job, "--keys", str(bus.keys), "--out", str(login))
        _everstep(*words, **bus.login("admin"))
        settings = folder / "everstep.toml"
        lines = {
            "url": bus.environ["EVERSTEP_BUS__URL"],
            "ca_file": bus.environ["EVERSTEP_BUS__CA_FILE"],
            "credentials_file": str(login),
        }
        settings.write_text(
            "[bus]\n" + "".join(f'{name} = "{value}"\n' for name, value in lines.items())
        )
        yield settings


def _serve(stack: ExitStack, folder: Path, name: str, bus: Mapping[str, str]) -> None:
    port = free_port()
    environ = {
        **bus,
        "EVERSTEP_BUS__SPOOL_DIR": str(folder / "spool" / name),
        "EVERSTEP_HISTORY__DATABASE_URL": f"sqlite:///{folder / 'history.db'}",
        "EVERSTEP_API__PORT": str(free_port()),
        "EVERSTEP_API__FIRST_TOKEN_FILE": str(folder / "token"),
        "EVERSTEP_LOGINS__KEYS_DIR": str(folder / "keys" / "logins"),
        "EVERSTEP_OBSERVE__PORT": str(port),
    }
    command = [sys.executable, "-m", f"everstep_services.{name}"]
    _start(stack, folder / f"{name}.log", command, environ)
    _until(lambda: urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz").close(), name)


def _start(
    stack: ExitStack, log: Path, command: list[str], environ: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    file = stack.enter_context(log.open("ab"))
    process = subprocess.Popen(
        command, env={**os.environ, **environ}, stdin=subprocess.DEVNULL, stdout=file, stderr=file
    )
    stack.callback(process.wait)
    stack.callback(process.kill)
    return process


def _everstep(*words: str, **environ: str) -> None:
    command = [sys.executable, "-m", "everstep_services.cli", *words]
    subprocess.run(command, env={**os.environ, **environ}, check=True, capture_output=True)


def certificates(folder: Path) -> Path:
    """Make what the servers of one host need for TLS; returns the folder."""
    folder.mkdir()
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    authority.cert_pem.write_to_path(folder / "ca.pem")
    issued.private_key_pem.write_to_path(folder / "server.key")
    issued.cert_chain_pems[0].write_to_path(folder / "server.pem")
    return folder


def _until(done: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + _WITHIN_S
    while not _is_done(done):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not ready within {_WITHIN_S:g} s")
        time.sleep(_LOOK_EVERY_S)


def _is_done(done: Callable[[], object]) -> bool:
    try:
        done()
    except (OSError, subprocess.CalledProcessError):
        return False
    return True
