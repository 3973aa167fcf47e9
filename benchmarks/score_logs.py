"""Compares what `everstep logs analyze` answers with the truth of generated logs."""

import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from everstep_services.attribution.log_analysis.files import analyze_files
from everstep_services.attribution.log_analysis.report import LogReport
from tests.fakes import failure_logs
from tests.fakes.failure_lines import HELD_OUT

NONE = "-"
"""The answer "inconclusive", or "nothing"."""


@dataclass
class Scores:
    """What was answered to which truth."""

    answers: Counter[tuple[str, str]] = field(default_factory=Counter)
    first_ranks: Counter[bool] = field(default_factory=Counter)
    nodes: Counter[bool] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def add(self, truth: failure_logs.Labelled, report: LogReport, number: int) -> None:
        """Compare an answer with the truth."""
        cause = report.cause if report.verdict == "cause" else None
        answer = cause.failure_class if cause else NONE
        wanted = NONE if truth.failure_class in failure_logs.WITHOUT_CAUSE else truth.failure_class
        self.answers[truth.failure_class, answer] += 1
        is_right = answer == wanted
        if truth.rank is not None and wanted != NONE:
            is_first = report.culprits == (truth.rank,)
            self.first_ranks[is_first] += 1
            is_right = is_right and is_first
        if truth.node:
            is_node = cause is not None and cause.node == truth.node
            self.nodes[is_node] += 1
            is_right = is_right and is_node
        if not is_right:
            quote = cause.quote[:110] if cause else report.verdict
            whom = f"{report.culprits[:4]} {cause.node if cause else ''}"
            self.wrong.append(
                f"wrong: {truth.failure_class} {number} ({truth.paths[0].name}): {answer} {whom}"
                f" instead of {truth.rank} {truth.node}: {quote}"
            )

    def of_class(self, name: str) -> tuple[float, float, float]:
        """Precision, recall and F1."""
        right = self.answers[name, name]
        answered = sum(count for (_, answer), count in self.answers.items() if answer == name)
        there = sum(count for (truth, _), count in self.answers.items() if truth == name)
        precision = right / answered if answered else 0.0
        recall = right / there if there else 0.0
        return precision, recall, 2 * right / max(1, answered + there)

    def classes(self) -> Sequence[str]:
        """The classes that were there."""
        return sorted({truth for truth, _ in self.answers} - set(failure_logs.WITHOUT_CAUSE))

    def macro_f1(self) -> float:
        """The mean of F1 over the classes."""
        names = self.classes()
        return sum(self.of_class(name)[2] for name in names) / len(names)

    def abstentions(self) -> tuple[int, int, int, int]:
        """Of logs with a cause, how many were left open, and of how many; the same without one."""
        without = failure_logs.WITHOUT_CAUSE
        counts = [0, 0, 0, 0]
        for (truth, answer), count in self.answers.items():
            at = 2 if truth in without else 0
            counts[at] += count if answer == NONE else 0
            counts[at + 1] += count
        return counts[0], counts[1], counts[2], counts[3]

    def lines(self) -> Iterator[str]:
        """The table."""
        logs, classes = self.answers.total(), len(self.classes())
        yield f"macro-F1 {self.macro_f1():.3f} of {logs} logs, {classes} classes"
        for name in self.classes():
            precision, recall, f1 = self.of_class(name)
            if f1 < 1:
                yield f"  {name:<22} precision {precision:.2f}  recall {recall:.2f}  F1 {f1:.2f}"
        yield "  all others               1.00"
        for (truth, answer), count in sorted(self.answers.items()):
            wanted = NONE if truth in failure_logs.WITHOUT_CAUSE else truth
            if answer != wanted:
                yield f"  {count} x {truth} answered {answer}"
        yield f"first failing rank right: {self.first_ranks[True]} of {self.first_ranks.total()}"
        yield f"node right: {self.nodes[True]} of {self.nodes.total()}"
        left, there, right, without = self.abstentions()
        yield f"left open: {left} of {there} with a cause, {right} of {without} without one"


def score(seed: int, number: int, ranks: int, *, held_out: bool = False) -> Scores:
    """Write this number of logs of each class, and compare the answers."""
    scores = Scores()
    names = tuple(HELD_OUT) if held_out else (*failure_logs.CLASSES, *failure_logs.WITHOUT_CAUSE)
    for failure_class in names:
        for turn in range(number):
            with tempfile.TemporaryDirectory() as folder:
                truth = failure_logs.write(
                    Path(folder), failure_class, seed * 1000 + turn, ranks, held_out=held_out
                )
                scores.add(truth, analyze_files(truth.paths).report(), turn)
    return scores
