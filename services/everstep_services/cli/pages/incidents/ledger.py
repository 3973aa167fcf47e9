"""Where the time of an incident went, and what it cost, as text."""

from collections.abc import Iterator

from everstep.lost_steps import FIRST_STEP, healed_in_words
from everstep_services.cli.cells import (
    Record,
    aligned,
    bar,
    cell,
    counted,
    span,
)

_LEDGER = {
    "unfinished": "unfinished step", "detect": "detect", "evidence": "evidence",
    "decide": "decide", "stop": "stop", "rendezvous": "rendezvous", "start": "start",
    "restore": "restore", "heal": "heal", "first_step": "first step", "no_step": "no step",
    "other": "other",
}  # fmt: skip
_NO_STEP = "first step: no step was seen; it counts until the first collective began"
_NO_STEP_WAITED = "other: no step was seen; it counts until the ranks had run for a while, or ended"

_STEPPED = frozenset({"recovered", "repeated"})
"""Outcomes of incidents whose next round has made steps."""


def saw_no_step(incident: Record) -> bool:
    """Whether a next round was well before anybody knew it: nothing showed its first step.

    Ranks that restart in their processes, or stall for a while, stay in their round.
    """
    is_another = incident["next_round"] != incident["round"]
    is_well = incident["outcome"] in _STEPPED and is_another
    return is_well and FIRST_STEP not in (incident["story"] or FIRST_STEP)


def waited_for_steps(incident: Record) -> bool:
    """Whether the time until the incident was closed counts, as nothing showed a recovery."""
    return incident["ledger"] is not None and bool(incident["ledger"]["other_s"])


def ledger_lines(incident: Record) -> Iterator[str]:
    """The phases of an incident with their times, and the steps that it cost."""
    ledger = incident["ledger"]
    if ledger is None:
        return
    rows = [
        (label, seconds, ledger["wall_s"])
        for name, label in _LEDGER.items()
        if (seconds := ledger.get(f"{name}_s"))  # an older service does not tell the first
    ]
    yield "where the time went"
    lines = [(name, f"{seconds:8.3f} s", bar(seconds, whole)) for name, seconds, whole in rows]
    yield from aligned([*lines, ("in all", f"{ledger['wall_s']:8.3f} s", "")])
    yield from _healed(incident)
    if saw_no_step(incident):
        yield f"  {_NO_STEP_WAITED if waited_for_steps(incident) else _NO_STEP}"
    if incident["lost_steps"]:
        again = f"{counted(incident['lost_steps'], 'step')} again"
        worth = f" ({span(incident['lost_s'])})" if incident["lost_s"] else ""
        yield f"  and made {again}{worth}"
    elif incident["lost_steps"] is None and incident["outcome"] in _STEPPED:
        yield "  how many steps were made again is not known: the script does not number its steps"
    if incident["restored_step"] is not None:
        tier = f" ({cell(incident['restored_tier'])})" if incident["restored_tier"] else ""
        yield f"  went on from step {incident['restored_step']}{tier}"


def _healed(incident: Record) -> Iterator[str]:
    """What became of the ranks and their states, where some have kept theirs."""
    for row in incident["rounds"]:
        # an older service does not tell
        if row["round"] == incident["next_round"] and row.get("healed"):
            yield f"  {healed_in_words(cell(row['healed']), incident['lost_steps'])}"
