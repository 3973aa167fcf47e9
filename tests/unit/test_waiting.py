"""Waiting in tests: it ends with what was waited for, or says what was seen instead."""

import ast
import asyncio
from collections.abc import Iterator
from operator import not_
from pathlib import Path

import pytest

from tests.waiting import until, until_async

TESTS = Path(__file__).parents[1]
PACED = {
    "chaos/outages.py",
    "chaos/recorder.py",
    "chaos/survive_runs/training.py",
    "chaos/truth/faults.py",
    "chaos/truth/training.py",
    "cluster/links.py",
    "cluster/test_alarms.py",
    "cluster/test_drills.py",
    "cluster/test_soak.py",
    "cluster/test_trainings.py",
    "corpus/injected/standstills.py",
    "e2e/test_database_failover.py",
    "unit/agent/collectors/test_collection.py",
}
"""They make a load at a rate, let a fixed time pass, or sleep on purpose."""


def test_the_first_that_holds_is_returned() -> None:
    assert until(iter([None, 0, 3]).__next__, "a number") == 3
    assert until(iter([3, 2, 0, 1]).__next__, "none", holds=not_) == 0


def test_an_expected_error_means_not_yet_and_any_other_is_raised() -> None:
    answers = iter([OSError, KeyError])

    def look() -> None:
        raise next(answers)

    with pytest.raises(KeyError):
        until(look, "nothing", despite=OSError)


@pytest.mark.parametrize("seen", [[1, 2], None])
def test_what_was_seen_last_is_told(seen: object) -> None:
    with pytest.raises(AssertionError, match="not within 0 s: three") as caught:
        until(lambda: seen, "three", holds=lambda found: found == [1, 2, 3], within_s=0)
    assert str(caught.value).endswith(f"last seen: {seen}")


async def test_in_the_loop_it_is_the_same() -> None:
    answers = iter([OSError("away"), None, 0, 3])

    async def look() -> int | None:
        found = next(answers)
        if isinstance(found, OSError):
            raise found
        return found

    assert await until_async(look, "a number", despite=OSError) == 3
    assert await until_async(lambda: 5, "a number") == 5
    with pytest.raises(AssertionError, match=r"not within 0\.05 s: it; last seen: ''"):
        await until_async(lambda: "", "it", within_s=0.05)
    with pytest.raises(AssertionError, match="last seen: None"):
        await until_async(asyncio.Event().wait, "never", within_s=0.05)


async def test_a_timeout_of_what_is_looked_at_is_not_taken_for_our_own() -> None:
    async def look() -> None:
        raise TimeoutError("of the socket")

    with pytest.raises(TimeoutError, match="of the socket"):
        await until_async(look, "nothing")


def sleeps(path: Path) -> Iterator[str]:
    """Where a file sleeps."""
    text = path.read_text()
    tree = ast.walk(ast.parse(text)) if "sleep(" in text else ()
    for call in (node for node in tree if isinstance(node, ast.Call)):
        if ast.unparse(call.func) in {"time.sleep", "asyncio.sleep"}:
            yield f"{path.relative_to(TESTS)}:{call.lineno}"


def test_nobody_else_sleeps() -> None:
    """A test that sleeps waits for luck: wait for what it is about, with `tests.waiting`."""
    helper = TESTS / "waiting.py"
    others = {path for path in TESTS.rglob("*.py") if "scripts" not in path.parts} - {helper}
    found = [place for path in sorted(others) for place in sleeps(path)]
    assert {place.partition(":")[0] for place in found} == PACED, found
    assert list(sleeps(helper))
