"""Names of nodes in Slurm's words, and the rounds of allocations as cycles of attempts."""

from typing import Any

import pytest

from everstep_services.cli.pages.cycle_info import cycle_documents, node_range


@pytest.mark.parametrize(
    ("nodes", "text"),
    [
        ([], ""),
        (["login"], "login"),
        (["gpu3"], "gpu3"),
        (["gpu1", "gpu2", "gpu3"], "gpu[1-3]"),
        (["gpu01", "gpu02", "gpu07"], "gpu[01-02,07]"),
        (["gpu9", "gpu10"], "gpu10,gpu9"),
        (["rack1-n1", "rack1-n2", "rack2-n1"], "rack1-n[1-2],rack2-n1"),
        (["a2", "a1", "a1"], "a[1-2]"),
    ],
)
def test_nodes_are_written_as_slurm_does(nodes: list[str], text: str) -> None:
    assert node_range(nodes) == text


def test_cycles_are_counted_in_each_attempt() -> None:
    allocations: list[dict[str, Any]] = [
        {"allocation": "a", "scheduler_job": "77", "attempt": 0},
        {"allocation": "b", "scheduler_job": "77", "attempt": 1},
        {"allocation": "c", "scheduler_job": None, "attempt": None},
    ]
    rounds = [_round(1, "a"), _round(2, "a"), _round(3, "b"), _round(4, "c")]
    formed = [{"round": 2, "members": [], "spares": ["n4", "n3"]}]
    documents = cycle_documents("toy", allocations, rounds[::-1], formed)
    assert documents["cycle_info.77.0.1"]["standby_nodes"] == "n[3-4]"
    assert list(documents) == [
        "cycle_info.77.0.0",
        "cycle_info.77.0.1",
        "cycle_info.77.1.0",
        "cycle_info.toy.0.0",
    ]


def _round(number: int, allocation: str) -> dict[str, Any]:
    return {
        "round": number, "allocation": allocation, "formed_at": "2026-01-01T00:00:00Z",
        "ended_at": None, "world_size": 8,
    }  # fmt: skip
