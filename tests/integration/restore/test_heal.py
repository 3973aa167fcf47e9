"""Ranks copy states from each other, on real gloo ranks: all values, and right or not at all."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("healing.py")
ROOT = Path(__file__).parents[3]
KEPT = {"origin": "own", "donor": None, "changed": False, "has_size": False}


def run(folder: Path, *case: str) -> str:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(folder), *case],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "WORLD_SIZE": "4"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Sequence[dict[str, Any]]:
    """What each rank reports of each case."""
    folder = tmp_path_factory.mktemp("healing")
    run(folder)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(4)]


def of_case(results: Sequence[dict[str, Any]], case: str) -> list[dict[str, Any]]:
    return [result[case] for result in results]


@pytest.mark.parametrize(
    ("case", "donor"),
    [("new rank", 0), ("through the group", 0), ("wrong bytes", 1), ("unreadable", 1)],
)
def test_a_new_rank_gets_all_values(
    case: str, donor: int, results: Sequence[dict[str, Any]]
) -> None:
    *kept, new = of_case(results, case)
    copied = {"origin": "rank", "donor": donor, "changed": True, "has_size": True}
    assert all(result.items() >= KEPT.items() for result in kept if result["donor"] is None)
    assert new.items() >= copied.items()
    assert len({(result["bits"], result["next"]) for result in (*kept, new)}) == 1
    assert {(result["step"], tuple(result["replaced"])) for result in (*kept, new)} == {(3, (3,))}


def test_random_numbers_of_a_rank_stay(results: Sequence[dict[str, Any]]) -> None:
    assert [result["keeps_dice"] for result in of_case(results, "new rank")] == [True] * 4


def test_ranks_that_are_behind_or_torn_copy(results: Sequence[dict[str, Any]]) -> None:
    told = of_case(results, "behind and torn")
    assert [result["origin"] for result in told] == ["rank", "own", "rank", "own"]
    assert {(result["step"], result["kept"], result["taken"]) for result in told} == {(1, 2, 2)}
    assert len({(result["bits"], result["next"]) for result in told}) == 1


def test_a_state_of_an_optimizer_that_others_lack_is_dropped(
    results: Sequence[dict[str, Any]],
) -> None:
    told = of_case(results, "before the first step")
    assert [result["origin"] for result in told] == ["own", "rank", "own", "own"]
    assert len({(result["bits"], result["next"]) for result in told}) == 1


def test_replicas_that_differ_end_the_training(results: Sequence[dict[str, Any]]) -> None:
    errors = {result["error"] for result in of_case(results, "unequal")}
    assert len(errors) == 1
    assert "ranks 0 and 1" in errors.pop()


def test_a_state_of_another_form_is_not_copied(results: Sequence[dict[str, Any]]) -> None:
    told = of_case(results, "own unfit")
    assert {result["origin"] for result in told} == {"fresh"}
    assert "rank 3 could not copy the state from 2 ranks" in told[0]["reason"]


def test_new_processes_begin(results: Sequence[dict[str, Any]]) -> None:
    told = of_case(results, "all new")
    assert told == [{"origin": "fresh", "step": None, "is_first": True}] * 4


def test_without_a_whole_rank_all_restore_an_image(results: Sequence[dict[str, Any]]) -> None:
    expected = {"origin": "image", "step": 2, "made_in": 2, "changed": True, "is_saved": True}
    assert of_case(results, "image") == [expected] * 4


def test_a_shard_comes_from_its_replica(results: Sequence[dict[str, Any]]) -> None:
    told = of_case(results, "hsdp")
    assert told[3].items() >= {"origin": "rank", "donor": 1, "step": 2}.items()
    assert told[3]["bits"] == told[1]["bits"] != told[0]["bits"]
    assert told[3]["place"] == told[1]["place"] != told[0]["place"]


@pytest.mark.parametrize(
    ("kind", "replicas"),
    [
        ("plain", [0, 0, 0, 0]),
        ("stages", [0, 0, 1, 1]),
        ("hsdp", [0, 1, 0, 1]),
        ("fsdp", [0, 1, 2, 3]),
        ("zero", [0, 1, 2, 3]),
        ("megatron", [0, 1, 2, 3]),
        # What a rank has for itself is in images only.
        ("loader", [0, 1, 2, 3]),
        # The other dimension of the mesh may have replicas or stages.
        ("fsdp in stages", [0, 1, 2, 3]),
    ],
)
def test_places(kind: str, replicas: list[int], results: Sequence[dict[str, Any]]) -> None:
    places = [result[kind] for result in of_case(results, "places")]
    numbers = {place: number for number, place in enumerate(dict.fromkeys(places))}
    assert [numbers[place] for place in places] == replicas


def test_a_donor_that_dies_breaks_the_round_and_leaves_others_as_they_are(tmp_path: Path) -> None:
    run(tmp_path, "death")
    told = [json.loads((tmp_path / f"death{rank}.json").read_text()) for rank in (1, 2, 3)]
    assert [result["changed"] for result in told] == [False, False, True]
