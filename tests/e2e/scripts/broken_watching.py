"""Runs an agent in which everything fails that only watches: its arguments are the command."""

import sys
from typing import Any

from everstep_services.agent.probes.node_checks import Checks
from everstep_services.agent.rendezvous_client.script_requests import Requests
from everstep_services.agent.replicas.node_checkpoints import Checkpoints
from everstep_services.agent.runtime.network_test import Measuring
from everstep_services.agent.stalls.monitor import StallWatch
from everstep_services.agent.stalls.recorder import Stalls
from everstep_services.agent.telemetry.evidence import Evidence
from everstep_services.agent.telemetry.facts import Records
from everstep_services.agent.telemetry.progress import Progress
from everstep_services.cli.__main__ import main

BROKEN: dict[type, tuple[str, ...]] = {
    Checkpoints: ("keep_for_ever", "begins", "ends"),
    Checks: ("examine_for_ever",),
    Evidence: ("collect_for_ever", "rank_exited", "rank_runs", "collected", "round_stopped"),
    Measuring: ("measure_for_ever",),
    Progress: ("beat", "begins", "runs", "stepped", "facts", "ends", "step"),
    Records: ("rank_started", "ranks_stopped"),
    Requests: ("ask_for_ever",),
    Stalls: ("begins", "stepped", "follow_limits_for_ever"),
    StallWatch: ("judge_for_ever", "look_closer_for_ever", "look"),
}


def fail(*_: Any, **__: Any) -> Any:
    raise RuntimeError("on purpose")


for kind, names in BROKEN.items():
    for name in names:
        assert callable(getattr(kind, name))
        setattr(kind, name, fail)

sys.exit(main(sys.argv[sys.argv.index("everstep_services.cli") + 1 :]))
