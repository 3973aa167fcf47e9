"""Set up the bus, let jobs in and out, and look at it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from everstep_services.cli.errors import CliError, Exit
from everstep_services.cli.invocation import NAME, Invocation, with_common_options
from everstep_services.cli.output import print_records, say

if TYPE_CHECKING:
    from everstep.bus import BusSettings
    from everstep.bus.auth.accounts import Operator

_KEYS = click.option(
    "--keys",
    type=click.Path(path_type=Path, file_okay=False),
    help="The folder with the operator's key; by default that of `everstep up`.",
)
_VALID = click.option(
    "--valid", default="7d", show_default=True, help="How long the login is valid: 12h, 7d."
)
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_LEFT_WITHIN_S = 30.0
_CONFIG = "configuration of nats-server"
_TLS_FILES = ("server.pem", "server.key", "ca.pem")


@click.group()
def command() -> None:
    """Set up the bus, let jobs in and out, and look at it."""


@command.command()
@_KEYS
@click.option(
    "--write",
    "config_file",
    type=click.Path(path_type=Path, dir_okay=False),
    default=Path("nats.json"),
    show_default=True,
    help="The file for the server's configuration.",
)
@click.option(
    "--store",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("/var/lib/nats"),
    show_default=True,
    help="Where the server keeps its data.",
)
@click.option(
    "--listen",
    "listens",
    default="0.0.0.0:4222",
    show_default=True,
    help="HOST:PORT of the server.",
)
@click.option("--monitor", help="HOST:PORT of the server's own monitoring: keep it private.")
@click.option(
    "--sync",
    default="always",
    show_default=True,
    help="How often the store is fsync'd; `2m` does not survive power cuts.",
)
@click.option("--max-store-gib", type=click.IntRange(1), default=20, show_default=True)
@click.option(
    "--cluster",
    "members",
    help="HOST[:PORT] of each server, with commas: one configuration each, named after its host.",
)
@click.option(
    "--tls",
    type=click.Path(path_type=Path, file_okay=False),
    is_flag=False,
    flag_value="/etc/nats/tls",
    help="TLS for clients and between servers; server.pem, server.key and ca.pem are in this "
    "folder of each server, by default /etc/nats/tls.",
)
@with_common_options
def setup(  # noqa: PLR0913  what differs between servers
    invocation: Invocation,
    keys: Path | None,
    config_file: Path,
    store: Path,
    listens: str,
    monitor: str | None,
    sync: str,
    max_store_gib: int,
    members: str | None,
    tls: Path | None,
) -> None:
    """Make keys, the configuration of each NATS server, and the logins of the control plane.

    Safe to repeat: existing keys stay, and so do logins that are valid for long enough. Streams of
    releases without accounts are moved to the control plane, for which the server must not run.
    """
    from everstep.bus.auth.accounts import Operator
    from everstep.bus.auth.job_access import login_file
    from everstep.bus.auth.roles import ADMIN, SERVICE
    from everstep.bus.server.config import (
        ServerPlan,
        ServerTls,
        cluster_plans,
        move_streams,
        write_config,
    )

    host, port = _address(listens)
    folder = keys or Path("keys")
    operator = Operator.made(folder)
    files = None if tls is None else ServerTls(*(tls / name for name in _TLS_FILES))
    plan = ServerPlan(
        store=store.absolute(), host=host, port=port, sync=sync, monitor=monitor,
        max_file_bytes=max_store_gib << 30, tls=files,
    )  # fmt: skip
    done: list[tuple[str, Path | str]] = [
        ("the operator's key", folder / "operator.seed"),
        ("keys of the logins service", folder / "logins"),
    ]
    addresses = [_member(member, port) for member in (members or "").split(",") if member]
    plans = {config_file: plan}
    if members is not None:
        plans = {
            config_file.with_name(f"{config_file.stem}-{member.name}.json"): member
            for member in cluster_plans(plan, addresses, operator.password_of_routes)
        }
    was_moved = members is None and move_streams(plan, operator)
    for path, own in plans.items():
        write_config(path, own, operator)
        done.append((f"configuration of {own.name}" if addresses else _CONFIG, path))
    operator.write_signers(folder / "logins")
    for name, valid_s in ((ADMIN, 365 * _UNITS["d"]), (SERVICE, 7 * _UNITS["d"])):
        done.append((f"login {name}", login_file(folder, operator, name, valid_s=valid_s)))
    if was_moved:
        done.append(("streams of before", f"moved to account {operator.control.public}"))
    records = [{"what": what, "where": str(where)} for what, where in done]
    print_records(invocation, "bus_setup", records, ["what", "where"])
    for line in _next_steps(addresses, tls):
        say(line)


def _next_steps(addresses: Sequence[tuple[str, int]], tls: Path | None) -> list[str]:
    """What comes after the configurations of a cluster."""
    if not addresses:
        return []
    scheme, servers = "nats" if tls is None else "tls", len(addresses)
    urls = ",".join(f"{scheme}://{host}:{port}" for host, port in addresses)
    certificates = (
        []
        if tls is None
        else [
            f"Put {', '.join(_TLS_FILES)} into {tls} of each server: the certificate has the "
            f"server's name, and serves as a server's and as a client's"
        ]
    )
    steps = [
        "Copy each configuration to its server only: it holds the password of the routes",
        *certificates,
        "Start all servers: nats-server -c FILE",
        f"Set EVERSTEP_BUS__URL={urls}"
        + ("" if tls is None else ", and EVERSTEP_BUS__CA_FILE to a copy of ca.pem"),
        f"Make the streams: everstep bus init --replicas {servers}",
        f"Set replicas = {servers} in [bus] of the services, and ask everstep doctor",
    ]
    return [f"{number}. {step}" for number, step in enumerate(steps, 1)]


@command.command()
@click.argument("who", type=NAME)
@_KEYS
@_VALID
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    help="The file to write, 0600; by default it is printed.",
)
@with_common_options
def login(
    invocation: Invocation, who: str, keys: Path | None, valid: str, out: Path | None
) -> None:
    """Allow the agents of a job on the bus, and make a login for them.

    WHO is the name of a job. `@service` and `@admin` are the logins of the control plane.
    """
    from everstep.bus.auth.job_access import admit
    from everstep.bus.auth.login import write_private
    from everstep.bus.auth.roles import agents_name

    operator, valid_s = _operator(invocation, keys), _seconds(valid)
    if who.startswith("@"):
        name = who[1:]
    else:
        name = agents_name(who)
        asyncio.run(admit(operator, _address_of_bus(invocation), who, again=True))
    text = operator.login(name, valid_s).text()
    if out is None:
        click.echo(text, nl=False)
        return
    write_private(out, text)
    say(f"login {name}, good for {valid}, in {out}")


@command.command()
@click.argument("job", type=NAME)
@_KEYS
@with_common_options
def revoke(invocation: Invocation, job: str, keys: Path | None) -> None:
    """Revoke the logins of a job's agents for ever, and close their connections.

    Their ranks continue until they need the bus. `everstep bus login JOB` lets agents in again,
    with a new login.
    """
    from everstep.bus.auth.job_access import cut_off

    asyncio.run(cut_off(_operator(invocation, keys), _address_of_bus(invocation), job))
    say(f"the agents of job {job} are cut off; `everstep bus login {job}` lets them in again")


@command.command()
@click.option("--replicas", type=click.Choice(["1", "3", "5"]), help="Copies of each stream.")
@click.option(
    "--keys",
    type=click.Path(path_type=Path, file_okay=False),
    help="The folder with the operator's key: accounts are corrected, too.",
)
@with_common_options
def init(invocation: Invocation, replicas: str | None, keys: Path | None) -> None:
    """Make the streams that are missing and correct those that differ. Safe to repeat.

    After an upgrade, --keys also gives the accounts of the control plane and of all jobs what the
    new release needs.
    """
    from everstep.bus import connect, topology
    from everstep.bus.auth.job_access import renew_accounts
    from everstep_services.cli.machine.bus_settings import find_bus

    settings = find_bus(invocation)

    async def run() -> list[str]:
        async with connect(settings, "cli") as bus:
            wanted = settings.replicas if replicas is None else int(replicas)
            return await topology.init(bus.jetstream, replicas=wanted, retention=settings)

    done = [line.partition(" ") for line in asyncio.run(run())]
    records = [{"stream": name, "outcome": outcome} for name, _, outcome in done]
    print_records(invocation, "stream_setup", records, ["stream", "outcome"])
    if keys is not None:
        renewed = asyncio.run(renew_accounts(_operator(invocation, keys), settings))
        say(f"accounts corrected: {', '.join(renewed) or 'none, all are of this release'}")


@command.command()
@with_common_options
def info(invocation: Invocation) -> None:
    """Print each stream: how much it holds, its first and last message, and its readers."""
    from everstep.bus import connect
    from everstep_services.cli.machine.bus_settings import find_bus, server_version

    settings = find_bus(invocation)

    async def run() -> tuple[str, list[dict[str, Any]]]:
        async with connect(settings, "cli") as bus:
            listed = await bus.jetstream.api("STREAM.LIST")
            return server_version(bus), listed.get("streams") or []

    version, streams = asyncio.run(run())
    say(f"{settings.url}  nats-server {version}")
    records = [_stream(stream) for stream in sorted(streams, key=_name)]
    columns = ["stream", "messages", "bytes", "first", "last", "consumers", "replicas"]
    print_records(invocation, "stream", records, columns)


@command.command()
@with_common_options
def flush(invocation: Invocation) -> None:
    """Send the facts that wait on this node, of processes that ended while their bus was away.

    Facts are sent with the login of the process that recorded them. `everstep run` and `everstep
    up` send them, too, when they start.
    """
    from everstep_services.agent.telemetry.leftover_spools import send_left
    from everstep_services.cli.machine.state import find_state_dir

    spools = find_state_dir(invocation.environ, invocation.state_dir).path / "spool"

    async def run() -> list[dict[str, Any]]:
        return [asdict(sent) async for sent in send_left(spools, _LEFT_WITHIN_S)]

    records = asyncio.run(run())
    print_records(invocation, "spool", records, ["spool", "size_bytes", "error"])
    if any(record["error"] for record in records):
        raise CliError("some facts still wait", Exit.UNREACHABLE)


def _operator(invocation: Invocation, keys: Path | None) -> Operator:
    from everstep.bus.auth.accounts import Operator
    from everstep_services.cli.machine.state import find_state_dir

    folder = keys or find_state_dir(invocation.environ, invocation.state_dir).path / "nats"
    return Operator.opened(folder)


def _address_of_bus(invocation: Invocation) -> BusSettings:
    """Where the bus is; who asks proves itself by the operator's key."""
    from everstep_services.cli.machine.bus_settings import find_bus

    return find_bus(invocation)


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise CliError(f"--listen {text!r} is not HOST:PORT, as 0.0.0.0:4222", Exit.USAGE)
    return host, int(port)


def _member(text: str, port: int) -> tuple[str, int]:
    host, _, own = text.strip().partition(":")
    if not host or (own and not (own.isdecimal() and 0 < int(own) < 65536)):
        raise CliError(f"--cluster: {text!r} is not HOST or HOST:PORT", Exit.USAGE)
    return host, int(own) if own else port


def _seconds(text: str) -> int:
    match = re.fullmatch(r"(\d{1,6})([smhd])", text)
    if match is None or int(match[1]) == 0:
        raise CliError(f"--valid {text!r} is not a time: write, say, 12h or 7d", Exit.USAGE)
    return int(match[1]) * _UNITS[match[2]]


def _name(stream: dict[str, Any]) -> str:
    return str(stream["config"]["name"])


def _stream(stream: dict[str, Any]) -> dict[str, Any]:
    state = stream["state"]
    return {
        "stream": _name(stream),
        "messages": state["messages"],
        "bytes": state["bytes"],
        "first": state["first_seq"],
        "last": state["last_seq"],
        "consumers": state["consumer_count"],
        "replicas": stream["config"]["num_replicas"],
        "subjects": stream["config"].get("subjects", []),
    }
