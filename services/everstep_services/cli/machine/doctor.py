"""Checks of this machine and this cluster; each finding names its remedy."""

import asyncio
import importlib.util
import os
import platform
import shutil
import socket
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from everstep import __version__
from everstep.errors import EverstepError
from everstep.runtime import one_line
from everstep.settings import wrong_mode
from everstep_services.cli.api.location import ApiPlace, find_api
from everstep_services.cli.errors import CliError, Exit
from everstep_services.cli.invocation import Invocation
from everstep_services.cli.machine.bus_diagnosis import bus
from everstep_services.cli.machine.rank_diagnosis import (
    Check,
    Diagnoses,
    Diagnosis,
    Level,
    host,
    in_process_restart,
    launchers,
    network_interface,
    recorder,
    timeouts,
)
from everstep_services.cli.machine.state import find_state_dir

_GIB = 1 << 30
_SHM = "/dev/shm"  # noqa: S108  its size is read, nothing is written
_PROGRAM_WITHIN_S = 10.0


_GRAVITY = (Level.OK, Level.UNKNOWN, Level.WARNING, Level.CRITICAL)


def examine(invocation: Invocation) -> list[Diagnosis]:
    """Run every check. One that fails itself is unknown; none stops the others."""
    diagnoses: list[Diagnosis] = []
    for check in CHECKS:
        name = check.__name__
        try:
            diagnoses += check(invocation)
        except EverstepError as error:
            diagnoses.append(Diagnosis(name, Level.CRITICAL, one_line(error)))
        except ModuleNotFoundError as error:
            text, fix = f"{error.name} is not installed", "pip install 'everstep[bus,services]'"
            diagnoses.append(Diagnosis(name, Level.UNKNOWN, text, fix))
        except (OSError, ValueError) as error:
            diagnoses.append(Diagnosis(name, Level.UNKNOWN, f"could not find out: {error}"))
    return diagnoses


def worst(findings: list[Diagnosis]) -> Level:
    """The exit code: the gravest level; not knowing is less than knowing it is bad."""
    return max((finding.level for finding in findings), key=_GRAVITY.index, default=Level.OK)


def python(invocation: Invocation) -> Diagnoses:
    del invocation
    text = f"everstep {__version__} on python {platform.python_version()}"
    yield Diagnosis("python", Level.OK, text)


def extras(invocation: Invocation) -> Diagnoses:
    del invocation
    needed = {
        "bus": ("nats", "zstandard", "xxhash"),
        "services": ("fastapi", "sqlalchemy", "aiosqlite", "alembic", "uvicorn", "numpy"),
    }
    for extra, modules in needed.items():
        missing = [module for module in modules if importlib.util.find_spec(module) is None]
        if missing:
            fix = f"pip install 'everstep[{extra}]'"
            yield Diagnosis("extras", Level.WARNING, f"{extra}: no {', '.join(missing)}", fix)
        else:
            yield Diagnosis("extras", Level.OK, f"{extra}: complete")


def torch(invocation: Invocation) -> Diagnoses:
    del invocation
    try:
        yield Diagnosis("torch", Level.OK, version("torch"))
    except PackageNotFoundError:
        text = f"not installed for {sys.executable}"
        yield Diagnosis("torch", Level.WARNING, text, "pip install torch, if this machine trains")


def nats_server(invocation: Invocation) -> Diagnoses:
    del invocation
    from everstep.bus.errors import BusConfigError
    from everstep.bus.server.dev_server import find_program, program_version

    async def asked(program: str) -> str:
        async with asyncio.timeout(_PROGRAM_WITHIN_S):
            return await program_version(program)

    try:
        program = find_program()
        version_text = asyncio.run(asked(program))
    except BusConfigError as error:
        fix = "pip install 'everstep[dev-server]', or use a server elsewhere"
        yield Diagnosis("nats_server", Level.WARNING, one_line(error), fix)
    except TimeoutError:
        yield Diagnosis("nats_server", Level.UNKNOWN, "its --version did not end")
    else:
        yield Diagnosis("nats_server", Level.OK, f"{program} {version_text}")


def state_directory(invocation: Invocation) -> Diagnoses:
    state = find_state_dir(invocation.environ, invocation.state_dir)
    place = _nearest(state.path)
    if not os.access(place, os.W_OK | os.X_OK):
        fix = "choose another with --state-dir or EVERSTEP_STATE_DIR"
        yield Diagnosis("state_directory", Level.CRITICAL, f"{place} is not writable", fix)
        return
    free = shutil.disk_usage(place).free
    text = f"{state.path}, {free / _GIB:.1f} GiB free"
    if free < 2 * _GIB:
        level = Level.CRITICAL if free < _GIB // 4 else Level.WARNING
        yield Diagnosis("state_directory", level, text, "free some space, or choose another disk")
    else:
        yield Diagnosis("state_directory", Level.OK, text)


