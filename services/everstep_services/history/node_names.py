"""What is on record about nodes that are named: which of them there are, and their jobs."""

from collections.abc import Mapping, Sequence

from sqlalchemy import exists, or_, select

from everstep.store import tables
from everstep.store.database import Database
from everstep.store.queries import is_begun, is_over
from everstep_services.history.operator_requests import did_you_mean, unknown_nodes

_CANDIDATES_MOST = 5000
_JOBS_MOST = 1000


async def unknown_nodes_text(
    database: Database, names: Sequence[str], aliases: Mapping[str, str]
) -> str | None:
    """The refusal of those names that are neither on record nor aliases of nodes that are."""
    ids = {name: aliases.get(name, name) for name in names}
    column = tables.nodes.c.node
    async with database.read() as connection:
        query = select(column).where(column.in_(sorted(set(ids.values()))))
        ids_known = set((await connection.execute(query)).scalars())
        unknown = sorted(name for name, id_ in ids.items() if id_ not in ids_known)
        if not unknown:
            return None
    some = await _some_nodes(database)
    candidates = [*some, *(name for name, id_ in aliases.items() if id_ in some)]
    return unknown_nodes(unknown, candidates, aliases)


async def similar_nodes(database: Database, name: str) -> str:
    """The nodes on record with names close to this one, as the end of a sentence."""
    return did_you_mean(name, await _some_nodes(database))


async def jobs_of_node(database: Database, node: str) -> list[str]:
    """The jobs that the node takes part in."""
    jobs, members, nodes = tables.jobs.c, tables.round_members.c, tables.nodes.c
    has_slot = exists().where(
        members.job == jobs.job, members.round == jobs.round, members.node == node
    )
    has_joined = exists().where(nodes.node == node, nodes.job == jobs.job, nodes.state == "joined")
    query = select(jobs.job).where(is_begun(), ~is_over(), or_(has_slot, has_joined))
    async with database.read() as connection:
        return sorted((await connection.execute(query.limit(_JOBS_MOST))).scalars())


async def _some_nodes(database: Database) -> list[str]:
    async with database.read() as connection:
        query = select(tables.nodes.c.node).limit(_CANDIDATES_MOST)
        return list((await connection.execute(query)).scalars())
