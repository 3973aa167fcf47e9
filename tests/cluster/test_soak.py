"""Random faults, one a minute, under a training: `EVERSTEP_TEST_SOAK_S=7200` is the whole of it.

`EVERSTEP_TEST_SEED` chooses which faults, for how long, and whether a rank dies with them.
"""

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from tests.cluster.servers import NAMES, Cluster, Server
from tests.cluster.trainings import NODES, Training, training
from tests.stopping import stop

log = logging.getLogger(__name__)
LASTS_S = float(os.environ.get("EVERSTEP_TEST_SOAK_S", "240"))
SEED = int(os.environ.get("EVERSTEP_TEST_SEED", "1"))
EVERY_S = 60.0
FAULT_MOST_S = 25.0
Fault = Callable[[Training, Random], str]


def on_a_server(act: Callable[[Server], None]) -> Fault:
    def fault(trained: Training, random: Random) -> str:
        server = trained.cluster.servers[random.choice(NAMES)]
        act(server)
        return server.name

    return fault


def on_a_service(act: Callable[[Training, str], None]) -> Fault:
    def fault(trained: Training, random: Random) -> str:
        name = random.choice(sorted(trained.services.processes))
        act(trained, name)
        return name

    return fault


def two_servers_killed(trained: Training, random: Random) -> str:
    names = random.sample(NAMES, 2)
    for name in names:
        trained.cluster.servers[name].kill()
    return " and ".join(names)


def cut_off(how: str) -> Fault:
    def fault(trained: Training, random: Random) -> str:
        name = random.choice(NAMES)
        trained.cluster.isolate(name, how)
        return name

    return fault


def routes_delayed(trained: Training, random: Random) -> str:
    (source, target), link = random.choice(sorted(trained.cluster.routes.items()))
    link.delay(0.2)
    return f"{source} to {target}"


def half_killed(trained: Training, random: Random) -> str:
    """All replicas that begin at a server."""
    at = random.choice(sorted({name.split("-")[1] for name in trained.services.processes}))
    for name, process in trained.services.processes.items():
        if name.endswith(f"-{at}"):
            process.kill()
    return at


FAULTS: dict[str, Fault] = {
    "server killed": on_a_server(Server.kill),
    "server stopped": on_a_server(Server.stop),
    "server restarted": on_a_server(Server.restart),
    "disk lost": on_a_server(Server.lose_disk),
    "clients hung": on_a_server(lambda server: server.front.hang()),
    "clients cut": on_a_server(lambda server: server.front.cut()),
    "two servers killed": two_servers_killed,
    "routes hung": cut_off("hang"),
    "routes cut": cut_off("cut"),
    "routes delayed": routes_delayed,
    "service killed": on_a_service(lambda it, name: it.services.processes[name].kill()),
    "service stopped": on_a_service(lambda it, name: stop(it.services.processes[name].pid)),
    "service restarted": on_a_service(lambda it, name: it.services.restart(name)),
    "half of the services killed": half_killed,
    "nothing": lambda _, __: "",
}


@pytest.mark.chaos
@pytest.mark.timeout(LASTS_S + 900)
def test_a_training_lives_through_random_faults(cluster: Cluster, tmp_path: Path, job: str) -> None:
    random, ends = Random(SEED), time.monotonic() + LASTS_S
    with training(cluster, tmp_path, job, restarts="none") as trained:
        with trained.pauses() as all_pauses:
            while time.monotonic() < ends:
                due = time.monotonic() + EVERY_S
                _one_fault(trained, random)
                time.sleep(max(due - time.monotonic(), 0))
        trained.prove(f"soak of {LASTS_S:g} s, seed {SEED}", all_pauses, trained.heal())


def _one_fault(trained: Training, random: Random) -> None:
    name, lasts_s = random.choice(sorted(FAULTS)), random.uniform(0, FAULT_MOST_S)
    node = random.choice(NODES) if random.random() < 0.5 else ""
    victim = trained.rank_of(node) if node else None
    with trained.pauses() as pauses:
        where = FAULTS[name](trained, random)
        if victim is not None:
            trained.kill(victim)
        time.sleep(lasts_s)
        healthy_s = trained.heal()
        trained.goes_on()
    log.warning(
        "%s (%s) for %.1f s, death on %s: gap %.1f s, well after %.1f s",
        *(name, where, lasts_s, node or "-", pauses.longest_s, healthy_s),
    )
