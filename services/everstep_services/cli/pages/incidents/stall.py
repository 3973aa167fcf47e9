"""A stall in plain words: who stopped first, where, past which limit, and who waited."""

from collections.abc import Iterator, Sequence

from everstep_services.cli.cells import Record, cell, counted, listed, span

_SHOWN = 5
_RULES = {
    "learned": "learned from how long it takes",
    "floor": "the least that a limit may be",
    "cap": "the most that a limit may be",
    "configured": "set by --limit or `everstep limits set`",
    "default": "the default, as nothing was learned yet",
}


def stall_lines(incident: Record) -> Iterator[str]:
    """Nothing where no rank has stalled."""
    stall, located = incident["stall"], incident["located"]
    if located is not None:
        yield from _first(located)
    if stall is not None:
        yield from _stalled(stall)
    others = [other for other in incident["stalls"] if stall is None or other["id"] != stall["id"]]
    others.sort(key=lambda other: other["rank"])
    if others:
        shown = ", ".join(f"rank {other['rank']}{_in(other)}" for other in others[:_SHOWN])
        more = f" and {len(others) - _SHOWN} more" if len(others) > _SHOWN else ""
        yield f"  past their limits, too: {shown}{more}"
    if located is not None and located["waiting_ranks"] and located["is_certain"]:
        waiting = located["waiting_ranks"]
        yield f"  {counted(waiting, 'other rank')} waited for {_them(located['first_ranks'] or ())}"


def _first(located: Record) -> Iterator[str]:
    ranks, nodes = located["first_ranks"] or (), located["first_nodes"] or ()
    lead = f", {span(located['lead_s'])} before all others" if located["lead_s"] else ""
    sure = "" if located["is_certain"] else " (likely: beats cannot tell for sure)"
    on = f" on {listed(nodes, _SHOWN)}" if nodes else ""
    noun = "rank" if len(ranks) == 1 else "ranks"
    stopped = f"stopped first{_in(located)}{lead}{sure}"
    if len(ranks) > 1 and not located["waiting_ranks"]:
        stopped = "stopped together, as far as beats tell"
    yield f"  {noun} {listed(ranks, _SHOWN)}{on} {stopped}"
    if located["reason"]:
        yield f"  as beats show: {cell(located['reason'])}"


def _stalled(stall: Record) -> Iterator[str]:
    origin = stall["limit_origin"]
    rule = (
        f"set by {cell(origin)}"
        if origin
        else _RULES.get(stall["limit_source"], cell(stall["limit_source"]))
    )
    limit = f"the limit there is {span(stall['limit_s'])}{f', {rule}' if rule else ''}"
    after = "" if stall["step"] is None else f" after step {stall['step']}"
    waited = span(stall["waited_s"])
    yield f"  rank {stall['rank']} made no progress for {waited}{_in(stall)}{after}; {limit}"
    if stall["blocked_in"]:
        yield f"  of its process: {cell(stall['blocked_in'])}"


def _in(record: Record) -> str:
    return f" in section {cell(record['section'])}" if record["section"] else ""


def _them(ranks: Sequence[object]) -> str:
    return "it" if len(ranks) == 1 else "them"
