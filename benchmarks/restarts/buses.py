"""A bus of one server or of three on loopback, and its services, as an operator sets them up."""

import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import trustme

from benchmarks.restarts.ports import free_port
from everstep.bus.server.dev_server import find_program

SERVICES = ("history", "rendezvous", "health", "catalog", "straggler", "attribution", "logins")
_WITHIN_S = 60.0
_LOOK_EVERY_S = 0.1


@contextmanager
def running(folder: Path, servers: int, job: str) -> Iterator[Path]:
    """Yield the settings of a node of the job; all of it ends with the context."""
    folder.mkdir(parents=True)
    keys, bus_file = folder / "keys", folder / "nats.json"
    members = [f"127.0.0.1:{free_port()}" for _ in range(servers)]
    named = ["--cluster", ",".join(members)] if servers > 1 else ["--listen", members[0]]
    _everstep(
        *("bus", "setup", "--keys", str(keys), "--write", str(bus_file)),
        *("--store", str(folder / "store"), "--tls", str(certificates(folder / "tls")), *named),
    )  # fmt: skip
    bus = {
        "EVERSTEP_BUS__URL": ",".join(f"tls://{member}" for member in members),
        "EVERSTEP_BUS__CA_FILE": str(folder / "tls" / "ca.pem"),
        "EVERSTEP_BUS__REPLICAS": str(servers),
    }
    admin = {**bus, "EVERSTEP_BUS__CREDENTIALS_FILE": str(keys / "admin.creds")}
    with ExitStack() as stack:
        for config in sorted(folder.glob("nats*.json")):
            _start(stack, config.with_suffix(".log"), [find_program(), "-c", str(config)], {})
        _until(lambda: _everstep("bus", "init", "--replicas", str(servers), **admin), "streams")
        service = {**bus, "EVERSTEP_BUS__CREDENTIALS_FILE": str(keys / "service.creds")}
        for name in SERVICES:
            _serve(stack, folder, name, service)
        login = folder / f"{job}.creds"
        _everstep("bus", "login", job, "--keys", str(keys), "--out", str(login), **admin)
        settings = folder / "everstep.toml"
        lines = {"url": bus["EVERSTEP_BUS__URL"], "ca_file": bus["EVERSTEP_BUS__CA_FILE"]}
        lines["credentials_file"] = str(login)
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


def _start(stack: ExitStack, log: Path, command: list[str], environ: Mapping[str, str]) -> None:
    file = stack.enter_context(log.open("ab"))
    process = subprocess.Popen(
        command, env={**os.environ, **environ}, stdin=subprocess.DEVNULL, stdout=file, stderr=file
    )
    stack.callback(process.wait)
    stack.callback(process.kill)


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
