"""Spans of a real training, from its agent and from `everstep up`, at a real receiver of OTLP."""

from pathlib import Path

import pytest

from tests.e2e.cluster import Cluster
from tests.e2e.conftest import NewCluster
from tests.e2e.control_planes import PATIENT, running_up
from tests.integration.bus.test_traces import Receiver, receiver
from tests.waiting import until

__all__ = ["receiver"]
pytestmark = pytest.mark.variant  # a control plane of its own


def test_agents_and_up_send_their_spans_of_one_trace(
    new_cluster: NewCluster, receiver: Receiver, tmp_path: Path
) -> None:
    """A question of the agent, its answer by the service, and the order that comes of it."""
    folder = tmp_path / "up"
    folder.mkdir()
    collector = {"EVERSTEP_OBSERVE__TRACES_URL": receiver.url}
    with running_up(folder, **PATIENT, **collector) as up:
        cluster: Cluster = new_cluster(up, "traced")
        agent = cluster.steady(**collector)
        until(lambda: receiver.named("receive order"), "the agent has an order")
        until(lambda: receiver.named("rendezvous.join"), "up has sent its spans")
        cluster.finish()
        assert agent.wait() == 0
    assert {"everstep-agent", "everstep-up"} <= receiver.services
    known = {span["spanId"]: span for span in receiver.spans}
    answered = receiver.named("rendezvous.join") or {}
    assert known[answered["parentSpanId"]]["name"] == "ask rendezvous.join"
    received = receiver.named("receive order") or {}
    assert known[received["parentSpanId"]]["name"].startswith("order ")
    assert known[received["parentSpanId"]]["traceId"] == received["traceId"]
