"""Checks of the bus: whether it works, and whether a cluster would survive the loss of a server."""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from everstep.errors import EverstepError
from everstep.runtime import one_line
from everstep_services.cli.invocation import Invocation
from everstep_services.cli.machine.rank_diagnosis import Diagnoses, Diagnosis, Level

if TYPE_CHECKING:
    from everstep.bus import BusSettings

_WITHIN_S = 5.0


def bus(invocation: Invocation) -> Diagnoses:
    from everstep_services.cli.machine.bus_settings import named_bus

    named = named_bus(invocation)
    if named is None:
        fix = "everstep up, or set url in [bus]"
        yield Diagnosis("bus", Level.WARNING, "no bus is known here", fix)
        return
    settings = msgspec.structs.replace(named, connect_within_s=_WITHIN_S)
    try:
        text, diagnoses = asyncio.run(_examined(settings, invocation.keys))
    except TimeoutError:
        yield Diagnosis("bus", Level.CRITICAL, f"{settings.url} is too slow", "is it overloaded?")
    except EverstepError as error:
        fix = "everstep up, or set url and credentials in [bus]; then everstep bus init"
        yield Diagnosis("bus", Level.CRITICAL, one_line(error), fix)
    else:
        if not _is_broken(diagnoses):
            yield Diagnosis("bus", Level.OK, f"{settings.url} {text}")
        yield from diagnoses


async def _examined(settings: "BusSettings", keys: Path | None) -> tuple[str, list[Diagnosis]]:
    """What works there, and what is wrong with its streams."""
    from everstep.bus import connect
    from everstep.bus.auth.accounts import Operator
    from everstep.bus.auth.job_access import server_reports
    from everstep.bus.auth.roles import job_in
    from everstep_services.cli.machine.bus_settings import server_version

    async with asyncio.timeout(3 * _WITHIN_S), connect(settings, "doctor") as client:
        version = f"nats-server {server_version(client)}"
        login = client.jetstream.connection.login.name
        diagnoses: list[Diagnosis] = []
        if keys is not None:
            operator = await asyncio.to_thread(Operator.opened, keys)
            diagnoses = examine_servers(await server_reports(operator, settings))
        if job_in(login) is not None:
            return f"{version} takes the login {login}", diagnoses
        answer = await client.jetstream.api("STREAM.LIST")
        streams, missing = answer.get("streams") or (), answer.get("missing") or ()
        diagnoses = [*examine_streams(streams, missing, settings.replicas), *diagnoses]
        if not _is_broken(diagnoses):
            await client.prove()
        return f"{version}, JetStream works", diagnoses


def _is_broken(diagnoses: Sequence[Diagnosis]) -> bool:
    return any(diagnosis.level is Level.CRITICAL for diagnosis in diagnoses)


def examine_streams(
    streams: Sequence[dict[str, Any]], missing: Sequence[str], replicas: int
) -> list[Diagnosis]:
    """What the leaders of the streams report about their copies; the worst first."""
    from everstep.bus.server.copies import examine

    found, diagnoses = examine(streams, missing), []
    if found.without_leader:
        text = f"no leader: {_some(found.without_leader)}; nothing can be written there"
        fix = "start the servers that are away"
        diagnoses.append(Diagnosis("quorum", Level.CRITICAL, text, fix))
    for state, servers in (("is away", found.away), ("lags", found.lagging)):
        for server, names in sorted(servers.items()):
            text = f"{server} {state}: its copies of {_some(names)} are not current"
            fix = "start it, or wait until it has caught up; until then no other server may fail"
            diagnoses.append(Diagnosis("servers", Level.WARNING, text, fix))
    copies = {str(it["config"]["name"]): int(it["config"]["num_replicas"]) for it in streams}
    most = max(replicas, *copies.values(), 1)
    few = sorted(name for name, count in copies.items() if count < most)
    if few:
        text = f"fewer than {most} copies: {_some(few)}"
        fix = f"everstep bus init --replicas {most}"
        diagnoses.append(Diagnosis("copies", Level.WARNING, text, fix))
    if not diagnoses and len(found.servers) > 1:
        text = f"{len(found.servers)} servers, all copies of {len(streams)} streams are current"
        diagnoses.append(Diagnosis("servers", Level.OK, text))
    return diagnoses


def examine_servers(reports: Mapping[str, Mapping[str, Any]]) -> list[Diagnosis]:
    """What the servers of a cluster say about the leader of the others, and about power cuts."""
    if not reports:
        text, fix = "no server answered the operator", "is the key that of these servers?"
        return [Diagnosis("meta leader", Level.UNKNOWN, text, fix)]
    leaders, syncs, diagnoses = dict[str, list[str]](), dict[str, list[str]](), list[Diagnosis]()
    for name, report in sorted(reports.items()):
        if (config := report.get("config")) is not None:
            every_s = config.get("sync_interval", 0) / 1e9
            how = "each write" if config.get("sync_always") else f"every {every_s:g} s"
            syncs.setdefault(how, []).append(name)
        meta = report.get("meta_cluster")
        if meta is not None:
            leaders.setdefault(meta.get("leader") or "nobody", []).append(name)
    text = "; ".join(f"{who} leads, say {_some(names)}" for who, names in leaders.items())
    if "nobody" in leaders:
        fix = "start the servers that are away; until then no stream can be made or changed"
        diagnoses.append(Diagnosis("meta leader", Level.CRITICAL, text, fix))
    elif leaders:
        fix = "" if len(leaders) == 1 else "look for a cut between the servers"
        level = Level.WARNING if fix else Level.OK
        diagnoses.append(Diagnosis("meta leader", level, text, fix))
    if syncs:
        text = "; ".join(f"the store syncs {how} on {_some(names)}" for how, names in syncs.items())
        fix = "" if len(syncs) == 1 else "everstep bus setup with one --sync, and restart them"
        diagnoses.append(Diagnosis("sync", Level.WARNING if fix else Level.OK, text, fix))
    return diagnoses


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
