"""A training that was written for NVRx runs as it is under `everstep run --as-nvrx`."""

import json
from pathlib import Path

import pytest

from tests.e2e.cluster import Cluster
from tests.variants import first_of, variant

SCRIPT = Path(__file__).parent / "training.py"
WRAPPED = Path(__file__).parents[2] / "integration" / "nvrx" / "scripts" / "wrapped_ranks.py"
WITHIN_S = 200.0
CONFIG = """
launcher:
  fault_tolerance:
    rank_section_timeouts: {setup: 200, step: 20, checkpointing: 200}
    rank_out_of_section_timeout: 200
    safety_factor: 5
"""


@pytest.mark.timeout(400)
@pytest.mark.parametrize("fault", first_of({"killed"}, ["killed", "hung"]))
def test_a_training_for_nvrx_survives(cluster: Cluster, fault: str) -> None:
    """Limits are those of the YAML file, and ranks are restored from local checkpoints (A9.1)."""
    config = cluster.folder / "ft.yaml"
    config.write_text(CONFIG)
    training = cluster.folder / "training"
    training.mkdir()
    agent = cluster.run(
        *("--as-nvrx", "--ft-cfg-path", str(config), "--nproc-per-node", "2"),
        *(str(SCRIPT), str(training), fault),
    )
    assert agent.wait(WITHIN_S) == 0
    log = cluster.folder / "node-1.0.log"
    ends = [json.loads((training / f"end-{rank}").read_text()) for rank in range(2)]
    assert [newest for newest, _ in ends] == [12, 12]
    assert ends[0] == ends[1]
    resumed = [(training / f"from-1-{rank}").read_text() for rank in range(2)]
    assert resumed == ["6", "6"]
    limits = json.loads((training / "ft_state.json").read_text())["current_timeouts"]["section"]
    assert set(limits["calculated_sections"]) == {"setup", "step"}
    assert f"{config}, line 4: rank_section_timeouts is taken as --limit step=20" in log.read_text()
    if fault == "hung":
        stall = cluster.until_fact("rank_stalled")
        assert (stall["limit_name"], stall["limit_s"]) == ("step", 20)
        assert stall["limit_origin"] == f"{config}, line 4: rank_section_timeouts"


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("fault", "rounds"), [("killed", 2), variant("raises", 1)])
def test_a_wrapped_function_restarts_in_its_process_or_by_the_agent(
    cluster: Cluster, fault: str, rounds: int
) -> None:
    """An exception is restarted in the processes; a killed rank by a new round, at iteration 0."""
    training = cluster.folder / "training"
    training.mkdir()
    agent = cluster.run(
        *("--as-nvrx", "--nproc-per-node", "2"), *(str(WRAPPED), str(training), "0", fault)
    )
    assert agent.wait(WITHIN_S) == 0
    ended = cluster.until_fact("job_ended")
    assert (ended["state"], ended["rounds"]) == ("done", rounds)
    iteration = int(fault == "raises")
    ends = [json.loads((training / f"end-{rank}").read_text()) for rank in range(2)]
    assert ends == [[iteration, rank, 2, 12] for rank in range(2)]
    opened = cluster.until_fact("incident_opened")
    assert opened["trigger"] == ("restarted_in_process" if fault == "raises" else "rank_exited")
    assert opened["rank"] == 1
    assert cluster.until_fact("incident_closed")["outcome"] == "recovered"
