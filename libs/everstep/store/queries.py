"""Queries of the tables: filtered, in pages that continue from a key, each in one snapshot."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from sqlalchemy import ColumnElement, Select, Table, case, exists, func, literal, select, tuple_
from sqlalchemy.ext.asyncio import AsyncConnection

from everstep.job_states import state_of_job
from everstep.store import tables
from everstep.store.database import Database
from everstep.store.projected.changes import compact
from everstep.store.projected.jobs import ENDED, PHASES, PHASES_A_ROUND, WAITING

Key = tuple[str | int, ...]
Record = Mapping[Any, Any]
"""A row by the names of its columns."""


class LogHead(NamedTuple):
    """How far the log and its projections reach, and in which database."""

    epoch: str
    secret: str
    last_n: int
    projected_n: int


@dataclass(frozen=True, slots=True)
class SortOrder:
    """Columns that together identify every row, and the direction."""

    columns: tuple[ColumnElement[Any], ...]
    is_descending: bool = False


@dataclass(frozen=True, slots=True)
class RowPage:
    """Some rows, and where to continue; `next_key` is None at the end."""

    rows: Sequence[Record]
    next_key: Key | None


async def log_head(database: Database) -> LogHead:
    """How far the log and its projections reach now."""
    async with database.read() as connection:
        return await _head(connection)


async def stream_position(database: Database) -> tuple[str, int] | None:
    """Where reading continues: stream and sequence; None when nothing was read yet."""
    positions = tables.positions.c
    query = select(positions.stream, positions.sequence)
    query = query.order_by(positions.updated_us.desc()).limit(1)
    async with database.read() as connection:
        row = (await connection.execute(query)).one_or_none()
    return None if row is None else (row.stream, row.sequence)


async def page(
    database: Database, query: Select[Any], order: SortOrder, after: Key | None, limit: int
) -> RowPage:
    """The next `limit` rows of a query in this order."""
    async with database.read() as connection:
        result = await connection.execute(ordered(query, order, after, limit + 1))
        rows = result.mappings().all()
    return cut(rows, order, limit)


async def first(database: Database, query: Select[Any]) -> Record | None:
    """The one row of a query, if there is one."""
    async with database.read() as connection:
        result = await connection.execute(query.limit(1))
        row: Record | None = result.mappings().one_or_none()
    return row


def ordered(query: Select[Any], order: SortOrder, after: Key | None, limit: int) -> Select[Any]:
    """The query, sorted, from the row after a key."""
    columns = order.columns
    if after is not None:
        here = tuple_(*columns)
        there = tuple_(*map(literal, after))
        query = query.where(here < there if order.is_descending else here > there)
    directed = [column.desc() if order.is_descending else column for column in columns]
    return query.order_by(*directed).limit(limit)


def cut(rows: Sequence[Record], order: SortOrder, limit: int) -> RowPage:
    """The page, from one row more than it may have."""
    shown = rows[:limit]
    if len(rows) <= limit:
        return RowPage(shown, None)
    return RowPage(shown, tuple(shown[-1][column.key or ""] for column in order.columns))


async def facts_page(
    database: Database,
    conditions: Sequence[ColumnElement[bool]],
    *,
    after: int | None,
    limit: int,
    most_bytes: int,
    is_descending: bool = False,
) -> RowPage:
    """Facts by their place in the log; fewer than `limit` if they are large."""
    order = SortOrder((tables.facts.c.n,), is_descending)
    key = None if after is None else (after,)
    async with database.read() as connection:
        # The sizes first: a page of a thousand large facts would not fit into memory.
        sizes = select(tables.facts.c.n, tables.facts.c.size).where(*conditions)
        heads = (await connection.execute(ordered(sizes, order, key, limit + 1))).all()
        fitting = _fitting([row.size for row in heads[:limit]], most_bytes)
        numbers = [row.n for row in heads[:fitting]]
        query = select(tables.facts).where(tables.facts.c.n.in_(numbers))
        rows = (await connection.execute(ordered(query, order, None, limit))).mappings().all()
    return RowPage(rows, (numbers[-1],) if fitting < len(heads) else None)


async def facts_span(
    database: Database, conditions: Sequence[ColumnElement[bool]]
) -> tuple[int, int] | None:
    """The first and the last place in the log of what was sent within a time; None for nothing.

    Of a page in the order of the log, only this part needs to be read: the index of times alone
    would not have that order.
    """
    n = tables.facts.c.n
    async with database.read() as connection:
        query = select(func.min(n), func.max(n)).where(*conditions)
        first_n, last_n = (await connection.execute(query)).one()
    return None if first_n is None else (first_n, last_n)


async def place_received(database: Database, received_us: int) -> int:
    """The place in the log from which on facts arrived at this moment or later.

    Facts get their places as they arrive, so halving finds it: no index of arrivals is needed.
    """
    facts = tables.facts.c
    query = select(facts.n, facts.received_us).order_by(facts.n).limit(1)
    async with database.read() as connection:
        first_n = (await connection.execute(select(func.min(facts.n)))).scalar_one()
        last_n = (await connection.execute(select(func.max(facts.n)))).scalar_one()
        low, high = (1, 1) if last_n is None else (first_n, last_n + 1)
        while low < high:
            middle = (low + high) // 2
            row = (await connection.execute(query.where(facts.n >= middle))).one_or_none()
            if row is None or row.n >= high or row.received_us >= received_us:
                high = middle
            else:
                low = row.n + 1
    return low


async def facts_after(
    database: Database, n: int, *, most: int, most_bytes: int
) -> tuple[Sequence[Record], LogHead]:
    """The next facts of the whole log, and how far it reached at that moment."""
    async with database.read() as connection:
        head = await _head(connection)
        facts = tables.facts.c
        sizes = select(facts.n, facts.size).where(facts.n > n).order_by(facts.n).limit(most)
        heads = (await connection.execute(sizes)).all()
        fitting = _fitting([row.size for row in heads], most_bytes)
        end = heads[fitting - 1].n if heads else n
        query = select(tables.facts).where(facts.n > n, facts.n <= end).order_by(facts.n)
        rows = (await connection.execute(query)).mappings().all()
    return rows, head


async def round_detail(
    database: Database, job: str, number: int, *, most: int, most_exits: int
) -> dict[str, Any] | None:
    """A round with its first members, exits and stalls; None when it is not known.

    Of exits fewer: each may have a traceback.
    """
    rounds = tables.rounds
    async with database.read() as connection:
        here = shown_rounds().where(rounds.c.job == job, rounds.c.round == number)
        row = (await connection.execute(here)).mappings().one_or_none()
        if row is None:
            return None
        detail = dict(row)
        for name, table, column, limit in (
            ("members", tables.round_members, tables.round_members.c.slot, most),
            ("exits", tables.rank_exits, tables.rank_exits.c.n, most_exits),
            ("stalls_seen", tables.rank_stalls, tables.rank_stalls.c.n, most),
        ):
            query = select(table).where(table.c.job == job, table.c.round == number)
            query = query.where(column.is_not(None))
            result = await connection.execute(query.order_by(column).limit(limit))
            detail[name] = result.mappings().all()
    return detail


def is_begun() -> ColumnElement[bool]:
    """Whether it is a job, and not only a name in some fact: anybody can ask about any name."""
    return tables.jobs.c.opened_n.is_not(None)


def job_state() -> ColumnElement[str]:
    """A job's state in the words of REST, derived from its columns."""
    jobs = tables.jobs.c
    phase = jobs.phase_order % PHASES_A_ROUND
    return case(
        (is_over(), jobs.end_state),
        (func.coalesce(jobs.live_allocations, 1) <= 0, "idle"),
        (func.coalesce(jobs.started_us, jobs.live_allocations, jobs.phase_order).is_(None), "idle"),
        *((phase == order, state_of_job(state)) for order, state in PHASES.items()),
        else_=PHASES[WAITING],
    )


