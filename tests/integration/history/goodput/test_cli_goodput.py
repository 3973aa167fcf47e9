"""`everstep goodput`: what time went to, of one job and of all."""

import json
from collections.abc import Iterator
from datetime import timedelta

import pytest
from msgspec.structs import replace

from everstep.messages import Fact
from everstep_services.cli.errors import Exit
from tests.integration.history.served_story import Run, ServedStory
from tests.unit.history.facts import make
from tests.unit.history.goodput_trace import BEGAN, SECONDS, TRACE, at, ended, round_of, started

_ANEW = [
    started(),
    *round_of(1, 1, 2, 3),
    ended(40, 1, cause="operator"),
    *round_of(2, 41, 42, 43),
    ended(50, 2),
    make("allocation_ended", allocation="a", round=None, at=BEGAN + timedelta(seconds=50)),
]
"""A person restarts a script that does not number its steps: there is no incident."""


def story_facts() -> list[Fact]:
    others = [replace(fact, job="anew") for fact in (at(0, "job_started"), *_ANEW)]
    return [at(0, "job_started"), *TRACE, *others]


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedStory]:
    with ServedStory(tmp_path_factory.mktemp("served"), story_facts()) as served:
        yield served


def test_a_job_shows_every_class_that_took_time(run: Run) -> None:
    """A11.4."""
    code, out, _ = run("goodput", "j")
    assert code == 0
    shown, made_again = out.split("\n\n", 2)[1:]
    first, goodput = out.splitlines()[:2]
    rows = shown.splitlines()
    assert made_again.startswith("8 steps made again: ")
    assert first.startswith("job j: since 2026-11-25 08:00:00, until ")
    assert first.endswith(", 4 min 05 s allocated")
    assert goodput == f"goodput {SECONDS['productive'] / 245:.1%}"
    assert rows[0].split()[:4] == ["productive", "3", "min", "13"]
    assert {row.split("  ")[1] for row in rows} == {
        name.replace("_", "-" if name == "start_up" else " ") for name in SECONDS
    }


def test_of_an_unnumbered_script_the_steps_made_again_are_not_known(run: Run) -> None:
    out = run("goodput", "anew")[1]
    assert "How many steps were made again is not known" in out
    assert json.loads(run("job", "show", "anew", "-o", "json")[1])["lost_steps"] is None


def test_json_has_the_seconds_of_a_window(run: Run) -> None:
    until = (BEGAN + timedelta(seconds=5)).isoformat()
    code, out, _ = run("goodput", "j", "--until", until, "-o", "json")
    shown = json.loads(out)
    assert (code, shown["schema"], shown["wall_s"]) == (0, "everstep.goodput/v1", 5)
    assert shown["seconds"]["rendezvous"] == 5


def test_without_a_job_the_fleet_shows_who_lost_the_most(run: Run) -> None:
    day = ("--since", BEGAN.isoformat(), "--until", (BEGAN + timedelta(minutes=10)).isoformat())
    code, out, _ = run("goodput", *day)
    assert code == 0
    assert " jobs: since " in out or " job: since " in out
    assert "The most time was lost by" in out
    assert "j " in out
    assert (
        json.loads(run("goodput", *day, "-o", "json")[1])["schema"] == "everstep.fleet_goodput/v1"
    )


def test_a_window_without_allocations_says_so(run: Run) -> None:
    code, out, _ = run("goodput", "j", "--until", "2020-01-01T00:00:00Z")
    assert code == 0
    assert "No allocation lasted in this window." in out


def test_an_unknown_job_is_one_line(run: Run) -> None:
    code, out, err = run("goodput", "nobody")
    assert (code, out) == (Exit.NOT_FOUND, "")
    assert "nobody" in err
