"""For people who write a step: `alembic -c …/migrations/alembic.ini revision --autogenerate`.

The service itself does not run this file; see `everstep.store.schema`.
"""

import asyncio

from alembic import context
from sqlalchemy import Connection
from sqlalchemy.ext.asyncio import create_async_engine

from everstep.store.database import parse_url
from everstep.store.tables import metadata, projected

_PROJECTED = {table.name for table in projected.values()}


def _run(connection: Connection) -> None:
    context.configure(
        connection=connection,
        target_metadata=metadata,
        render_as_batch=True,
        include_name=lambda name, kind, _: kind != "table" or name not in _PROJECTED,
        include_object=lambda _, name, kind, *__: kind != "table" or name not in _PROJECTED,
    )
    with context.begin_transaction():
        context.run_migrations()


async def _main() -> None:
    url, _ = parse_url(context.config.get_main_option("sqlalchemy.url") or "")
    engine = create_async_engine(url)
    async with engine.begin() as connection:
        await connection.run_sync(_run)
    await engine.dispose()


asyncio.run(_main())
