"""Serves a bundle: its own copy of the database, the ordinary API and pages, and no bus."""

import asyncio
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from everstep import runtime
from everstep.clock import SystemClock
from everstep.observe.http import listen, serve_asgi, url_of
from everstep.store.database import Database, open_database
from everstep.store.errors import SchemaTooOldError, StoreError
from everstep.store.queries import log_head
from everstep.store.record_file import RecordFile
from everstep.store.schema import upgrade
from everstep_services.cli.api.record import AbsentBus
from everstep_services.cli.cells import cell
from everstep_services.cli.invocation import Invocation
from everstep_services.cli.output import print_json, print_line, say, schema
from everstep_services.history.api.app import create_app, make_context
from everstep_services.history.api.context import Connectedness
from everstep_services.history.bundle import (
    BundleError,
    BundleOrigin,
    damage_text,
    read_origin,
    unpack,
)
from everstep_services.history.commands import make_token
from everstep_services.history.notifier import LogNotifier
from everstep_services.history.settings import ApiSettings


def serve_bundle(invocation: Invocation, bundle: Path, host: str, port: int, most_gib: int) -> int:
    """Serve until a signal. Returns the exit code."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="everstep-serve-")))
        listener = listen(host, port, remedy="choose another port with --port")
        stack.callback(listener.close)
        database = folder / "history.db"
        with _cleaning_up_when_ended():
            unpack(bundle, database, most_gib)

        async def main(stop: asyncio.Event) -> None:
            async with open_database(f"sqlite:///{database}") as opened:
                try:
                    await _check(bundle, database)
                    await upgrade(opened)
                    app = await _app(invocation, opened, listener, folder)
                except Exception as error:
                    if damage := damage_text(error):
                        raise BundleError(f"{bundle} cannot be served: {damage}") from error
                    raise
                await serve_asgi(app, listener, stop)

        return runtime.run("serve", main)


@contextmanager
def _cleaning_up_when_ended() -> Iterator[None]:
    """Let SIGTERM raise inside the block, so that the folder is removed."""

    def end(number: int, _frame: object) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


async def _app(
    invocation: Invocation, database: Database, listener: socket.socket, folder: Path
) -> Any:
    """What serves the pages and the API; how to reach it is printed."""
    clock, absent = SystemClock(), AbsentBus("a bundle answers from what was exported only")
    bus: Any = absent
    nothing_else = Connectedness(lambda: False, lambda: False)
    origin = await read_origin(database)
    context = await make_context(
        ApiSettings(), database, LogNotifier(), nothing_else, clock=clock, bus=bus, bundle=origin
    )
    token = await make_token(database, "bundle", "read", clock)
    token_file = folder / "token"
    await asyncio.to_thread(_write_secret, token_file, token)
    facts = (await log_head(database)).last_n
    url = url_of(listener)
    link = f"{url}/login?code={await context.login_codes.make(token)}"
    told = {"url": url, "link": link, "token_file": str(token_file), "facts": facts}
    told |= _about(origin)
    if invocation.output == "jsonl":
        print_line({"schema": schema("bundle_server"), **told})
    elif invocation.output == "json":
        print_json({"schema": schema("bundle_server"), **told})
    else:
        when = told["exported_at"]
        about = "" if origin is None else f" of job {cell(origin.job)}"
        exported = f", exported {when}" if when else ""
        say(f"{facts} facts{about}{exported}; read-only. The link logs in once, within a minute:")
        say(f"  {link}")
        say("for commands and programs:")
        say(f"  everstep jobs --api {url} --token-file {cell(token_file)}")
    return create_app(context)


def _about(origin: BundleOrigin | None) -> dict[str, str | None]:
    if origin is None:
        return {"job": None, "exported_at": None}
    at = origin.exported_at
    when = None if at is None else at.isoformat(timespec="seconds").replace("+00:00", "Z")
    return {"job": origin.job, "exported_at": when}


async def _check(bundle: Path, database: Path) -> None:
    """Refuse a database that is not of ours, before anything is written into it."""
    record = RecordFile(database)
    try:
        await record.check()
    except SchemaTooOldError:
        pass  # of an older release: it is upgraded
    except StoreError as error:
        raise BundleError(f"{bundle} holds no history that this release can read") from error
    finally:
        await record.close()


def _write_secret(file: Path, text: str) -> None:
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as written:
        written.write(text + "\n")
