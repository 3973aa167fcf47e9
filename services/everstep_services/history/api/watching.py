"""Whether stalls are looked for in a job, and why not: a detector that is off must be seen."""

from collections import Counter

from sqlalchemy import exists, func, select

from everstep.store import tables
from everstep.store.instants import from_us
from everstep.store.reads import Order, Record, first, page
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
    here = (watches.job == job["job"], takes_part)
    count = func.count().label("nodes")
    query = select(watches.watch_state, count).where(*here).group_by(watches.watch_state)
    by_state = Order((watches.watch_state,))
    found = await page(context.database, query, by_state, None, _STATES_MOST)
    counts = {str(row["watch_state"]): int(row["nodes"]) for row in found.rows}
    if not counts:
        return _as_beats_say(context, job)
    state = _worst(counts)
    worst = select(tables.node_watches).where(*here, watches.watch_state == state)
    row = await first(context.database, worst.order_by(watches.node))
    assert row is not None, "a fact of a moment ago is still on record"
    return Watch(
        state=state,
        reason=row["watch_reason"],
        at=from_us(row["watch_us"]),
        node=row["node"],
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
