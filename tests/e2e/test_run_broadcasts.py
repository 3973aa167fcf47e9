"""Signals to every process of a step, as Slurm and systemd send them: it is as if the agent had
got them alone. Acceptance: A12.1."""

import os
import signal

import pytest

from tests.e2e.cluster import Agent, Cluster
from tests.e2e.processes import ROOT, SCRIPTS, below
from tests.variants import variant
from tests.waiting import until

START_WITHIN_S = 90.0


ANNOUNCED = "SIGUSR1 announced that this node will be taken away"


def broadcast(agent: Agent, number: int, *, agent_first: bool = False) -> int:
    """Send a signal to each process of the agent's tree, one by one; how many got it."""
    pids = [process.pid for process in below(agent.pid)]
    for pid in [agent.pid, *pids] if agent_first else [*pids, agent.pid]:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue
    return len(pids)


def loading(cluster: Cluster, how: str = "on", *options: str, **environ: str) -> Agent:
    script = (str(SCRIPTS / "loading.py"), str(cluster.folder), how)
    return cluster.run("--nproc-per-node", "2", *options, *script, **environ)


def saved_after(cluster: Cluster, ranks: int = 2) -> int:
    """The step after which every rank has saved."""
    steps = {(cluster.folder / f"saved-{rank}").read_text() for rank in range(ranks)}
    (step,) = steps
    return int(step)


@pytest.mark.parametrize(
    ("name", "first"),
    [
        pytest.param("SIGTERM", True, id="SIGTERM-agent-first"),
        variant("SIGUSR1", False, id="SIGUSR1-agent-last"),
        variant("SIGTERM", False, id="SIGTERM-agent-last"),
        variant("SIGUSR1", True, id="SIGUSR1-agent-first"),
        variant("SIGUSR2", True, id="SIGUSR2-agent-first"),
        variant("SIGUSR2", False, id="SIGUSR2-agent-last"),
    ],
)
def test_all_ranks_save_whoever_else_gets_the_signal(
    cluster: Cluster, name: str, first: bool
) -> None:
    agent = loading(cluster)
    cluster.until_all_step(2)
    assert broadcast(agent, signal.Signals[name], agent_first=first) >= 8  # with all their workers
    assert agent.wait(START_WITHIN_S) == 91
    step = saved_after(cluster)
    (cluster.folder / "end").touch()
    again = loading(cluster)
    assert again.wait(START_WITHIN_S) == 0
    assert (cluster.folder / "restored-2-0").read_text() == str(step)
    assert not [fact for fact in cluster.facts("rank_exited") if fact.get("signal")]


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_handlers_of_the_script_hear_it_once(cluster: Cluster, name: str) -> None:
    script = (str(SCRIPTS / "saving.py"), str(cluster.folder), "all")
    agent = cluster.run("--cold", "--nproc-per-node", "2", *script)
    cluster.until_stepping(1)
    broadcast(agent, signal.Signals[name])
    (cluster.folder / "sent").touch()
    assert agent.wait() == 91
    heard = [(cluster.folder / f"saved-{rank}").read_text() for rank in (0, 1)]
    assert heard == [name] * 2


@pytest.mark.parametrize("name", ["SIGTERM", variant("SIGINT"), "SIGHUP"])
def test_a_script_that_cannot_save_ends_as_if_the_agent_alone_had_got_it(
    cluster: Cluster, name: str
) -> None:
    agent = cluster.steady("--nproc-per-node", "2", UNMODIFIED="1")
    cluster.until_all_step(2)
    number = signal.Signals[name]
    broadcast(agent, number)
    assert agent.wait() == 128 + number
    left = cluster.until_fact("node_left")
    assert left["cause"] == ("preempted" if name == "SIGTERM" else "operator")
    assert cluster.incidents() == [] or cluster.incidents()[0]["trigger"] != "rank_exited"


