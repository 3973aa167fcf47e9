"""Agents of one job, and what REST tells about it."""

import os
import signal
from collections.abc import Callable, Mapping, Sequence
from operator import not_
from pathlib import Path
from typing import Any

import psutil

from everstep_services.cli.api.client import Api
from everstep_services.cli.errors import CliError
from tests.e2e.control_planes import ControlPlane
from tests.e2e.processes import SCRIPTS, Process, below, environment, kill_all, python, tagged
from tests.waiting import WITHIN_S, until

Body = Mapping[str, Any]


class Agent(Process):
    """One `everstep run`, as a node of its own name."""

    def __init__(self, node: str, command: list[str], environ: Mapping[str, str], log: Path):
        self.node = node
        super().__init__(command, environ, log, log.parent)

    def kill_node(self) -> list[int]:
        """End it as a power cut does: with everything that it started."""
        pids = [self.pid, *(process.pid for process in below(self.pid))]
        kill_all(pids)
        self.kill()
        return pids

    def children(self, word: str) -> list[int]:
        """Processes below it whose command has the word in it."""
        found = []
        for process in below(self.pid):
            try:
                if any(word in part for part in process.cmdline()):
                    found.append(process.pid)
            except psutil.Error:
                continue  # it has just ended
        return found

    @property
    def warden(self) -> int:
        return next(iter(self.children("agent.ranks.warden")))


class Cluster:
    """One job's agents. Facts are read as an operator would read them."""

    def __init__(self, folder: Path, job: str, plane: ControlPlane) -> None:
        self.folder = folder
        self.job = job
        self.plane = plane
        self.agents: list[Agent] = []
        self.tag = job
        self._api: Api | None = None

    # -- agents ----------------------------------------------------------------------------------

    def run(
        self, *arguments: str, node: str = "node-1", within: Sequence[str] = (), **environ: str
    ) -> Agent:
        """Start one agent: `everstep run` with these arguments, the script among them.

        `within` is a program that runs the command which it is given.
        """
        number = sum(agent.node == node for agent in self.agents)
        command = python("-m", "everstep_services.cli", "run", "--job", self.job)
        own = {**self.plane.login(self.job), "EVERSTEP_STATE_DIR": str(self.folder / node)}
        agent = Agent(
            node,
            [*within, *command, "--node-id", node, *arguments],
            environment(self.folder, self.tag, **{**own, **environ}),
            self.folder / f"{node}.{number}.log",
        )
        self.agents.append(agent)
        return agent

    def steady(
        self, *options: str, node: str = "node-1", within: Sequence[str] = (), **environ: str
    ) -> Agent:
        """Start an agent of a training without torch, that goes on until `finish`."""
        script = [str(SCRIPTS / "steady.py"), str(self.folder)]
        return self.run("--cold", *options, *script, node=node, within=within, **environ)

    def finish(self) -> None:
        """Let every rank of a steady training come to its good end."""
        (self.folder / "end").touch()

    def close(self) -> None:
        """Nothing of this job may be left."""
        for agent in self.agents:
            if agent.poll() is None:
                agent.send(signal.SIGCONT)
                agent.kill()
        try:
            until(self.left, "no process is left", holds=not_)
        finally:
            left = self.left()
            kill_all(left)
            if self._api is not None:
                self._api.__exit__(None, None, None)

    def left(self) -> list[int]:
        """Every living process that this job's agents have started, and they themselves."""
        return tagged(self.tag)

    # -- what REST says --------------------------------------------------------------------------

    @property
    def api(self) -> Api:
        if self._api is None:
            self._api = Api(self.plane.api, self.plane.token, timeout_s=WITHIN_S)
        return self._api

    def facts(self, kind: str) -> list[Body]:
        """The bodies of all facts of this kind, in their order."""
        found = self.api.pages("facts", {"job": self.job, "kind": kind}, most=None)
        return [fact["body"] for fact in found]

    def state(self) -> Body:
        found: Body = self.api.get(f"jobs/{self.job}")
        return found

    def ranks(self) -> dict[int, Body]:
        """What its agents say of the ranks at this moment."""
        found = self.api.pages(f"jobs/{self.job}/ranks", {}, most=None)
        return {one["rank"]: one for one in found}

    def incidents(self) -> list[Body]:
        """All incidents, the oldest first."""
        path = f"jobs/{self.job}/incidents"
        return list(self.api.pages(path, {"order": "asc"}, most=None))

    def until_fact(
        self, kind: str, where: Callable[[Body], bool] = lambda _: True, within_s: float = WITHIN_S
    ) -> Body:
        """The first such fact, once it is there."""
        return until(
            lambda: next((body for body in self.facts(kind) if where(body)), None),
            f"a fact {kind} of job {self.job}",
            despite=CliError,  # history is away, or does not know of the job yet
            within_s=within_s,
        )

    def until_facts(self, kind: str, holds: Callable[[list[Body]], object] = bool) -> list[Body]:
        """All such facts, once they are as they should be: two agents' come in any order."""
        return until(
            lambda: self.facts(kind),
            f"facts {kind} of job {self.job}",
            holds=holds,
            despite=CliError,
        )

    def until_stepping(self, number: int, within_s: float = WITHIN_S) -> Body:
        """The first step of a round has been made."""
        return self.until_fact(
            "progress_made", lambda body: body["round"] == number and body["is_first"], within_s
        )

    def until_all_step(self, ranks: int) -> dict[int, Body]:
        """Each rank has made a step, not only the first one asked; the reports about them."""
        return until(
            self.ranks,
            f"{ranks} ranks make steps",
            holds=lambda found: len(found) == ranks and all(one["step"] for one in found.values()),
            despite=CliError,
        )

    def until_done(self) -> None:
        """Every agent has ended with 0, and history knows of the good end."""
        codes = {agent.node: agent.wait() for agent in self.agents if agent.poll() is None}
        assert not any(codes.values()), codes
        assert self.until_fact("job_ended")["state"] == "done"

    def pid_of(self, rank: int, number: int) -> int:
        """The process of a rank in a round."""
        body = self.until_fact(
            "rank_started", lambda body: (body["round"], body["rank"]) == (number, rank)
        )
        pid: int = body["pid"]
        return pid

    def kill_rank(self, rank: int, number: int, signal_number: int = signal.SIGKILL) -> None:
        os.kill(self.pid_of(rank, number), signal_number)

    def members(self, number: int) -> dict[int, str]:
        """Which node had which slot in a round."""
        formed = self.until_fact("round_formed", lambda body: body["round"] == number)
        return {member[0]: member[1] for member in formed["members"]}

    def own_incident(self) -> Body:
        """The only incident that is not part of another one, once it is over."""
        (incident,) = until(
            lambda: [one for one in self.incidents() if one["outcome"] != "merged"],
            "the incident is over",
            holds=lambda found: found and found[0]["outcome"],
            despite=CliError,
        )
        return incident

    def closed(self, count: int) -> list[Body]:
        """The incidents, once `count` are over."""
        return until(
            lambda: [one for one in self.incidents() if one["outcome"]],
            f"{count} incidents are over",
            holds=lambda found: len(found) >= count,
            despite=CliError,
        )