def shared_memory(invocation: Invocation) -> Diagnoses:
    del invocation
    try:
        about = os.statvfs(_SHM)
    except OSError as error:
        text = f"{_SHM}: {error.strerror}"
        yield Diagnosis("shared_memory", Level.WARNING, text, f"mount a tmpfs on {_SHM}")
        return
    size = about.f_blocks * about.f_frsize
    text = f"{_SHM} has {size / _GIB:.1f} GiB"
    if size < _GIB:
        fix = "in a container: --shm-size=16g, or ipc: host"
        yield Diagnosis("shared_memory", Level.WARNING, text, fix)
    else:
        yield Diagnosis("shared_memory", Level.OK, text)


def ports(invocation: Invocation) -> Diagnoses:
    running = find_state_dir(invocation.environ, invocation.state_dir).running()
    if running is not None:
        yield Diagnosis("ports", Level.OK, f"everstep up (pid {running.pid}) serves {running.api}")
        return
    from everstep_services.history.settings import ApiSettings

    settings = invocation.load({"api": ApiSettings}).section(ApiSettings)
    where = f"{settings.host}:{settings.port}, for the API"
    with socket.socket(socket.AF_INET6 if ":" in settings.host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((settings.host, settings.port))
        except OSError as error:
            text = f"{where}: {error.strerror}"
            yield Diagnosis("ports", Level.WARNING, text, "everstep up --port PORT")
            return
    yield Diagnosis("ports", Level.OK, f"{where}: free")


def api(invocation: Invocation) -> Diagnoses:
    place = find_api(invocation)
    if place is None:
        fix = "everstep up, or set url in [client]"
        yield Diagnosis("api", Level.WARNING, "no API is known here", fix)
        return
    with place.open() as client:
        try:
            headers = client.probe()
            status = client.get("status")
        except CliError as error:
            yield _refused(place, error)
            return
    yield Diagnosis("api", Level.OK, f"{place.url} answers and takes the token")
    yield _clock(headers)
    yield from _node_clocks(status.get("wrong_clocks") or ())
    trouble = wrong_mode(place.token_file) if place.token_file else None
    if trouble:
        yield Diagnosis("token", Level.WARNING, trouble, f"chmod 600 {place.token_file}")


CHECKS: tuple[Check, ...] = (
    python,
    extras,
    torch,
    nats_server,
    state_directory,
    shared_memory,
    host,
    network_interface,
    recorder,
    timeouts,
    in_process_restart,
    launchers,
    ports,
    api,
    bus,
)


def _refused(place: ApiPlace, error: CliError) -> Diagnosis:
    if error.code is Exit.FORBIDDEN:
        fix = "name a file with a valid token: --token-file, or token_file in [client]"
        return Diagnosis("token", Level.CRITICAL, one_line(error), fix)
    fix = f"the API was named by {place.origin}: start it, or correct that"
    return Diagnosis("api", Level.CRITICAL, one_line(error), fix)


def _clock(headers: Mapping[str, str]) -> Diagnosis:
    try:
        theirs = parsedate_to_datetime(headers["date"])
    except (KeyError, ValueError):
        return Diagnosis("clock", Level.UNKNOWN, "the API does not tell its time")
    apart_s = abs((datetime.now(UTC) - theirs).total_seconds())
    text = f"within {max(apart_s, 1):.0f} s of the API's"  # which has whole seconds only
    if apart_s > 5:
        fix = "synchronise the clocks (chrony, ntp): times shown to people would mislead"
        return Diagnosis("clock", Level.WARNING, f"{apart_s:.0f} s from the API's", fix)
    return Diagnosis("clock", Level.OK, text)


def _node_clocks(wrong: Sequence[Mapping[str, Any]]) -> Diagnoses:
    for clock in wrong:
        offset_s = float(clock["offset_s"])
        text = (
            f"the clock of {clock['node']} is {abs(offset_s):.0f} s "
            f"{'ahead of' if offset_s > 0 else 'behind'} the API's"
        )
        fix = "synchronise the clocks (chrony, ntp): the times of this node's facts mislead"
        yield Diagnosis("clock", Level.WARNING, text, fix)


def _nearest(path: Path) -> Path:
    """The path, or the nearest folder above it that exists."""
    while not path.exists():
        path = path.parent
    return path
