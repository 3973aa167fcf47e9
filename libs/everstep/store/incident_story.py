"""One incident with all that belongs to it, in one snapshot."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Select, Table, case, except_, func, or_, select, true
from sqlalchemy.ext.asyncio import AsyncConnection

from everstep.incident_causes import meaning_of
from everstep.store import tables
from everstep.store.database import Database
from everstep.store.queries import Record, is_culprit, shown_incidents, shown_rounds, slow_ranks

_FEW = 50
_MANY = 200
_PIECES = 1024
_SIMILAR = 20
_NODES = 8
_ACTS = 1000
_SLOW_BEFORE_US = 600_000_000
_TIERS = ("memory", "disk", "peer", "global")
"""From the nearest to the farthest."""


@dataclass(frozen=True, slots=True)
class IncidentStory:
    """What is known of one incident."""

    incident: Record
    primary: Record | None
    """The exit that explains the others."""
    primary_body: str | None
    """The fact of that exit, whole."""
    stall: Record | None
    """The stall of the rank that the first report is about, unless the rank moved again before."""
    stalls: Sequence[Record]
    """The stalls of all ranks of the round that did not move again before the incident."""
    located: Record | None
    """Which ranks stopped first, where a stall began the incident."""
    slow_ranks: Sequence[Record]
    """Ranks that were slow when it began, or not long before."""
    numerics: Record | None
    """The result that cannot be right, whose incident it is."""
    numerics_acts: Sequence[Record]
    exits: Sequence[Record]
    """The first failures of the round."""
    verdicts: Sequence[Record]
    """All revisions; the one in force comes first."""
    corrections: Sequence[Record]
    """The corrections by people, the newest first."""
    similar: Sequence[Record]
    """Other incidents with the same fingerprint or the same node, the newest first."""
    evidence: Sequence[Record]
    actions: Sequence[Record]
    rounds: Sequence[Record]
    """The round that it broke, and the rounds that should bring the training back."""
    nodes_out: Sequence[str]
    nodes_in: Sequence[str]


async def incident_story(database: Database, job: str, incident: str) -> IncidentStory | None:
    """The story of an incident; None when no fact has named it."""
    async with database.read() as connection:
        here = tables.incidents.c
        query = shown_incidents().where(here.job == job, here.incident == incident)
        row = (await connection.execute(query)).mappings().one_or_none()
        return None if row is None else await _story(connection, job, row)


async def jobs_of_incident(database: Database, incident: str) -> Sequence[str]:
    """The jobs that have an incident of this name: normally one.

    Agents of any job can send evidence about any name; rendezvous alone opens an incident. One
    that was not opened yet counts only where none was.
    """
    here = tables.incidents.c
    query = select(here.job).where(here.incident == incident).order_by(here.first_n).limit(_FEW)
    async with database.read() as connection:
        opened = await connection.execute(query.where(here.opened_fact.is_not(None)))
        return list(opened.scalars()) or list((await connection.execute(query)).scalars())


async def culprit_rank_nodes(
    database: Database, incidents: Sequence[Record]
) -> dict[tuple[str, str], list[str]]:
    """The nodes on which the culprit ranks of these incidents ran, by job and incident."""
    nodes: dict[tuple[str, str], list[str]] = {}
    async with database.read() as connection:
        for row in incidents:
            ranks = json.loads(row["culprit_ranks"] or "[]")[:_NODES]
            if ranks and row["round"] is not None:
                nodes[row["job"], row["incident"]] = await _seats(connection, row, ranks)
    return nodes


async def _seats(connection: AsyncConnection, row: Record, ranks: Sequence[int]) -> list[str]:
    members = tables.round_members.c
    has_rank = (
        (members.first_rank <= rank) & (members.first_rank + members.ranks > rank) for rank in ranks
    )
    query = (
        select(members.node)
        .where(members.job == row["job"], members.round == row["round"])
        .where(members.node.is_not(None), or_(*has_rank))
    )
    return list((await connection.execute(query.order_by(members.slot).limit(_NODES))).scalars())


async def piece_of_evidence(
    database: Database, job: str | None, incident: str, evidence: str
) -> Record | None:
    """One piece of the evidence about an incident, by its fact; a capture is of any job."""
    here = tables.evidence.c
    query = select(tables.evidence).where(here.id == evidence, here.incident == incident)
    if job is not None:
        query = query.where(here.job == job)
    async with database.read() as connection:
        return (await connection.execute(query)).mappings().one_or_none()


async def pieces_of_evidence(
    database: Database, job: str, incident: str, kind: str
) -> Sequence[Record]:
    """All pieces of a kind about an incident, each with the `world_size` of its round.

    `ended` is the rank whose end was the first sign of the incident.
    """
    here, rounds, incidents = tables.evidence, tables.rounds.c, tables.incidents.c
    of_incident = (incidents.job == here.c.job) & (incidents.incident == here.c.incident)
    ended = case((incidents.trigger == "rank_exited", incidents.rank)).label("ended")
    of_round = (rounds.job == here.c.job) & (rounds.round == here.c.round)
    query = (
        select(here, rounds.world_size, ended)
        .outerjoin(tables.rounds, of_round)
        .outerjoin(tables.incidents, of_incident)
        .where(here.c.job == job, here.c.incident == incident, here.c.kind == kind)
    )
    async with database.read() as connection:
        return await _all(connection, query.order_by(here.c.n).limit(_PIECES))


async def _story(connection: AsyncConnection, job: str, row: Record) -> IncidentStory:
    numerics = await _numerics(connection, job, row["incident"])
    # Of a case whose round went on: later incidents are about the ends in it.
    has_ended = numerics is None or numerics["incident"] != row["incident"]
    exits = await _failures(connection, job, row) if has_ended else []
    actions = await _of_incident(connection, tables.actions, row)
    primary = await _primary(connection, job, row, actions) if has_ended else None
    rounds = await _rounds(connection, job, row)
    stalls = await _stalls(connection, job, row) if has_ended else []
    out, in_ = await _moves(connection, job, [round["round"] for round in rounds])
    return IncidentStory(
        incident=await _with_restore(connection, job, row),
        primary=primary,
        primary_body=None if primary is None else await _body(connection, primary["id"]),
        stall=next((stall for stall in stalls if stall["rank"] == row["rank"]), None),
        stalls=stalls,
        located=await _located(connection, job, row),
        slow_ranks=await _slow_ranks(connection, job, row),
        numerics=numerics,
        numerics_acts=[]
        if numerics is None
        else await numerics_acts(connection, job, [numerics["case"]]),
        exits=exits,
        verdicts=await _verdicts(connection, job, row),
        corrections=await _of_incident(connection, tables.verdict_corrections, row, newest=_FEW),
        similar=await _similar(connection, row),
        evidence=await _of_incident(connection, tables.evidence, row),
        actions=actions,
        rounds=rounds,
        nodes_out=out,
        nodes_in=in_,
    )


async def _with_restore(connection: AsyncConnection, job: str, row: Record) -> Record:
    """The incident with the state that the next round has loaded.

    Rendezvous closes the incident, and does not know the state: agents record its restore.
    """
    is_another = row["next_round"] not in (None, row["round"])
    if row["restored_step"] is not None or not is_another:
        return row
    here = tables.facts.c
    query = select(here.body).where(
        here.job == job, here.kind == "checkpoint_restored", here.round == row["next_round"]
    )
    newest = query.order_by(here.n.desc()).limit(1)
    body = (await connection.execute(newest)).scalar_one_or_none()
    if body is None:
        return row
    restore = json.loads(body)
    read = {tier["tier"] for tier in restore["tiers"]}
    farthest = next((tier for tier in reversed(_TIERS) if tier in read), None)
    return {**row, "restored_step": restore["step"], "restored_tier": farthest}


def _until_over(row: Record, at_us: ColumnElement[Any]) -> ColumnElement[bool]:
    """Excludes what came in the incident's round when the incident was over: the round went on."""
    went_on = row["round"] is not None and row["next_round"] == row["round"]
    return at_us <= row["closed_us"] if went_on else true()


