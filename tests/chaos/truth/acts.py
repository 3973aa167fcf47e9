"""What is done to the training of a case from outside, and what has to follow."""

import os
import signal
import subprocess
from collections.abc import Callable
from contextlib import suppress

from tests.chaos.truth.scene import WITHIN_S, Scene, restarted, unharmed
from tests.e2e.operators import ask
from tests.e2e.processes import below, environment, kill_all, python
from tests.waiting import until

Act = Callable[[Scene], None]
PAUSE_S = 4


def _pause(seconds: float) -> None:
    """A pause of processes has to last; nothing is waited for."""
    subprocess.run(["sleep", str(seconds)], check=True)


def signalled(rank: int, number: signal.Signals) -> Act:
    """A rank is sent a signal from outside."""

    def act(scene: Scene) -> None:
        scene.until_step()
        os.kill(scene.pid(rank), number)
        restarted(scene)

    return act


def killed_twice(first: int, second: int) -> Act:
    """A rank in round 1, and one in round 2."""

    def act(scene: Scene) -> None:
        scene.until_step()
        os.kill(scene.pid(first), signal.SIGKILL)
        scene.until_step(8, round_=2)
        os.kill(scene.pid(second, 2), signal.SIGKILL)
        restarted(scene, round_=3)

    return act


def budget_spent(scene: Scene) -> None:
    """No restart is allowed."""
    scene.until_step()
    os.kill(scene.pid(1), signal.SIGKILL)
    scene.ended({1: 1, 2: 1})


def ended_with(code: int) -> Act:
    """The job ends by itself with this code."""
    return lambda scene: scene.ended(dict.fromkeys(scene.agents, code))


def found_slow(scene: Scene) -> None:
    """A slow rank is found, and ends nothing."""
    rank = scene.case.plan["rank"]
    found = scene.cluster.until_fact("straggler_found", within_s=WITHIN_S)
    assert found["rank"] == rank, f"rank {found['rank']} was found to be slow"
    unharmed(scene)


# -- nodes ---------------------------------------------------------------------------------------


def nodes_lost(*nodes: int, world: int | None = None) -> Act:
    """Nodes lose their power; the others go on with spares, or with fewer."""

    def act(scene: Scene) -> None:
        _spares_joined(scene)
        scene.until_step()
        pids = [pid for node in nodes for pid in _all_of(scene, node)]
        kill_all(pids)
        for node in nodes:
            scene.agents[node].kill()
        restarted(scene, world=world)

    return act


def _all_of(scene: Scene, node: int) -> list[int]:
    agent = scene.agents[node]
    return [agent.pid, *(process.pid for process in below(agent.pid))]


def _spares_joined(scene: Scene) -> None:
    count = scene.case.nodes + scene.case.spares
    scene.cluster.until_facts(
        "node_joined", lambda found: len({one["node"] for one in found}) >= count
    )


def node_lost_and_replaced(scene: Scene) -> None:
    """There is no spare: the job waits until the node is back."""
    scene.until_step()
    scene.agents[2].kill_node()
    _until_said(scene, 1, "waits up to")
    scene.start_node(2)
    restarted(scene)


def node_lost_then_stopped(scene: Scene) -> None:
    """While the job waits for the lost node, somebody stops the other agent."""
    scene.until_step()
    scene.agents[2].kill_node()
    _until_said(scene, 1, "waits up to")
    scene.agents[1].send(signal.SIGTERM)
    scene.ended({1: 91})


def _until_said(scene: Scene, node: int, text: str) -> None:
    until(lambda: text in scene.agents[node].said, f"the console says {text}", within_s=WITHIN_S)


def agents_killed(*nodes: int, again: bool) -> Act:
    """Only the agents die; their wardens end the ranks."""

    def act(scene: Scene) -> None:
        _spares_joined(scene)
        scene.until_step()
        kill_all([scene.agents[node].pid for node in nodes])
        for node in nodes:
            scene.agents[node].kill()
            if again:
                scene.start_node(node)
        restarted(scene)

    return act


def warden_killed(scene: Scene) -> None:
    """The parent of the ranks dies; the kernel ends them."""
    scene.until_step()
    os.kill(scene.agents[2].warden, signal.SIGKILL)
    restarted(scene)


def grown(scene: Scene) -> None:
    """An elastic job shrinks, and grows again when its round ends anyway."""
    scene.until_step()
    scene.agents[2].kill_node()
    scene.until_step(2, 2, world=scene.case.per_node)
    scene.start_node(2)
    _until_said(scene, 2, "standing by as a spare")
    os.kill(scene.pid(0, 2), signal.SIGKILL)
    restarted(scene, round_=3)


def paused(*nodes: int) -> Act:
    """All processes of nodes get no time for some seconds."""

    def act(scene: Scene) -> None:
        scene.until_step()
        pids = [pid for node in nodes for pid in _all_of(scene, node)]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        _pause(PAUSE_S)
        for pid in reversed(pids):
            os.kill(pid, signal.SIGCONT)
        unharmed(scene)

    return act