def jobs_with_state() -> Select[Any]:
    """Jobs with their state, and the last step of the newest round that has made one.

    The column of the job has the greatest step of all rounds. The newest step may be a smaller
    one: steps that are counted, not numbered by the script, begin anew in each round.
    """
    jobs, rounds = tables.jobs.c, tables.rounds.c
    newest = (
        select(rounds.last_step)
        .where(rounds.job == jobs.job, rounds.last_step.is_not(None))
        .order_by(rounds.round.desc())
        .limit(1)
        .correlate(tables.jobs)
        .scalar_subquery()
    )
    columns = [column for column in jobs if column.name != "last_step"]
    last_step = func.coalesce(newest, jobs.last_step).label("last_step")
    stalled = _stalled_since().label("stalled_since")
    return select(*columns, last_step, stalled, job_state().label("state"))


def _stalled_since() -> ColumnElement[int | None]:
    """The last progress before the open stall of a round that runs; null if there is none."""
    jobs, incidents = tables.jobs.c, tables.incidents.c
    since = (
        select(func.min(func.coalesce(incidents.progress_us, incidents.opened_us)))
        .where(
            incidents.job == jobs.job, incidents.round == jobs.round,
            incidents.trigger == "rank_stalled", incidents.closed_fact.is_(None),
        )
        .correlate(tables.jobs)
        .scalar_subquery()
    )  # fmt: skip
    return case((job_state() == "running", since))


def is_over() -> ColumnElement[bool]:
    """The job has ended, and no later allocation continues it."""
    jobs = tables.jobs.c
    begun = func.coalesce(jobs.begun_fact, "")
    return jobs.end_state.is_not(None) & (jobs.ended_fact > begun)


def node_state() -> ColumnElement[str]:
    """The state of a node; it has left a job that is over, although its agent has not told."""
    nodes, jobs = tables.nodes.c, tables.jobs.c
    of_over = exists().where(jobs.job == nodes.job, is_over()).correlate(tables.nodes)
    return case((of_over & (nodes.state == "joined"), "left"), else_=nodes.state)


def nodes_with_state() -> Select[Any]:
    """Nodes, with their state as people understand it."""
    columns = [column for column in tables.nodes.c if column.name != "state"]
    return select(*columns, node_state().label("state"))


