"""Set up the bus, and look at it."""

import asyncio
from typing import Any

import click

from everstep_services.cli.invocation import Invocation, with_common_options
from everstep_services.cli.output import print_records, say


@click.group()
def command() -> None:
    """Set up the bus, and look at it."""


@command.command()
@click.option("--replicas", type=click.Choice(["1", "3", "5"]), help="Copies of each stream.")
@with_common_options
@click.pass_obj
def init(invocation: Invocation, replicas: str | None) -> None:
    """Make the streams that are missing and correct those that differ. Safe to repeat."""
    from everstep.bus import connect, topology
    from everstep_services.cli.buses import find_bus

    settings = find_bus(invocation)

    async def run() -> list[str]:
        async with connect(settings, "cli") as bus:
            wanted = settings.replicas if replicas is None else int(replicas)
            return await topology.init(bus.jetstream, replicas=wanted)

    done = [line.partition(" ") for line in asyncio.run(run())]
    records = [{"stream": name, "outcome": outcome} for name, _, outcome in done]
    print_records(invocation, "stream_setup", records, ["stream", "outcome"])


@command.command()
@with_common_options
@click.pass_obj
def info(invocation: Invocation) -> None:
    """Print each stream: how much it holds, from where to where, and who reads it."""
    from everstep.bus import connect
    from everstep_services.cli.buses import find_bus, server_version

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