def agents_paused(seconds: float, *nodes: int) -> Act:
    """Agents alone are stopped for a while; their ranks train on."""

    def act(scene: Scene) -> None:
        scene.until_step()
        for node in nodes:
            scene.agents[node].send(signal.SIGSTOP)
        _pause(seconds)
        for node in nodes:
            scene.agents[node].send(signal.SIGCONT)
        unharmed(scene)

    return act


def warden_paused(scene: Scene) -> None:
    """The parent of the ranks is stopped for a while."""
    scene.until_step()
    os.kill(scene.agents[2].warden, signal.SIGSTOP)
    _pause(PAUSE_S)
    os.kill(scene.agents[2].warden, signal.SIGCONT)
    unharmed(scene)


def bus_paused(scene: Scene) -> None:
    """The NATS server stands for some seconds."""
    scene.until_step()
    server = _server(scene)
    os.kill(server, signal.SIGSTOP)
    _pause(PAUSE_S)
    os.kill(server, signal.SIGCONT)
    unharmed(scene)


def killed_without_bus(scene: Scene) -> None:
    """A rank dies while the server stands."""
    scene.until_step()
    server = _server(scene)
    os.kill(server, signal.SIGSTOP)
    os.kill(scene.pid(2), signal.SIGKILL)
    _pause(PAUSE_S)
    os.kill(server, signal.SIGCONT)
    restarted(scene)


def _server(scene: Scene) -> int:
    assert scene.up.process is not None
    found: int = next(it.pid for it in below(scene.up.process.pid) if "nats-server" in it.name())
    return found


def log_disk_full(scene: Scene) -> None:
    """Where the lines of ranks are kept, there is no space left."""
    scene.until_step()
    with suppress(OSError), open(f"{scene.environ['EVERSTEP_CORPUS_DISK']}/fill", "wb") as file:
        while True:
            file.write(bytes(1 << 16))
    unharmed(scene)


def writer_killed(rank: int) -> Act:
    """The process dies that writes a rank's checkpoints."""

    def act(scene: Scene) -> None:
        scene.until_step()
        writer = next(
            it.pid
            for it in below(scene.pid(rank))
            if any("checkpoint.writer" in word for word in it.cmdline())
        )
        os.kill(writer, signal.SIGKILL)
        unharmed(scene)

    return act


# -- the scheduler, and people -------------------------------------------------------------------


def preempted_with_spare(scene: Scene) -> None:
    """One node is taken away; the spare has its slot."""
    _spares_joined(scene)
    scene.until_step()
    scene.agents[2].send(signal.SIGTERM)
    scene.until_step(2, 2)
    assert scene.agents[2].wait(WITHIN_S) in {91, 143}
    restarted(scene)


def preempted(scene: Scene) -> None:
    """One node is taken away, and nobody can have its slot."""
    scene.until_step()
    scene.agents[2].send(signal.SIGTERM)
    codes = {node: agent.wait(WITHIN_S) for node, agent in scene.agents.items()}
    assert set(codes.values()) <= {91, 143}, codes


def interrupted(scene: Scene) -> None:
    """Ctrl-C at one terminal."""
    scene.until_step()
    for agent in scene.agents.values():
        agent.send(signal.SIGINT)
    codes = {node: agent.wait(WITHIN_S) for node, agent in scene.agents.items()}
    assert set(codes.values()) <= {130, 91}, codes


def asked(*words: str) -> Act:
    """A person has the job do something, and it goes on in another round."""

    def act(scene: Scene) -> None:
        _spares_joined(scene)
        scene.until_step()
        given = [word.format(job=scene.cluster.job, node=scene.name(2)) for word in words]
        ask(scene.cluster, *given, "--reason", "a person wants it")
        restarted(scene)

    return act


def stopped(scene: Scene) -> None:
    """A person stops the job."""
    scene.until_step()
    ask(scene.cluster, "stop", scene.cluster.job, "--no-save", "--reason", "enough of it")
    scene.ended({1: 93, 2: 93})


def killed_with_brake(scene: Scene) -> None:
    """The brake stops nothing that only restarts what has failed."""
    job = scene.cluster.job
    scene.until_step()
    ask(scene.cluster, "brake", "set", "on", "--job", job, "--reason", "nobody is here")
    os.kill(scene.pid(1), signal.SIGKILL)
    restarted(scene)


def injected(*words: str) -> Act:
    """`everstep inject` makes the fault."""

    def act(scene: Scene) -> None:
        scene.until_step()
        environ = environment(scene.folder, "operator", EVERSTEP_STATE_DIR=str(scene.up.state.path))
        given = [word.format(node=scene.name(2)) for word in words]
        done = subprocess.run(
            python("-m", "everstep_services.cli", "inject", "--job", scene.cluster.job, *given),
            env=environ, capture_output=True, text=True, timeout=WITHIN_S, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        restarted(scene)

    return act
