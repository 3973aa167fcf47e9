"""What came out of each case, as a table, and the totals that are wanted."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from tests.chaos.truth.scene import Scene
from tests.e2e.cluster import Body

Culprit = Literal["right", "hedged", "wrong", "no verdict", "-"]


@dataclass(slots=True)
class Row:
    """One case."""

    case: str
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
        found += [] if self.is_cause_right else [f"cause: {self.cause}"]
        return [*found, *self.untrue]


def judged(row: Row, scene: Scene, incidents: Sequence[Body]) -> None:
    """Compare the verdict of the first incident with the truth."""
    truth = scene.case.truth
    row.incidents = len(incidents)
    row.unjudged = sum(one["verdict"] is None for one in incidents)
    if len(incidents) != truth.incidents:
        row.action = f"{len(incidents)} incidents, not {truth.incidents}"
    if not incidents:
        return
    verdict = incidents[0]["verdict"]
    if verdict is None:
        row.culprit = "no verdict"
        return
    row.cause = verdict["cause"]
    row.is_cause_right = verdict["cause"] in truth.causes or verdict["is_inconclusive"]
    row.verdict_s = verdict["took_s"]
    row.culprit = culprit(scene, verdict)


def culprit(scene: Scene, verdict: Body) -> Culprit:
    """Whether a verdict names who it was, and nobody else."""
    truth = scene.case.truth
    nodes = {scene.name(node) for node in truth.nodes}
    may = {scene.name(node) for node in truth.may_nodes}
    of_nodes = {r for node in (*truth.nodes, *truth.may_nodes) for r in scene.ranks_of(node)}
    named, named_nodes = set(verdict["culprit_ranks"]), set(verdict["culprit_nodes"] or ())
    if named - set(truth.ranks) - of_nodes or named_nodes - nodes - may:
        return "wrong"
    if verdict["is_inconclusive"]:
        return "hedged"
    return "right" if set(truth.ranks) <= named and nodes <= named_nodes else "hedged"


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


def _cells(row: Row) -> tuple[Any, ...]:
    took = "-" if row.verdict_s is None else f"{row.verdict_s:.1f} s"
    cause = row.cause if row.is_cause_right else f"{row.cause} (wrong)"
    return row.case, row.action, row.culprit, cause, str(len(row.untrue) or "-"), took
