"""Runs an agent in which everything fails that only watches: its arguments are the command."""

import sys
from typing import Any

from everstep_services.agent.probes.node_checks import NodeChecks
from everstep_services.agent.rendezvous_client.script_requests import ScriptRequests
from everstep_services.agent.replicas.node_checkpoints import NodeCheckpoints
from everstep_services.agent.runtime.network_test import NetworkTestRunner
from everstep_services.agent.stalls.monitor import StallMonitor
from everstep_services.agent.stalls.recorder import StallRecorder
from everstep_services.agent.telemetry.evidence import EvidenceRecorder
from everstep_services.agent.telemetry.facts import AgentFacts
from everstep_services.agent.telemetry.progress import ProgressReader
from everstep_services.cli.__main__ import main

BROKEN: dict[type, tuple[str, ...]] = {
    NodeCheckpoints: ("keep_for_ever", "begins", "ends"),
    NodeChecks: ("examine_for_ever",),
    EvidenceRecorder: (
        "collect_for_ever",
        "rank_exited",
        "rank_runs",
        "collected",
        "round_stops",
        "round_stopped",
    ),
    NetworkTestRunner: ("measure_for_ever",),
    ProgressReader: ("beat", "begins", "runs", "stepped", "facts", "ends"),
    AgentFacts: ("of_rank", "of_round"),
    ScriptRequests: ("ask_for_ever",),
    StallRecorder: ("begins", "stepped", "follow_limits_for_ever"),
    StallMonitor: ("judge_for_ever", "look_closer_for_ever", "look"),
}


def fail(*_: Any, **__: Any) -> Any:
    raise RuntimeError("on purpose")


for kind, names in BROKEN.items():
    for name in names:
        assert callable(getattr(kind, name))
        setattr(kind, name, fail)

sys.exit(main(sys.argv[sys.argv.index("everstep_services.cli") + 1 :]))
