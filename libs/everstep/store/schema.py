"""Brings a database to the schema of this version; the first of several replicas does it.

Tables that cannot be rebuilt (the log, positions, tokens) change by alembic's steps. Tables that
are projected from the log have a version instead: a newer version creates them again, empty, and
the projector fills them from the log.
"""

import asyncio
import logging
import secrets
from functools import cache
from pathlib import Path

from alembic.config import Config
from alembic.runtime.environment import EnvironmentContext
from alembic.runtime.migration import MigrationContext, RevisionStep, StampStep
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, func, select, text, update

from everstep.ids import new_id
from everstep.store import tables
from everstep.store.database import Database
from everstep.store.errors import SchemaTooNewError
from everstep.store.projected.registry import VERSION

log = logging.getLogger(__name__)
logging.getLogger("alembic").setLevel(logging.WARNING)  # we log its work in one event

_ADVISORY_LOCK = 0x65766572_73746570  # "everstep"


async def upgrade(database: Database) -> None:
    """Apply the missing steps in one transaction, under a lock: replicas may start at once.

    Raises `SchemaTooNewError` when a newer version has been here, and changes nothing.
    """
    scripts = await asyncio.to_thread(_scripts)  # reads files
    async with database.write() as connection:
        if database.kind == "postgresql":  # SQLite's write lock is held already
            lock = text("SELECT pg_advisory_xact_lock(:key)")
            await connection.execute(lock, {"key": _ADVISORY_LOCK})
        await connection.run_sync(_upgrade, scripts, database.place)


def head() -> str:
    """The newest step that this version knows. Reads files."""
    return str(_scripts().get_current_head())


def known_revisions() -> frozenset[str]:
    """Every step that this version knows. Reads files."""
    return frozenset(script.revision for script in _scripts().walk_revisions())


def current_revision(connection: Connection) -> str | None:
    """The newest step that a database has; None where it has no schema."""
    return MigrationContext.configure(connection).get_current_revision()


@cache
def _scripts() -> ScriptDirectory:
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    config.set_main_option("path_separator", "newline")
    scripts = ScriptDirectory.from_config(config)
    scripts.get_heads()  # loads every step now, while we are in a thread
    return scripts


def _upgrade(connection: Connection, scripts: ScriptDirectory, place: str) -> None:
    revision = current_revision(connection)
    newest = scripts.get_current_head()
    if revision is not None and revision not in known_revisions():
        raise SchemaTooNewError(place, revision, str(newest))

    def missing(current: object, context: MigrationContext) -> list[StampStep | RevisionStep]:
        del context
        steps = scripts._upgrade_revs("head", current)  # type: ignore[arg-type]  # noqa: SLF001  the documented way
        return list(steps)

    if revision != newest:
        with EnvironmentContext(_config(scripts), scripts) as environment:
            environment.configure(connection=connection, fn=missing, render_as_batch=True)
            environment.run_migrations()
        log.info("schema_upgraded database=%s found=%s now=%s", place, revision, newest)
    _ensure_meta(connection)
    _ensure_projected(connection, place)


def _config(scripts: ScriptDirectory) -> Config:
    """The configuration that alembic requires: nothing but the scripts."""
    config = Config()
    config.set_main_option("script_location", str(scripts.dir))
    return config


def _ensure_meta(connection: Connection) -> None:
    if connection.execute(select(func.count()).select_from(tables.meta)).scalar_one():
        return
    row = {
        "one": 1,
        "epoch": new_id()[12:24],
        "secret": secrets.token_hex(32),
        "last_n": 0,
        "projected_n": 0,
        "projection": 0,
    }
    connection.execute(tables.meta.insert().values(row))


def _ensure_projected(connection: Connection, place: str) -> None:
    version = connection.execute(select(tables.meta.c.projection)).scalar_one()
    if version > VERSION:
        raise SchemaTooNewError(place, f"projection {version}", f"projection {VERSION}")
    if version < VERSION:
        projected = list(tables.projected.values())
        tables.metadata.drop_all(connection, tables=projected)
        tables.metadata.create_all(connection, tables=projected)
        fresh = {"projection": VERSION, "projected_n": 0}
        connection.execute(update(tables.meta).values(fresh))
        log.info("projection_emptied database=%s found=%d now=%d", place, version, VERSION)
