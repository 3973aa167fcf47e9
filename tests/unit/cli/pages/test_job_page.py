"""The page of a job on the screen."""

from collections import defaultdict
from typing import Any

from everstep_services.cli.pages.jobs import job_page


def record(**values: Any) -> dict[str, Any]:
    return defaultdict(lambda: None, values)


def test_the_last_rounds_are_counted_with_the_one_that_forms() -> None:
    """A round that waits for nodes has a number, and has not formed."""
    rounds = [record(round=2, state="forming"), record(round=1, state="ended")]
    lines = list(job_page(record(job="c", state="forming", round=2, rounds=1), rounds, [], [], []))
    assert "last rounds, of 2" in lines