async def _failures(connection: AsyncConnection, job: str, row: Record) -> Sequence[Record]:
    exits = tables.rank_exits
    query = select(exits).where(
        exits.c.job == job,
        exits.c.round == row["round"],
        exits.c.is_failure.is_(True),
        _until_over(row, exits.c.at_us),
    )
    return await _all(connection, query.order_by(exits.c.n).limit(_FEW))


async def _primary(
    connection: AsyncConnection, job: str, row: Record, actions: Sequence[Record]
) -> Record | None:
    """The exit of a culprit, else the one that the first decision rests on or the first report.

    They differ when a later report, or the verdict, explained the others better. None if the
    verdict names others than the rank of the first report, and none of them is known to have ended,
    or if it names nobody.
    """
    table = tables.rank_exits
    here = (table.c.job == job, table.c.round == row["round"], _until_over(row, table.c.at_us))
    culprits = json.loads(row["culprit_ranks"] or "[]")[:_FEW]
    nobody = not culprits and not json.loads(row["culprit_nodes"] or "[]")
    if nobody and row["verdict_fact"] and not row["is_inconclusive"]:
        return None
    if culprits and row["rank"] not in culprits:
        of_culprits = select(table).where(*here, table.c.rank.in_(culprits))
        own = await _all(connection, of_culprits.order_by(table.c.n).limit(1))
        if own or row["rank"] is not None:
            return own[0] if own else None
    rests_on = [id_ for action in actions for id_ in json.loads(action["rests_on"] or "[]")]
    named = [*rests_on, *([row["trigger_fact"]] if row["trigger_fact"] else [])][:_FEW]
    wanted: ColumnElement[bool] = table.c.id.in_(named)
    if row["rank"] is not None:
        wanted |= table.c.rank == row["rank"]
    elif row["node"] is None:
        wanted |= table.c.is_failure.is_(True)
    candidates = await _all(
        connection, select(table).where(*here, wanted).order_by(table.c.n).limit(_MANY)
    )
    by_id = {item["id"]: item for item in candidates}
    best = next((by_id[id_] for id_ in named if id_ in by_id), None)
    return best or (candidates[0] if candidates else None)


