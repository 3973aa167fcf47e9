"""Megatron-Core's own code saves, finds and restores its checkpoints over ours."""

import json
import os
from pathlib import Path

import pytest

from tests.e2e.cluster import Cluster
from tests.e2e.nvrx.wheels import megatron_core

SCRIPT = Path(__file__).parent / "megatron_training.py"
WITHIN_S = 300.0


@pytest.mark.matrix
@pytest.mark.timeout(700)
def test_megatron_core_finds_its_local_checkpoints_after_a_kill(
    cluster: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """`async_strategy="nvrx"` and local checkpoints of Megatron-Core 0.19 (A9.1)."""
    megatron = megatron_core(tmp_path_factory.mktemp("megatron"))
    training = cluster.folder / "training"
    training.mkdir()
    agent = cluster.run(
        *("--as-nvrx", "--cold", "--nproc-per-node", "2", str(SCRIPT), str(training)),
        PYTHONPATH=os.pathsep.join(filter(None, [str(megatron), os.environ.get("PYTHONPATH")])),
    )
    assert agent.wait(WITHIN_S) == 0
    ends = [json.loads((training / f"end-{rank}").read_text()) for rank in range(2)]
    assert ends == [[4, 6, True]] * 2
    assert cluster.until_fact("job_ended")["rounds"] == 2
