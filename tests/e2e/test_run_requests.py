"""A script asks that its node be excluded, or that the job be stopped: rendezvous decides."""

import pytest

from tests.e2e.cluster import Cluster

SCRIPT = """
import time, trainer_sdk

run = trainer_sdk.session()
run.step()
run.request({kind!r}, "it is too hot")
while not run.should_stop:
    run.step()
    time.sleep(0.01)
"""


@pytest.mark.parametrize(
    ("kind", "code", "action"), [("stop", 93, "stop_job"), ("exclude", 90, "drain_node")]
)
def test_what_a_script_asks_for_is_on_record_and_done(
    cluster: Cluster, kind: str, code: int, action: str
) -> None:
    script = cluster.folder / "asks.py"
    script.write_text(SCRIPT.format(kind=kind))
    agent = cluster.run("--cold", str(script))
    assert agent.wait() == code
    acted = cluster.until_fact("operator_acted")
    assert (acted["action"], acted["outcome"], acted["origin"]) == (action, "accepted", "script")
    assert acted["by"] == f"rank 0 of {agent.node}"
    assert f"rendezvous does what rank 0 of {agent.node} asks for" in agent.said
