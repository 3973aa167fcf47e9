"""Limits that somebody has set, with real processes: found by name, wherever that is open."""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from everstep_services.cli.errors import CliError
from tests.e2e.cluster import Cluster
from tests.variants import first_of
from tests.waiting import until

WITHIN_S = 120.0
LIMIT_S = 4.0
SCRIPT = """
import os, sys, time

def hang():
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        time.sleep(3600)
    sys.exit(0)

kind = sys.argv[1]
if kind == "outside":
    hang()
if kind == "unmodified":
    import torch
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    for _ in range(3):
        optimizer.step()
    hang()

import trainer_sdk
from trainer_sdk.nvrx import RankMonitorClient

run = trainer_sdk.session()
if kind == "heartbeats":
    client = RankMonitorClient()
    client.init_workload_monitoring()
    for _ in range(5):
        client.send_heartbeat()
    hang()
if kind == "before":
    with run.section("setup"):
        hang()
if kind == "inner":
    run.step()
    with run.section("epoch"):
        while os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            with run.section("batch"):
                time.sleep(0.05)
"""


@dataclass(frozen=True)
class Case:
    options: Sequence[str]
    name: str
    phase: str
    section: str | None = None
    origin: str = "--limit"


CASES = {
    "outside": Case(("--limit", f"outside={LIMIT_S:g}"), "outside", "first_step"),
    "unmodified": Case(("--limit", f"step={LIMIT_S:g}"), "step", "step"),
    "before": Case(("--limit", f"setup={LIMIT_S:g}"), "setup", "section", "setup"),
    "inner": Case(("--limit", f"epoch={LIMIT_S:g}"), "epoch", "section", "epoch"),
    "heartbeats": Case(
        ("--ft-rank-heartbeat-timeout", f"{LIMIT_S:g}"),
        "heartbeat",
        "heartbeat",
        origin="--ft-rank-heartbeat-timeout",
    ),
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", first_of({"before", "outside", "unmodified"}, CASES))
def test_a_limit_by_hand_acts_where_its_name_is_open(cluster: Cluster, kind: str) -> None:
    """A3.2: found at its limit; the table shows it, and where it comes from."""
    case = CASES[kind]
    script = cluster.folder / "silent.py"
    script.write_text(SCRIPT)
    agent = cluster.run("--cold", *case.options, str(script), kind)
    shown = until(
        lambda: limit_of(cluster, case.name),
        "the table shows it",
        despite=CliError,
        within_s=WITHIN_S,
    )
    assert shown == (LIMIT_S, "configured", case.origin)
    stall = cluster.until_fact("rank_stalled", within_s=WITHIN_S)
    assert (stall["limit_name"], stall["limit_s"]) == (case.name, LIMIT_S)
    assert (stall["phase"], stall.get("section")) == (case.phase, case.section)
    assert (stall["limit_source"], stall["limit_origin"]) == ("configured", case.origin)
    assert agent.wait(WITHIN_S) == 0
    assert cluster.until_fact("job_ended")["rounds"] == 2


def limit_of(cluster: Cluster, name: str) -> tuple[float, str, str] | None:
    """What REST shows of one limit."""
    found = cluster.api.get(f"jobs/{cluster.job}/limits")["limits"]
    rows = [(one["limit_s"], one["source"], one["origin"]) for one in found
            if one["section"] == name]  # fmt: skip
    return rows[0] if rows and rows[0][2] else None
