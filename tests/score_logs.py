"""Scores `everstep logs analyze` on generated logs: python -m tests.score_logs --seed 1 [-n 5]

Prints precision, recall and F1 of each class, macro-F1, how often the first failing rank is right,
and what was answered wrongly.
"""

import argparse
import tempfile
from collections import Counter
from pathlib import Path

from everstep_services.attribution.log_analysis.files import analyze_files
from tests.fakes import failure_logs


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--seed", type=int, required=True)
    words.add_argument("-n", type=int, default=5, help="logs of each class")
    words.add_argument("--ranks", type=int, default=64)
    options = words.parse_args()
    answers: Counter[tuple[str, str]] = Counter()
    ranks: Counter[bool] = Counter()
    for failure_class in failure_logs.CLASSES:
        for number in range(options.n):
            with tempfile.TemporaryDirectory() as folder:
                truth = failure_logs.write(
                    Path(folder), failure_class, options.seed * 1000 + number, options.ranks
                )
                report = analyze_files(truth.paths).report()
            answer = (
                report.cause.failure_class if report.cause and report.verdict == "cause" else "-"
            )
            answers[failure_class, answer] += 1
            if truth.rank is not None:
                ranks[report.culprits == (truth.rank,)] += 1
            if answer != failure_class or (
                truth.rank is not None and report.culprits != (truth.rank,)
            ):
                quote = report.cause.quote[:100] if report.cause else ""
                print(
                    f"wrong: {failure_class} {number}: {answer}, {report.culprits} instead of"
                    f" {truth.rank}: {quote}"
                )
    print_scores(answers, ranks)


def print_scores(answers: Counter[tuple[str, str]], ranks: Counter[bool]) -> None:
    """The table."""
    print(f"macro-F1 {macro_f1(answers):.3f} of {answers.total()} logs")
    for name in failure_logs.CLASSES:
        precision, recall, f1 = scores(answers, name)
        print(f"  {name:<22} precision {precision:.2f}  recall {recall:.2f}  F1 {f1:.2f}")
    print(f"first failing rank right: {ranks[True]} of {ranks.total()}")


def scores(answers: Counter[tuple[str, str]], name: str) -> tuple[float, float, float]:
    """Precision, recall and F1 of a class."""
    right = answers[name, name]
    answered = sum(count for (_, answer), count in answers.items() if answer == name)
    there = sum(count for (truth, _), count in answers.items() if truth == name)
    precision = right / answered if answered else 0.0
    recall = right / there if there else 0.0
    return precision, recall, 2 * right / max(1, answered + there)


def macro_f1(answers: Counter[tuple[str, str]]) -> float:
    """The mean of F1 over the classes."""
    return sum(scores(answers, name)[2] for name in failure_logs.CLASSES) / len(
        failure_logs.CLASSES
    )


if __name__ == "__main__":
    main()
