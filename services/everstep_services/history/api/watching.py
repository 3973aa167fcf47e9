"""Whether stalls are looked for in a job, and why not: a detector that is off must be seen."""

from collections import Counter

from sqlalchemy import exists, func, select

from everstep.store import tables
from everstep.store.instants import from_us
from everstep.store.reads import Order, Record, page
from everstep_services.history.api.context import Context
from everstep_services.history.api.dto import Watch

_WORST_FIRST = ("off", "paused", "learning", "armed")
_AT_WORK = frozenset({"starting", "running"})
_STATES_MOST = 20


async def watch_of(context: Context, job: Record) -> Watch | None:
    """As the agents of the newest round said last."""
    if job["state"] not in _AT_WORK:
        reason = f"no ranks run: the job is {job['state']}"
        return Watch(state="off", reason=reason, at=None, node=None, nodes={})
    watches, members = tables.node_watches.c, tables.round_members.c
    takes_part = exists().where(
        members.job == watches.job, members.round == job["round"], members.node == watches.node
    )
    said = watches.watch_state
    columns = (said, watches.watch_reason, watches.watch_us, watches.node)
    nodes = func.count().over(partition_by=said).label("nodes")
    place = func.row_number().over(partition_by=said, order_by=watches.node).label("place")
    here = select(*columns, nodes, place).where(watches.job == job["job"], takes_part).subquery()
    # In one question: an agent may say something else at any moment.
    query = select(here).where(here.c.place == 1)
    by_state = Order((here.c.watch_state,))
    found = await page(context.database, query, by_state, None, _STATES_MOST)
    rows = {str(row["watch_state"]): row for row in found.rows}
    if not rows:
        return _as_beats_say(context, job)
    counts = {state: int(row["nodes"]) for state, row in rows.items()}
    state = _worst(counts)
    worst = rows[state]
    return Watch(
        state=state,
        reason=worst["watch_reason"],
        at=from_us(worst["watch_us"]),
        node=worst["node"],
        nodes=counts,
    )


def _as_beats_say(context: Context, job: Record) -> Watch | None:
    nodes = context.beats.view(job["job"]).nodes
    counts = Counter(one.beat.watch for one in nodes if one.beat.watch)
    if not counts:
        return None
    state = _worst(counts)
    node = next(one.beat.node for one in nodes if one.beat.watch == state)
    reason = "as its agent says; nothing is on record yet"
    return Watch(state=state, reason=reason, at=None, node=node, nodes=counts)


def _worst(counts: Counter[str] | dict[str, int]) -> str:
    """What we do not know worries nobody."""
    return next((state for state in _WORST_FIRST if state in counts), min(counts))