async def _stalls(connection: AsyncConnection, job: str, row: Record) -> Sequence[Record]:
    """The newest of each rank first."""
    stalls = tables.rank_stalls
    goes_on = stalls.c.recovered_us.is_(None)
    if row["next_round"] == row["round"] and row["opened_us"] is not None:
        goes_on |= stalls.c.recovered_us >= row["opened_us"]  # the incident was over with it
    query = select(stalls).where(
        stalls.c.job == job,
        stalls.c.round == row["round"],
        stalls.c.n.is_not(None),
        goes_on,
        _until_over(row, stalls.c.at_us),
    )
    own_first = (stalls.c.rank == row["rank"]).desc()
    return await _all(connection, query.order_by(own_first, stalls.c.n.desc()).limit(_FEW))


async def _located(connection: AsyncConnection, job: str, row: Record) -> Record | None:
    if meaning_of(row["trigger"] or "").evidence != "stall":
        return None  # a stall in this round belongs to another incident
    located = tables.stalls_located
    of_round = (located.c.job == job) & (located.c.round == row["round"])
    query = select(located).where(of_round, _until_over(row, located.c.at_us))
    rows = await _all(connection, query.order_by(located.c.n.desc()).limit(1))
    return rows[0] if rows else None


async def _slow_ranks(connection: AsyncConnection, job: str, row: Record) -> Sequence[Record]:
    """Its own rank first, then the newest."""
    began_us = row["opened_us"]
    if began_us is None:
        return []
    findings = tables.stragglers.c
    until_us = func.coalesce(findings.cleared_us, tables.rounds.c.ended_us)
    of_its_round = until_us.is_(None) & (findings.round == row["round"])
    query = slow_ranks(job).where(
        findings.found_us <= began_us, of_its_round | (until_us >= began_us - _SLOW_BEFORE_US)
    )
    own_first = case((findings.rank == row["rank"], 0), else_=1)
    return await _all(connection, query.order_by(own_first, findings.n.desc()).limit(_FEW))


async def _numerics(connection: AsyncConnection, job: str, incident: str) -> Record | None:
    """The case of an incident, or of one that the end of the round has taken over."""
    cases, merged = tables.numerics_cases, tables.incidents.c
    own = select(merged.incident).where(merged.job == job, merged.merged_into == incident)
    is_of_it = (cases.c.incident == incident) | cases.c.incident.in_(own)
    query = select(cases).where(cases.c.job == job, is_of_it).limit(1)
    rows = await _all(connection, query)
    return rows[0] if rows else None


