"""What came out of each case, as a table, and the totals that are wanted."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from tests.chaos.truth.scene import Scene
from tests.e2e.cluster import Body

_LEFT_OPEN, _LEFT_OPEN_LOADED = 0.03, 0.1
"""The parts of cases in which a verdict need not name the culprit; it names nobody else."""
Culprit = Literal["right", "hedged", "wrong", "no verdict", "-"]


@dataclass(slots=True)
class Row:
    """One case."""

    case: str
    is_loaded: bool = False
    action: str = "right"
    culprit: Culprit = "-"
    cause: str = "-"
    is_cause_right: bool = True
    untrue: list[str] = field(default_factory=list)
    verdict_s: float | None = None
    unjudged: int = 0
    incidents: int = 0

    @property
    def faults(self) -> list[str]:
        """What is not as it has to be, in words."""
        found = [] if self.action == "right" else [f"action: {self.action}"]
        found += [f"culprit: {self.culprit}"] if self.culprit in {"wrong", "no verdict"} else []
        found += ["an incident without a verdict"] if self.unjudged else []
        found += [] if self.is_cause_right else [f"cause: {self.cause}"]
        return [*found, *self.untrue]


def judged(row: Row, scene: Scene, incidents: Sequence[Body]) -> None:
    """Compare the verdicts with the truth: together they name all culprits, and nobody else."""
    truth = scene.case.truth
    row.incidents = len(incidents)
    verdicts = [one["verdict"] for one in incidents if one["verdict"] is not None]
    row.unjudged = len(incidents) - len(verdicts)
    if len(incidents) != truth.incidents:
        row.action = f"{len(incidents)} incidents, not {truth.incidents}"
    if not verdicts:
        row.culprit = "no verdict" if incidents else "-"
        return
    row.cause = ", ".join(dict.fromkeys(it["cause"] for it in verdicts))
    row.is_cause_right = all(
        it["cause"] in truth.causes or it["is_inconclusive"] for it in verdicts
    )
    row.verdict_s = max(it["took_s"] for it in verdicts)
    row.culprit = _culprit(scene, verdicts)


def _culprit(scene: Scene, verdicts: Sequence[Body]) -> Culprit:
    truth = scene.case.truth
    ranks, nodes = set(truth.ranks), {scene.name(node) for node in truth.nodes}
    of_nodes = {r for node in (*truth.nodes, *truth.may_nodes) for r in scene.ranks_of(node)}
    may = {scene.name(node) for node in truth.may_nodes}
    named = {rank for it in verdicts for rank in it["culprit_ranks"]}
    named_nodes = {node for it in verdicts for node in it["culprit_nodes"] or ()}
    if named - ranks - of_nodes or named_nodes - nodes - may:
        return "wrong"
    if any(it["is_inconclusive"] for it in verdicts):
        return "hedged"
    return "right" if ranks <= named and nodes <= named_nodes else "hedged"


class Tally:
    """The rows of all cases that ran."""

    def __init__(self) -> None:
        self.rows: list[Row] = []

    def text(self) -> str:
        head = ("case", "action", "culprit", "cause", "false", "verdict after")
        lines = [head, *(_cells(row) for row in self.rows)]
        widths = [max(len(line[index]) for line in lines) for index in range(len(head))]
        table = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]
        return "\n".join([*table, "", *self.totals()])

    def totals(self) -> list[str]:
        rows, who = self.rows, Counter(row.culprit for row in self.rows)
        acted = sum(row.action == "right" for row in rows)
        asked = len(rows) - who["-"]
        return [
            f"action right: {acted} of {len(rows)}",
            f"culprit right: {who['right']} of {asked}, hedged {who['hedged']}, "
            f"wrong {who['wrong']}",
            f"cause right: {sum(row.is_cause_right for row in rows)} of {len(rows)}",
            f"incidents without a verdict: {sum(row.unjudged for row in rows)} of "
            f"{sum(row.incidents for row in rows)}",
            f"false sentences: {sum(len(row.untrue) for row in rows)}",
        ]

    def shortfalls(self) -> list[str]:
        """The wanted totals that were missed; each case tells what else is not right."""
        found = []
        for rows, part in (
            ([it for it in self.rows if not it.is_loaded], _LEFT_OPEN),
            ([it for it in self.rows if it.is_loaded], _LEFT_OPEN_LOADED),
        ):
            left_open = [it.case for it in rows if it.culprit == "hedged"]
            if len(left_open) > max(part * len(rows), 1):
                found.append(f"left open: {', '.join(left_open)}")
        return found


def _cells(row: Row) -> tuple[Any, ...]:
    took = "-" if row.verdict_s is None else f"{row.verdict_s:.1f} s"
    cause = row.cause if row.is_cause_right else f"{row.cause} (wrong)"
    return (
        _name(row),
        row.action.partition("\n")[0][:80],
        row.culprit,
        cause,
        str(len(row.untrue) or "-"),
        took,
    )


def _name(row: Row) -> str:
    return f"{row.case}{', loaded' if row.is_loaded else ''}"