def slow_ranks(
    job: str | None = None, state: Literal["open", "cleared"] | None = None
) -> Select[Any]:
    """Findings about slow ranks, of one job or of all, with their state.

    A finding that was not cleared ends with its round.
    """
    found, rounds, jobs = tables.stragglers, tables.rounds, tables.jobs
    has_ended = (rounds.c.phase_order == ENDED) | (jobs.c.round > found.c.round) | is_over()
    cleared = found.c.cleared_fact.is_not(None)
    of_round = case((cleared, None), (has_ended, literal("its round is over")))
    shown: dict[str, ColumnElement[Any]] = {
        "state": case((cleared, "cleared"), (has_ended, "cleared"), else_="open"),
        "cleared_us": func.coalesce(found.c.cleared_us, rounds.c.ended_us),
        "cleared_reason": func.coalesce(found.c.cleared_reason, of_round),
    }
    columns = [column for column in found.c if column.name not in shown]
    query = select(*columns, *(column.label(name) for name, column in shown.items()))
    query = query.outerjoin(
        rounds, (rounds.c.job == found.c.job) & (rounds.c.round == found.c.round)
    ).outerjoin(jobs, jobs.c.job == found.c.job)
    query = query.where(found.c.n.is_not(None))
    query = query if job is None else query.where(found.c.job == job)
    return query if state is None else query.where(shown["state"] == state)


def shown_incidents() -> Select[Any]:
    """Incidents, each with its outcome as people read it."""
    columns = [column for column in tables.incidents.c if column.name != "outcome"]
    return select(*columns, incident_fate().label("outcome"))


def incident_fate() -> ColumnElement[Any]:
    """The outcome of an incident, or `repeated`: see `incident_outcomes`."""
    here, later = tables.incidents.c, tables.incidents.alias("later").c
    repeated = exists().where(
        here.outcome == "recovered", later.job == here.job, later.round == here.next_round,
        later.next_round.is_distinct_from(later.round),  # else its round went on
        later.first_n > here.first_n, later.fingerprint == here.fingerprint,
        later.is_transient.is_(False),
    )  # fmt: skip
    return case((repeated, "repeated"), else_=here.outcome)


def is_culprit(node: str) -> ColumnElement[bool]:
    """Whether the verdict about an incident names the node."""
    return tables.incidents.c.culprit_nodes.contains(json.dumps(node), autoescape=True)


def shown_rounds() -> Select[Any]:
    """Rounds with their state, and the verdict about the incident that ended each."""
    rounds, incidents = tables.rounds, tables.incidents.c
    of_end = (incidents.incident == rounds.c.end_incident) & (incidents.round == rounds.c.round)
    return with_verdict(select(rounds, round_state().label("state")), rounds, of_end)


def with_verdict(query: Select[Any], of: Table, joined: ColumnElement[bool]) -> Select[Any]:
    """Add the verdict about an incident of the same job, and whom its first report is about."""
    here = tables.incidents.c
    return query.add_columns(
        here.verdict_reason,
        here.culprit_ranks,
        here.culprit_nodes,
        here.is_inconclusive,
        here.cause,
        here.injected_by,
        here.rank.label("reported_rank"),
        here.node.label("reported_node"),
    ).outerjoin(tables.incidents, (here.job == of.c.job) & joined)


def round_state() -> ColumnElement[str]:
    """A round's state in the words of REST; a job that is over has only rounds that have ended."""
    rounds, jobs = tables.rounds.c, tables.jobs.c
    of_over = exists().where(jobs.job == rounds.job, is_over()).correlate(tables.rounds)
    states = ((rounds.phase_order == order, state) for order, state in PHASES.items())
    return case((of_over, PHASES[ENDED]), *states, else_=PHASES[WAITING])


def holds(column: ColumnElement[Any], text: str) -> ColumnElement[bool]:
    """The column contains the text, whatever the case of its letters."""
    return func.lower(column).contains(text.lower(), autoescape=True)


def has_label(name: str, value: str) -> ColumnElement[bool]:
    """A job has exactly this label."""
    labels = tables.jobs.c.labels
    text = compact_label(name, value)
    # Not LIKE: SQLite's ignores case. Quotes inside of names and values are escaped, so the
    # text with its quotes and what stands before it is found at a label only.
    matches = [func.replace(labels, before + text, "") != labels for before in "{,"]
    return matches[0] | matches[1]


def compact_label(name: str, value: str) -> str:
    """One label as it stands in the column."""
    return compact({name: value})[1:-1]


async def _head(connection: AsyncConnection) -> LogHead:
    meta = tables.meta.c
    query = select(meta.epoch, meta.secret, meta.last_n, meta.projected_n)
    return LogHead(*(await connection.execute(query)).one())


def _fitting(sizes: Sequence[int], most_bytes: int) -> int:
    """How many fit, but at least one, so that the page makes progress."""
    room = most_bytes
    for count, size in enumerate(sizes):
        room -= size
        if room < 0:
            return max(count, 1)
    return len(sizes)