@pytest.mark.variant
def test_a_warning_before_the_session_is_open_ends_no_rank(cluster: Cluster) -> None:
    environ = {"EVERSTEP_AGENT__PREEMPT_SIGNALS": "SIGTERM"}
    agent = loading(cluster, "late", **environ)
    pids = until(
        lambda: [int((cluster.folder / f"waits-{rank}").read_text()) for rank in range(2)],
        "both wait",
        despite=(FileNotFoundError, ValueError),
        within_s=START_WITHIN_S,
    )
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        broadcast(agent, number)
        for pid in pids:  # as a batch script does that knows them
            os.kill(pid, number)
    (cluster.folder / "open").touch()
    cluster.until_all_step(2)
    agent.send(signal.SIGTERM)
    assert agent.wait() == 91
    assert [cluster.pid_of(rank, 1) for rank in range(2)] == pids


def test_a_notice_before_the_session_is_open_has_it_saved(cluster: Cluster) -> None:
    agent = loading(cluster, "late")
    until(
        lambda: list(cluster.folder.glob("waits-*")),
        "both wait",
        holds=lambda found: len(found) == 2,
        within_s=START_WITHIN_S,
    )
    cluster.until_facts("rank_started", lambda found: len(found) == 2)
    broadcast(agent, signal.SIGUSR1)
    until(lambda: "is kept from ranks" in agent.said, "it has been passed on")
    (cluster.folder / "open").touch()
    assert agent.wait(START_WITHIN_S) == 91
    assert saved_after(cluster) > 0


def waiting(cluster: Cluster) -> list[Agent]:
    """Two nodes of two ranks; no rank has opened its session yet."""
    script = (str(SCRIPTS / "loading.py"), str(cluster.folder), "late")
    agents = [
        cluster.run("--nnodes", "2", "--nproc-per-node", "2", *script, node=node)
        for node in ("node-1", "node-2")
    ]
    until(
        lambda: list(cluster.folder.glob("waits-*")),
        "all wait",
        holds=lambda found: len(found) == 4,
        within_s=START_WITHIN_S,
    )
    cluster.until_facts("rank_started", lambda found: len(found) == 4)
    return agents


@pytest.mark.variant
def test_nodes_whose_sessions_are_not_open_yet_save_after_the_same_step(cluster: Cluster) -> None:
    agents = waiting(cluster)
    for agent in agents:  # a scheduler warns all nodes
        broadcast(agent, signal.SIGUSR1)
    # by its own signal, or by that of the other, whichever came first
    until(lambda: all(ANNOUNCED in agent.said for agent in agents), "they know")
    (cluster.folder / "open").touch()
    assert [agent.wait(START_WITHIN_S) for agent in agents] == [91, 91]
    assert saved_after(cluster, ranks=4) > 0


@pytest.mark.variant
def test_a_node_that_heard_of_the_end_from_another_first_saves_with_it(cluster: Cluster) -> None:
    first, second = waiting(cluster)
    broadcast(first, signal.SIGUSR1)
    until(lambda: f"all nodes leave: {ANNOUNCED}" in second.said, "it heard")
    broadcast(second, signal.SIGUSR1)
    (cluster.folder / "open").touch()
    assert [agent.wait(START_WITHIN_S) for agent in (first, second)] == [91, 91]
    assert saved_after(cluster, ranks=4) > 0


def test_warnings_from_the_first_process_on_end_nothing(cluster: Cluster) -> None:
    environ = {"EVERSTEP_AGENT__PREEMPT_SIGNALS": "SIGTERM"}
    agent = loading(cluster, "on", **environ)
    until(lambda: agent.children("ranks.warden"), "it listens", within_s=START_WITHIN_S)
    first = set(agent.children("ranks.warden"))

    def restored() -> int:
        broadcast(agent, signal.SIGUSR1)
        return len(list(cluster.folder.glob("restored-1-*")))

    until(restored, "the ranks have their states", holds=(2).__eq__, within_s=START_WITHIN_S)
    started = cluster.until_facts("rank_started", lambda found: len(found) == 2)
    assert {fact["start"] for fact in started} == {"warm"}
    assert set(agent.children("ranks.warden")) >= first
    cluster.until_all_step(2)  # before, nobody knows that the script will handle the signal
    agent.send(signal.SIGTERM)
    assert agent.wait() == 91


