"""A step that a rank has computed wrongly is made again, or the rank is named: on real ranks."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parent / "trainings.py"
WORLD, FAULTY_RANK, FAULTY_STEP, STEPS = 4, 1, 4, 6
KINDS = ("ddp", "fsdp", "hsdp", "pipeline")
Ranks = list[dict[str, Any]]

pytestmark = [pytest.mark.timeout(180), pytest.mark.xdist_group("numerics")]


@pytest.fixture(scope="module", params=KINDS)
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with tempfile.TemporaryDirectory() as folder:
        arguments = [sys.executable, str(SCRIPT), request.param, str(WORLD), folder]
        run = subprocess.run(arguments, capture_output=True, text=True, timeout=170, check=False)
        assert run.returncode == 0, run.stderr
        files = [Path(folder) / f"rank-{rank}.json" for rank in range(WORLD)]
        yield [{"kind": request.param, **json.loads(file.read_text())} for file in files]


@pytest.mark.parametrize(
    ("name", "tries"),
    [
        ("validated", STEPS),
        ("transient nan", STEPS + 1),
        ("transient scale", STEPS + 1),
        ("transient gradient", STEPS + 1),
        ("transient micro", STEPS + 1),
    ],
)
def test_the_training_is_that_of_an_undisturbed_run(ranks: Ranks, name: str, tries: int) -> None:
    base = "undisturbed micro" if name.endswith("micro") else "undisturbed"
    for rank in ranks:
        assert rank[name]["tries"] == tries
        assert rank[name]["steps"] == STEPS
        assert rank[name]["losses"] == rank[base]["losses"]
        assert rank[name]["parameters"] == rank[base]["parameters"]


@pytest.mark.parametrize("name", ["transient nan", "transient scale", "transient gradient"])
def test_a_result_that_does_not_come_again_is_transient(ranks: Ranks, name: str) -> None:
    judged = events(ranks, name, "judged")
    assert [(event["step"], event["kind"]) for event in judged] == [(FAULTY_STEP, "transient")]
    acted = events(ranks, name, "acted")
    assert [(event["action"], event["outcome"]) for event in acted] == [("again", "done")]


@pytest.mark.parametrize("name", ["persistent scale", "persistent gradient", "persistent micro"])
def test_a_device_that_computes_wrongly_is_named(ranks: Ranks, name: str) -> None:
    judged = events(ranks, name, "judged")[0]
    assert (judged["step"], judged["kind"]) == (FAULTY_STEP, "persistent")
    if "group" in judged and len(judged["ranks"]) == 1:
        assert judged["ranks"] == [FAULTY_RANK]
    assert FAULTY_RANK in judged["ranks"]


def test_nothing_is_done_where_numerics_only_observe(ranks: Ranks) -> None:
    assert not events(ranks, "observed nan", "acted")
    suspected = events(ranks, "observed nan", "suspected")
    assert [event["signal"] for event in suspected] == ["nan"] * 3
    assert suspected[0]["step"] == FAULTY_STEP


def test_a_replica_whose_parameters_differ_is_named(ranks: Ranks) -> None:
    suspected, judged = events(ranks, "replica", "suspected"), events(ranks, "replica", "judged")
    if suspected:  # with FSDP alone there are no replicas
        assert suspected[0]["signal"] == "replicas_differ"
        assert suspected[0]["moved_at"] < suspected[0]["step"]
        assert judged[0]["kind"] == "replica_differs"
        assert FAULTY_RANK in judged[0]["ranks"]
    assert bool(suspected) is (ranks[0]["kind"] in ("ddp", "hsdp"))


def test_only_the_first_rank_reports(ranks: Ranks) -> None:
    for rank in ranks[1:]:
        assert not any(case["events"] for case in rank.values() if isinstance(case, dict))


def events(ranks: Ranks, name: str, kind: str) -> list[dict[str, Any]]:
    return [event for event in ranks[0][name]["events"] if event["event"] == kind]
