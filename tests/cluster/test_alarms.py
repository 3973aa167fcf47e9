"""The shipped rules during drills: what fires is true, and what is true for long enough fires."""

import logging
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster.servers import NAMES, Cluster
from tests.cluster.trainings import NODES, Training, training
from tests.e2e.prometheus import PROGRAM, prometheus_of
from tests.waiting import until

log = logging.getLogger(__name__)
pytestmark = [
    pytest.mark.chaos,
    pytest.mark.timeout(600),
    pytest.mark.skipif(PROGRAM is None, reason="there is no prometheus (Debian has it)"),
]
EVERY_S = 5.0
OVER_S = 60.0
"""What is caused by a fault that is over, and waits for less than this, may still fire."""


def killed(trained: Training) -> None:
    trained.kill(trained.rank_of("node-1"))


def leader_killed(trained: Training) -> None:
    leader, victim = trained.cluster.leader("KV_ROUNDS"), trained.rank_of("node-1")
    trained.cluster.servers[leader].kill()
    trained.kill(victim)
    trained.goes_on()


def leader_away(trained: Training) -> None:
    trained.cluster.servers[trained.cluster.leader("KV_ROUNDS")].kill()
    time.sleep(180)


def two_away(trained: Training) -> None:
    for name in NAMES[:2]:
        trained.cluster.servers[name].kill()
    time.sleep(150)


def cut_off(trained: Training) -> None:
    victim = trained.rank_of("node-1")
    trained.cluster.isolate(trained.cluster.leader("KV_ROUNDS"))
    trained.kill(victim)
    time.sleep(60)


def restarted_in_turn(trained: Training) -> None:
    for server, node in zip(NAMES, NODES, strict=True):
        trained.cluster.servers[server].restart()
        trained.kill(trained.rank_of(node))
        trained.goes_on()
        trained.heal()
    for name in list(trained.services.processes):
        trained.services.restart(name)
    trained.kill(trained.rank_of("node-1"))
    trained.goes_on()


WITHOUT_QUORUM = {"EverstepBusWithoutQuorum", "EverstepHistoryBehind"}
"""The record waits for the bus. Nobody tells which streams lack a leader, and who is away."""
DRILLS: dict[str, tuple[Callable[[Training], None], set[str]]] = {
    "a rank killed": (killed, set()),
    "a leader killed, and a rank": (leader_killed, set()),
    "a leader away for 180 s": (leader_away, {"EverstepBusServerAway"}),
    "two of three away for 150 s": (two_away, WITHOUT_QUORUM),
    "a cut of 60 s, and a rank killed": (cut_off, set()),
    "all restarted in turn, four ranks killed": (restarted_in_turn, {"EverstepRestartsOften"}),
}


@pytest.mark.parametrize("name", DRILLS)
def test_alarms_of_a_drill(cluster: Cluster, tmp_path: Path, job: str, name: str) -> None:
    act, expected = DRILLS[name]
    with training(cluster, tmp_path, job) as trained:
        (tmp_path / "prometheus").mkdir()
        targets = trained.services.observed
        with prometheus_of(tmp_path / "prometheus", targets, f"{EVERY_S:g}s") as prometheus:
            until(lambda: prometheus.query("sum(up)"), "all are scraped",
                  holds=lambda it: bool(it) and int(it[0]["value"][1]) == len(targets))  # fmt: skip
            act(trained)
            trained.heal()
            trained.goes_on()
            time.sleep(OVER_S)
            fired = {
                state: {
                    it["metric"]["alertname"]
                    for it in prometheus.query(
                        f'max_over_time(ALERTS{{alertstate="{state}"}}[15m])'
                    )
                }
                for state in ("pending", "firing")
            }
        trained.agents.finish()
        trained.agents.until_done()
    log.info(
        "%s: fired %s, pending only %s",
        *(name, sorted(fired["firing"]), sorted(fired["pending"] - fired["firing"])),
    )
    assert fired["firing"] == expected
