"""The process of `everstep up`: settings, lock, ports, and its announcement."""

import asyncio
import os
import subprocess
import sys
from typing import IO

import click
import msgspec

from everstep import __version__
from everstep.clock import SystemClock
from everstep.evidence.files import read_regular
from everstep.observe.connections import raise_descriptor_limit
from everstep.observe.http import listen
from everstep.observe.logs import configure
from everstep.observe.settings import LogSettings, ObserveSettings
from everstep.runtime import run
from everstep.settings import DEFAULT, Flag, Loaded, read_secret
from everstep_services.cli.errors import CliError, Exit
from everstep_services.cli.invocation import Invocation
from everstep_services.cli.machine.state import StateDir, age_ms, find_state_dir
from everstep_services.cli.output import say, schema
from everstep_services.cli.stack.phases import Phases
from everstep_services.cli.stack.services import stack_sections
from everstep_services.cli.stack.supervisor import Ready, StackPlan, run_stack
from everstep_services.history.settings import ApiSettings

_REMEDY = "choose another with --port PORT, or --port 0 for any that is free"


def run_up(
    invocation: Invocation, api_port: int | None, bus_host: str, report_to: int | None
) -> int:
    """Run until SIGINT or SIGTERM; the exit code."""
    phases = Phases(SystemClock(), before_ms=age_ms())
    state = find_state_dir(invocation.environ, invocation.state_dir)
    settings = _load(invocation, api_port)
    _configure_logs(invocation, settings)
    raise_descriptor_limit()
    state.create()
    with state.held():
        ground = _ground(state, settings, phases, bus_host)

        def tell(ready: Ready) -> None:
            _tell(invocation, state, ready, sys.stdout)
            if report_to is not None:
                with os.fdopen(report_to, "w") as parent:
                    _tell(invocation, state, ready, parent)

        async def main(stop: asyncio.Event) -> None:
            await run_stack(ground, stop, tell)

        phases.end("setup")
        with ground.api, ground.observe:
            return run("everstep up", main)


def _ground(state: StateDir, settings: Loaded, phases: Phases, bus_host: str) -> StackPlan:
    api, observe = settings.section(ApiSettings), settings.section(ObserveSettings)
    # Nobody scrapes a developer's machine at a fixed port, unless it was set.
    port = 0 if settings.origins["observe.port"] == DEFAULT else observe.port
    return StackPlan(
        state=state,
        settings=settings,
        api=listen(api.host, api.port, remedy=_REMEDY),
        observe=listen(observe.host, port, remedy="choose another port in [observe]"),
        phases=phases,
        bus_host=bus_host,
    )


def _load(invocation: Invocation, api_port: int | None) -> Loaded:
    return invocation.load(stack_sections(), [Flag("--port", "api.port", api_port)])


def _configure_logs(invocation: Invocation, settings: Loaded) -> None:
    log = settings.section(LogSettings)
    if settings.origins["log.level"] == DEFAULT:  # quiet, unless somebody asked
        log = msgspec.structs.replace(log, level="warning")
    if settings.origins["log.format"] == DEFAULT:
        log = msgspec.structs.replace(log, format="console")
    configure(log, "up", environ=invocation.environ)


def _tell(invocation: Invocation, state: StateDir, ready: Ready, to: IO[str]) -> None:
    running, phases = ready.running, ready.phases
    if invocation.output in {"json", "jsonl"}:
        record = {
            "schema": schema("up"),
            **msgspec.structs.asdict(running),
            "ready_ms": phases.total_ms,
            "phases_ms": phases.took_ms,
        }
        click.echo(msgspec.json.encode(record), file=to)
        return
    took = ", ".join(f"{name} {ms:.0f}" for name, ms in phases.took_ms.items())
    lines = [
        f"everstep {__version__} is ready on this machine (not for production)",
        f"  page       {running.api}/  (log in by `everstep open`)",
        f"  api        {running.api}",
        f"  metrics    {running.observe}/metrics",
        f"  token      {_token(state, is_shown=ready.has_new_token and to.isatty())}",
        f"  bus        {running.bus}  nats-server {running.bus_version}",
        f"  services   {', '.join(running.services)}",
        f"  data       {state.path}",
        f"  ready in   {phases.total_ms / 1000:.2f} s  (ms: {took})",
    ]
    click.echo("\n".join(lines), file=to)


def _token(state: StateDir, *, is_shown: bool) -> str:
    """Where the token is; the token itself only on a terminal, as others may read a log."""
    if is_shown:
        token = read_secret(state.token_file)
        return f"{token}  (shown only now; kept in {state.token_file})"
    if state.token_file.exists():
        return f"in {state.token_file}"
    database = f"sqlite:///{state.path / 'history.db'}"
    return f"lost; make one: everstep token create NAME --scope admin --database {database}"


_LAST_LINES = 5


def detached(invocation: Invocation, api_port: int | None, bus_host: str) -> int:
    """Print the announcement of `up` once it is ready; its last lines if it fails."""
    state = find_state_dir(invocation.environ, invocation.state_dir)
    state.create()
    if state.log_file.exists() and not state.log_file.is_file():  # a FIFO would wait for ever
        raise CliError(f"{state.log_file} is not a regular file: remove it")
    read, write = os.pipe()
    command = [
        *(sys.executable, "-P", "-m", "everstep_services.cli", "up"),
        *("--state-dir", str(state.path), "--report-to", str(write)),
        *("--bus-host", bus_host),
        *_flags(invocation, api_port),
    ]
    with os.fdopen(read) as report, state.log_file.open("a") as log:
        state.log_file.chmod(0o600)
        process = subprocess.Popen(  # noqa: S603  ourselves
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=log,
            pass_fds=[write],
            start_new_session=True,
        )
        os.close(write)
        report_text = report.read()  # ends when it is ready, and when it has failed
    if report_text:
        click.echo(report_text, nl=False)
        say(f"it runs as pid {process.pid}, logs into {state.log_file}; stop it: everstep down")
        process.returncode = 0  # it is meant to outlive us
        return Exit.OK
    code = process.wait()
    raise CliError(_last_lines(state), Exit(code) if code in set(Exit) else Exit.ERROR)


def _flags(invocation: Invocation, api_port: int | None) -> list[str]:
    flags: list[str] = []
    if invocation.config is not None:
        flags += ["--config", str(invocation.config.absolute())]
    if invocation.output is not None:
        flags += ["--output", invocation.output]
    if api_port is not None:
        flags += ["--port", str(api_port)]
    return flags


def _last_lines(state: StateDir) -> str:
    lines = read_regular(state.log_file).decode(errors="replace").splitlines()[-_LAST_LINES:]
    last = lines[-1].removeprefix("everstep: ") if lines else "it said nothing"
    return f"up failed: {last} (see {state.log_file})"
