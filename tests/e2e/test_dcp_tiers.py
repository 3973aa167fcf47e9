"""A killed rank, and a killed node: `dcp.load` takes the state from memory or from another node.

The script saves each step in memory, and each fifth also to the global tier.
"""

import json
from pathlib import Path

import pytest

from tests.e2e.cluster import Cluster
from tests.e2e.processes import ROOT
from tests.waiting import until
from trainer_sdk.checkpoint.manifest import INDEX

SCRIPT = str(ROOT / "tests/integration/frameworks/scripts/dcp_tiers.py")
WITHIN_S = 400.0
NODES = ("node-1", "node-2", "node-3")
STEPS, FAULT_AT = "14", "12"

pytestmark = [pytest.mark.matrix, pytest.mark.timeout(900)]


def restored(folder: Path, round_: int, rank: int) -> list[object]:
    """The step and tier that a rank has restored."""
    place = folder / f"restored-{round_}-{rank}"
    until(place.exists, f"rank {rank} has restored", within_s=WITHIN_S)
    found: list[object] = json.loads(place.read_text())
    return found


def run(cluster: Cluster, **environ: str) -> int:
    options = ("--nproc-per-node", "2", SCRIPT)
    return cluster.run(*options, str(cluster.folder), STEPS, **environ).wait(WITHIN_S)


def test_after_the_kill_of_a_rank_torch_loads_the_last_step_from_memory(cluster: Cluster) -> None:
    """Steps 11 and 12 were never saved to the global tier (A9.1)."""
    assert run(cluster, KILL=FAULT_AT) == 0
    found = [restored(cluster.folder, 2, rank) for rank in range(2)]
    assert found == [[12, "memory"], [12, "memory"]]
    fact = cluster.until_fact("checkpoint_restored")
    assert fact["step"] == 12
    assert [(tier["tier"], tier["ranks"]) for tier in fact["tiers"]] == [("memory", 2)]


def test_a_damaged_image_is_on_record_and_the_global_tier_is_loaded(cluster: Cluster) -> None:
    """A flipped bit is never loaded (A8.8)."""
    assert run(cluster, KILL=FAULT_AT, DAMAGE="1") == 0
    found = [restored(cluster.folder, 2, rank) for rank in range(2)]
    assert found == [[10, "global"], [10, "global"]]
    fact = cluster.until_fact("checkpoint_restored")
    assert [(tier["tier"], tier["ranks"]) for tier in fact["tiers"]] == [("global", 2)]
    assert any("differs from what was saved" in one["reason"] for one in fact["rejected"])


def test_the_state_of_a_lost_node_comes_from_another_node(cluster: Cluster) -> None:
    """The spare that takes the slot has fetched it from the memory of the other node (A9.1)."""
    agents = {
        node: cluster.run(
            *("--nnodes", "2", "--spares", "1", "--infra-rank", str(place)),
            *(SCRIPT, str(cluster.folder), STEPS),
            node=node,
            HOLD=FAULT_AT,
        )
        for place, node in enumerate(NODES)
    }
    for rank in range(2):
        held = cluster.folder / f"holds-{rank}"
        until(held.exists, f"rank {rank} has saved step {FAULT_AT}", within_s=WITHIN_S)
    members = cluster.members(1)
    copy = f"memory/*/images/*/held/slot-1/rank-1/{FAULT_AT}-*/{INDEX}"
    until(lambda: list(cluster.folder.glob(copy)), "another node has step 12", within_s=WITHIN_S)
    agents[members[1]].kill_node()
    found = [restored(cluster.folder, 2, rank) for rank in range(2)]
    assert found == [[12, "memory"], [12, "peer"]]