async def numerics_acts(
    connection: AsyncConnection, job: str, cases: Sequence[str]
) -> Sequence[Record]:
    """What followed from these cases of a job, in order."""
    acts = tables.numerics_acts
    query = select(acts).where(acts.c.job == job, acts.c.case.in_(cases)).order_by(acts.c.n)
    return await _all(connection, query.limit(_ACTS))


async def _verdicts(connection: AsyncConnection, job: str, row: Record) -> Sequence[Record]:
    table = tables.verdicts
    query = select(table).where(table.c.job == job, table.c.incident == row["incident"])
    holds_first = (table.c.verdict_fact == row["verdict_fact"]).desc()
    return await _all(connection, query.order_by(holds_first, table.c.n.desc()).limit(_FEW))


async def _similar(connection: AsyncConnection, row: Record) -> Sequence[Record]:
    """The same failure first, then the nodes that the first report or the verdict names.

    Where the job has only had one node, all of its incidents are on that node: unless the verdict
    names the node, that says nothing.
    """
    here = tables.incidents.c
    prints = [row["fingerprint"]] if row["fingerprint"] else []
    nodes = set(json.loads(row["culprit_nodes"] or "[]")[:_NODES])
    if row["node"] is not None and await _had_several_nodes(connection, row["job"]):
        nodes.add(row["node"])
    same = here.fingerprint.in_(prints)
    of_node: ColumnElement[bool] = or_(here.node.in_(nodes), *map(is_culprit, nodes))
    other = or_(here.job != row["job"], here.incident != row["incident"])
    query = shown_incidents().add_columns(case((same, "fingerprint"), else_="node").label("same"))
    query = query.where(other, or_(same, of_node))
    return await _all(
        connection, query.order_by(case((same, 0), else_=1), here.first_n.desc()).limit(_SIMILAR)
    )


async def _had_several_nodes(connection: AsyncConnection, job: str) -> bool:
    members = tables.round_members.c
    query = select(members.node).where(members.job == job, members.node.is_not(None)).distinct()
    return len(await _all(connection, query.limit(2))) > 1


async def _of_incident(
    connection: AsyncConnection, table: Table, row: Record, *, newest: int | None = None
) -> Sequence[Record]:
    """The first rows about an incident; with `newest`, that number of the last, in reverse."""
    query = select(table).where(table.c.job == row["job"], table.c.incident == row["incident"])
    order = table.c.n if newest is None else table.c.n.desc()
    return await _all(connection, query.order_by(order).limit(newest or _MANY))


async def _rounds(connection: AsyncConnection, job: str, row: Record) -> Sequence[Record]:
    rounds, incident = tables.rounds, row["incident"]
    belongs = (rounds.c.recovers_incident == incident) | (rounds.c.end_incident == incident)
    for number in (row["round"], row["next_round"]):
        if number is not None:
            belongs |= rounds.c.round == number
    query = shown_rounds().where(rounds.c.job == job, belongs)
    return await _all(connection, query.order_by(rounds.c.round).limit(_FEW))


async def _moves(
    connection: AsyncConnection, job: str, numbers: Sequence[int]
) -> tuple[Sequence[str], Sequence[str]]:
    """Nodes that had a slot in the first of these rounds and not in the last, and vice versa."""
    members = tables.round_members.c

    def of(number: int) -> Select[Any]:
        here = (members.job == job, members.round == number, members.node.is_not(None))
        return select(members.node).where(*here)

    async def only(first: int, other: int) -> Sequence[str]:
        query = except_(of(first), of(other)).limit(_MANY)
        return sorted(str(node) for node in (await connection.execute(query)).scalars())

    # If a round has not formed, or its facts have not come, no node is known to be missing.
    heard = [n for n in numbers if await _all(connection, of(n).limit(1))]
    if len(heard) < 2:
        return [], []
    return await only(heard[0], heard[-1]), await only(heard[-1], heard[0])


async def _body(connection: AsyncConnection, id_: str) -> str | None:
    query = select(tables.facts.c.body).where(tables.facts.c.id == id_)
    body: str | None = (await connection.execute(query)).scalar_one_or_none()
    return body


async def _all(connection: AsyncConnection, query: Select[Any]) -> Sequence[Record]:
    rows: Sequence[Record] = (await connection.execute(query)).mappings().all()
    return rows
