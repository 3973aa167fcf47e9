"""Commands that show results that cannot be right, on the record as it is served."""

import json
from collections.abc import Iterator
from typing import get_args

import click
import pytest

from everstep_services.cli.commands.jobs.numerics import command
from everstep_services.history.api.endpoints.numerics import NumericsKind
from tests.integration.history.queries.test_rest_numerics import case_facts, counted
from tests.integration.history.served_story import Run, ServedStory
from tests.unit.history.facts import make


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedStory]:
    more = [
        make("job_started", job="j", round=None),
        make("round_formed", job="j", round=2),
        make("incident_opened", job="j", incident="i", round=2, trigger="numerics", node="n3"),
        *case_facts("aa"),
        make("rank_exited", job="j", round=2, rank=3, how="error", incident=None),
        counted(1, "loss"),
        counted(2, "layers.7", loss=(0, 0.0), head=(4, 0.5)),
        make("job_started", job="odd", round=None),
        make("round_formed", job="odd", round=2),
        make("numerics_suspected", job="odd", round=2, case="bb", step=7, signal="loss_spike",
             incident=None),
        make("job_started", job="fine", round=None),
        make("round_formed", job="fine", round=1),
    ]  # fmt: skip
    with ServedStory(tmp_path_factory.mktemp("served"), more) as served:
        yield served


def test_a_job_shows_its_cases_and_how_deterministic_it_is(run: Run) -> None:
    code, out, err = run("numerics", "j")
    assert code == 0
    (case,) = (line.split("\t") for line in out.splitlines())
    assert case[:7] == [
        "aa", "41", "loss_spike", "persistent", "3", "n3", "skip, exclude (observed)",
    ]  # fmt: skip
    assert case[8] == "rank 3 gives 9.5 three times"
    assert err == (
        "round 2: 9 steps run again, 2 of 3 results not always the same; see everstep numerics j "
        "--determinism\n"
    )
    assert run("numerics", "j", "--kind", "transient") == (0, "", "no such unexpected results\n"
        + err)  # fmt: skip
    assert run("numerics", "odd")[1].split("\t")[3] == "not judged"


def test_determinism_is_a_table_of_results(run: Run) -> None:
    code, out, err = run("numerics", "j", "--determinism", "--round", "2")
    assert (code, err) == (0, "round 2: 9 steps run again, 2 of 3 results not always the same\n")
    assert [line.split("\t") for line in out.splitlines()] == [
        ["head", "2", "9", "4", "0.5", "9", "9"],
        ["layers.7", "2", "9", "2", "0.5", "9", "9"],
        ["loss", "2", "9", "0", "0", "9", "9"],
    ]
    assert "no step was run again" in run("numerics", "fine", "--determinism")[2]


def test_programs_get_cases_and_determinism(run: Run) -> None:
    record = json.loads(run("numerics", "j", "-o", "json")[1])
    assert (record["schema"], len(record["items"]), len(record["determinism"])) == (
        "everstep.numerics/v1", 1, 4,
    )  # fmt: skip
    choice = next(option for option in command.params if option.name == "kind").type
    assert isinstance(choice, click.Choice)
    assert tuple(choice.choices) == get_args(NumericsKind)


def test_why_tells_the_case_in_sentences(run: Run) -> None:
    out = run("why", "j")[1]
    for sentence in (
        "At step 41 the loss left its band: 9.5, expected 1 to 3",
        "It comes again on one device, and not on another: rank 3 gives 9.5 three times; "
        "layers.7 is the first group of parameters that differs; with data 640 to 655",
        "The training went back to step 39 and passes over data 624 to 655: as the "
        "policy for persistent results says",
        "The training would ask that its node leaves, but the policy is to observe",
    ):
        assert f"\n  {sentence}" in out, out
    assert "exit code" not in out, "a later incident is about the rank's end"
    assert (
        "has had no incident, but unexpected results. See: everstep numerics odd"
        in (run("why", "odd")[2])
    )
