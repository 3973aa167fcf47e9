"""What an agent tells of its probes in beats, and which of them a round was ended for."""

from datetime import UTC, datetime
from pathlib import Path

import pytest

from everstep.messages import CheckResult, Fact, NodeBeat, NodeCheckFinished
from everstep_services.agent.probes.periodic.probes import PeriodicProbes
from everstep_services.agent.probes.runner.process import ProbeRun
from everstep_services.agent.probes.settings import ChecksSettings, ProbeSettings
from everstep_services.agent.telemetry.facts import AgentFacts
from tests.fakes.clock import FakeClock

OFF = ProbeSettings(every_s=0)


class Node:
    """The probes of a node, whose runs the test makes up."""

    def __init__(self, **policies: str) -> None:
        usual = dict.fromkeys(("gpu", "host", "kernel", "nic", "nvlink"), OFF)
        probes = {
            name: ProbeSettings(failures=2, policy=policy)  # type: ignore[arg-type]
            for name, policy in policies.items()
        }
        self.facts: list[Fact] = []
        clock = FakeClock()
        self.probes = PeriodicProbes(
            ChecksSettings(probes=usual | probes), Path("/notes"), "n1", clock,
            AgentFacts("j", "n1", clock), tuple, self.facts.append, lambda _: None, tuple,
        )  # fmt: skip

    def run(self, check: str, *states: str) -> None:
        for state in states:
            result = CheckResult(check=check, state=state, reason="it is down")
            self.probes._take(check, ProbeRun((result,), 0.0))

    def beat(self, sequence: int) -> NodeBeat:
        at = datetime(2026, 1, 1, tzinfo=UTC)
        beat = NodeBeat(job="j", node="n1", sequence=sequence, at=at, state="running")
        return self.probes.with_probes(beat)

    @property
    def unfit(self) -> list[str]:
        return [result.check for result in self.probes.failing]

    @property
    def acted(self) -> list[NodeCheckFinished]:
        facts = [fact for fact in self.facts if isinstance(fact, NodeCheckFinished)]
        return [fact for fact in facts if fact.is_acted_on]


def test_every_tenth_beat_has_all_probes_and_so_has_each_after_a_change() -> None:
    node = Node(nic="exclude", gpu="observe")
    assert [probe.check for probe in node.beat(1).probes] == ["gpu", "nic"], "the first"
    assert [len(node.beat(sequence).probes) for sequence in range(2, 12)] == [0] * 8 + [2, 0]
    node.run("nic", "failed")
    nic = node.beat(12).probes[1]
    assert (nic.state, nic.failures, nic.policy, nic.has_failed) == ("failed", 1, "exclude", False)
    assert node.beat(13).probes == ()
    node.run("nic", "failed")
    beat = node.beat(14)
    assert (beat.probes_failed, beat.probes[1].has_failed) == (("nic",), True)


@pytest.mark.parametrize("policy", ["end_round", "exclude"])
def test_only_the_check_that_ended_the_round_makes_the_node_unfit(policy: str) -> None:
    """A check that all nodes share fails here, too; no node was accused for it."""
    node = Node(nic=policy, kernel=policy)
    node.run("nic", "failed", "failed")
    node.run("kernel", "failed", "failed")
    assert node.unfit == []
    node.probes.round_ended("nic")
    assert node.unfit == ["nic"]
    (acted,) = node.acted
    assert (acted.checks, acted.policy, acted.failures) == (("nic",), policy, 2)
    node.probes.round_ended("nic")
    assert len(node.acted) == 1
    node.run("nic", "ok", "ok")
    assert node.unfit == []


def test_an_order_of_an_older_release_names_no_check_and_means_all() -> None:
    node = Node(nic="end_round", kernel="exclude", gpu="observe")
    for check in ("nic", "kernel", "gpu"):
        node.run(check, "failed", "failed")
    node.probes.round_ended("")
    assert node.unfit == ["kernel", "nic"]