@pytest.mark.variant
def test_a_probe_in_flight_has_no_result_and_nothing_follows(cluster: Cluster) -> None:
    """The signal ends the probe's program, too: that is no failure, and its round goes on."""
    began, config = cluster.folder / "probing", cluster.folder / "probes.toml"
    probe = cluster.folder / "probe"
    probe.write_text(f"#!/bin/sh\necho >> {began}\nexec sleep 600\n")
    probe.chmod(0o700)
    config.write_text(
        f'[checks]\nsite = {{waits = "{probe}"}}\n[checks.probes."site:waits"]\nevery_s = 1\n'
        f'within_s = 500\nfailures = 1\npolicy = "exclude"\n'
    )
    environ = {"EVERSTEP_AGENT__PREEMPT_SIGNALS": "SIGTERM", "EVERSTEP_CONFIG": str(config)}
    agent = loading(cluster, "on", **environ)
    cluster.until_all_step(2)
    until(began.exists, "the probe runs", within_s=START_WITHIN_S)
    broadcast(agent, signal.SIGUSR1)
    until(lambda: "probe site:waits has no result" in agent.said, "it was ended")
    agent.send(signal.SIGTERM)
    assert agent.wait() == 91
    assert cluster.state()["round"] == 1
    assert all(incident["trigger"] != "check_failed" for incident in cluster.incidents())
    checked = [
        fact for fact in cluster.facts("node_check_finished") if "site:waits" in fact["checks"]
    ]
    assert all(fact["is_healthy"] for fact in checked)


def test_a_signal_while_ranks_start_ends_the_node_at_once(cluster: Cluster) -> None:
    """Its forge imports what never ends: ranks cannot begin before the signal comes."""
    began = cluster.folder / "began"
    imported = f"import threading\nopen({str(began)!r}, 'w').close()\nthreading.Event().wait()\n"
    (cluster.folder / "never_imported.py").write_text(imported)
    path = f"{ROOT}:{cluster.folder}"
    agent = loading(cluster, "on", "--warm", "--preload", "never_imported", PYTHONPATH=path)
    until(began.exists, "its forge imports", within_s=START_WITHIN_S)
    broadcast(agent, signal.SIGTERM)
    assert agent.wait() == 91
    assert cluster.facts("rank_exited") == []


def test_what_was_saved_before_the_scheduler_kills_is_restored(cluster: Cluster) -> None:
    agent = loading(cluster, "on", "--preempt-grace", "600")
    cluster.until_all_step(2)
    committed = cluster.until_fact("checkpoint_committed")
    for _ in range(5):
        broadcast(agent, signal.SIGTERM)
    agent.kill_node()
    again = loading(cluster)
    until(lambda: list(cluster.folder.glob("restored-2-*")), "it is restored")
    (cluster.folder / "end").touch()
    assert again.wait(START_WITHIN_S) == 0
    assert int((cluster.folder / "restored-2-0").read_text()) >= committed["step"]


def test_a_rank_that_alone_is_ended_by_a_signal_is_started_again(cluster: Cluster) -> None:
    agent = cluster.steady("--nproc-per-node", "2", UNMODIFIED="1")
    cluster.until_all_step(2)
    cluster.kill_rank(1, 1, signal.SIGTERM)
    cluster.until_stepping(2)
    exited = cluster.until_fact("rank_exited", lambda body: body["rank"] == 1)
    assert exited["signal"] == "SIGTERM"
    cluster.finish()
    assert agent.wait() == 0


def test_under_nohup_the_end_of_the_terminal_is_no_reason_to_go(cluster: Cluster) -> None:
    agent = cluster.steady("--nproc-per-node", "2", within=["nohup"])
    cluster.until_all_step(2)
    broadcast(agent, signal.SIGHUP)
    cluster.finish()
    assert agent.wait() == 0
