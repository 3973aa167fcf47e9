"""A step that a rank has computed wrongly is made again, or the rank is named: on real ranks."""

import json
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parent / "trainings.py"
WORLD, FAULTY_RANK, FAULTY_STEP, STEPS = 4, 1, 4, 6
WORLDS = {"pair": 2}
"""DDP with two replicas: nothing but their own results tells which of them is right."""
FEW = (
    *("pair", "fsdp", "hsdp", "pipeline", "compiled", "blocks", "replicate", "fsdp1", "scaler"),
    "tensor",
)
"""The kinds with few cases."""
IN_MERGES = ("ddp", "hsdp", "pipeline")
"""HSDP shows what FSDP shows, and more."""
Ranks = list[dict[str, Any]]

pytestmark = [pytest.mark.timeout(180), pytest.mark.xdist_group("numerics")]


def on(kind: str, *values: Any) -> Any:
    """Parameters of a test with the trainings of a kind."""
    marks = [] if kind in IN_MERGES else [pytest.mark.variant]
    return pytest.param(kind, *values, marks=marks)


@cache
def trained(kind: str) -> Ranks:
    world = WORLDS.get(kind, WORLD)
    with tempfile.TemporaryDirectory() as folder:
        arguments = [sys.executable, str(SCRIPT), kind, str(world), folder]
        run = subprocess.run(arguments, capture_output=True, text=True, timeout=170, check=False)
        assert run.returncode == 0, run.stderr
        files = [Path(folder) / f"rank-{rank}.json" for rank in range(world)]
        return [{"kind": kind, **json.loads(file.read_text())} for file in files]


@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> Ranks:
    return trained(request.param)


@pytest.mark.parametrize(
    ("ranks", "name", "tries"),
    [
        on("ddp", "transient gradient", STEPS + 1),
        on("ddp", "transient micro", STEPS + 1),
        *(
            on(kind, name, tries)
            for kind in ("ddp", *FEW)
            for name, tries in (
                ("validated", STEPS),
                ("transient nan", STEPS + 1),
                ("transient scale", STEPS + 1),
            )
        ),
    ],
    indirect=["ranks"],
)
def test_the_training_is_that_of_an_undisturbed_run(ranks: Ranks, name: str, tries: int) -> None:
    base = "undisturbed micro" if name.endswith("micro") else "undisturbed"
    for rank in ranks:
        assert rank[name]["tries"] == tries
        assert rank[name]["steps"] == STEPS
        assert rank[name]["losses"] == rank[base]["losses"]
        assert rank[name]["parameters"] == rank[base]["parameters"]


@pytest.mark.parametrize("ranks", [on(kind) for kind in ("ddp", *FEW)], indirect=True)
def test_of_a_healthy_training_nothing_is_reported(ranks: Ranks) -> None:
    assert {event["event"] for event in ranks[0]["validated"]["events"]} == {"counted"}


@pytest.mark.parametrize(
    ("ranks", "name"),
    [
        on("ddp", "transient gradient"),
        *(
            on(kind, name)
            for kind in ("ddp", *FEW)
            for name in ("transient nan", "transient scale")
        ),
    ],
    indirect=["ranks"],
)
def test_a_result_that_does_not_come_again_is_transient(ranks: Ranks, name: str) -> None:
    judged = events(ranks, name, "judged")
    assert [(event["step"], event["kind"]) for event in judged] == [(FAULTY_STEP, "transient")]
    kind = ranks[0]["kind"]  # what stages gave each other is not known of the first run
    is_staged = kind == "tensor" or (kind, name) == ("pipeline", "transient nan")
    same = [0, FAULTY_RANK] if is_staged else [FAULTY_RANK]
    assert judged[0]["ranks"] == same
    acted = events(ranks, name, "acted")
    assert [(event["action"], event["outcome"]) for event in acted] == [("again", "done")]


@pytest.mark.parametrize(
    ("ranks", "name"),
    [
        on("ddp", "persistent scale"),
        on("ddp", "persistent micro"),
        on("ddp", "persistent unwrapped"),
        *(on(kind, "persistent gradient") for kind in ("ddp", *FEW)),
    ],
    indirect=["ranks"],
)
def test_a_device_that_computes_wrongly_is_named(ranks: Ranks, name: str) -> None:
    judged = events(ranks, name, "judged")[0]
    assert (judged["step"], judged["kind"]) == (FAULTY_STEP, "persistent")
    assert judged["ranks"] == [FAULTY_RANK]


@pytest.mark.parametrize("ranks", [on("ddp")], indirect=True)
def test_nothing_is_done_where_numerics_only_observe(ranks: Ranks) -> None:
    assert not events(ranks, "observed nan", "acted")
    suspected = events(ranks, "observed nan", "suspected")
    steps = [(event["step"], event["signal"]) for event in suspected]
    assert steps == [(step, "nan") for step in range(FAULTY_STEP, STEPS + 1)]


@pytest.mark.parametrize("ranks", [on("ddp")], indirect=True)
def test_the_last_step_of_a_loop_that_was_left_is_decided_when_its_session_ends(
    ranks: Ranks,
) -> None:
    suspected = events(ranks, "observed and left", "suspected")
    assert [(event["step"], event["signal"]) for event in suspected] == [(FAULTY_STEP, "nan")]


@pytest.mark.parametrize(
    ("ranks", "name"),
    [
        *(on(kind, "replica") for kind in ("ddp", "hsdp", "replicate")),
        on("ddp", "replica unwrapped"),
    ],
    indirect=["ranks"],
)
def test_a_replica_whose_parameters_differ_is_named(ranks: Ranks, name: str) -> None:
    suspected, judged = events(ranks, name, "suspected"), events(ranks, name, "judged")
    assert suspected[0]["signal"] == "replicas_differ"
    assert suspected[0]["moved_at"] < suspected[0]["step"]
    assert judged[0]["kind"] == "replica_differs"
    assert FAULTY_RANK in judged[0]["ranks"]


@pytest.mark.parametrize("ranks", [on("ddp"), on("hsdp")], indirect=True)
def test_only_where_no_replicas_are_known_a_line_tells_so(ranks: Ranks) -> None:
    for number, rank in enumerate(ranks):
        for name, case in rank.items():
            if isinstance(case, dict):
                is_told = "no replicas are known among 4 ranks" in "\n".join(case["lines"])
                assert is_told == (name == "no replicas" and number == 0)


@pytest.mark.parametrize("ranks", [on("fsdp"), on("pipeline")], indirect=True)
def test_shards_are_not_replicas(ranks: Ranks) -> None:
    assert not events(ranks, "replica", "suspected")


@pytest.mark.parametrize("ranks", [on("ddp"), on("hsdp")], indirect=True)
def test_only_the_first_rank_reports(ranks: Ranks) -> None:
    for rank in ranks[1:]:
        assert not any(case["events"] for case in rank.values() if isinstance(case, dict))


def events(ranks: Ranks, name: str, kind: str) -> list[dict[str, Any]]:
    return [event for event in ranks[0][name]["events"] if event["event"] == kind]
