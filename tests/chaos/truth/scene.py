"""One case on a real cluster: its agents, its ranks, and what they really did."""

import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from everstep_services.cli.errors import CliError
from tests.corpus.faults import Need
from tests.e2e.cluster import Agent, Body, Cluster
from tests.e2e.control_planes import Up
from tests.e2e.processes import Process
from tests.waiting import until

SCRIPT = Path(__file__).with_name("training.py")
WITHIN_S = 150.0
"""At a load of five loops a core, too."""
_PRELOAD = "auto,torch._dynamo,torch.distributed,torch.nn.parallel,torch.utils.data"
_TOLD = re.compile(r"round (\d+) pid (\d+) (?:(begins after|step) (\d+)|(.*))")
PLAN = {
    "fault": "none", "variant": 0, "rank": 0, "at": 12, "rounds": [1],
    "sdk": False, "resumes": True, "compiled": False, "saves": False, "asks": False,
    "talks": False,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Truth:
    """What is true of a case, written down before it runs. Ranks are those of round 1."""

    ranks: tuple[int, ...] = ()
    """The culprits."""
    nodes: tuple[int, ...] = ()
    """The culprits, by their numbers from 1 on."""
    causes: tuple[str, ...] = ("unknown",)
    ends: tuple[int, ...] = ()
    """How culprits end: exit codes, and signals as negative numbers."""
    says: tuple[str, ...] = ()
    """Expressions that `everstep why` has to have."""
    never: tuple[str, ...] = ()
    """Expressions that nothing may have."""
    incidents: int = 1
    restarts: int | None = None
    """Restarts that are spent; otherwise not asked for."""
    may_nodes: tuple[int, ...] = ()
    """Nodes that may be named, too."""


@dataclass(frozen=True, slots=True)
class Case:
    """A fault, its place and its moment, and the truth about it."""

    name: str
    truth: Truth
    act: Callable[["Scene"], None]
    """What is done from outside, and what must follow."""
    plan: Mapping[str, Any] = field(default_factory=dict)
    nodes: int = 2
    spares: int = 0
    per_node: int = 2
    options: tuple[str, ...] = ()
    needs: Need | None = None
    """What it needs of the machine, whose place takes that of `{disk}` in its options."""
    begin: Callable[["Scene"], None] | None = None
    """Starts the ranks, if another launcher than Everstep does."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Of a control plane of its own."""
    is_loaded: bool = False
    """Also tried with loaded processors."""

    def __str__(self) -> str:
        return self.name


class Scene:
    """The agents of a case, and what its ranks have told."""

    def __init__(self, cluster: Cluster, up: Up, case: Case, number: int) -> None:
        self.cluster, self.up, self.case = cluster, up, case
        self.environ: Mapping[str, str] = {}
        self.folder = cluster.folder
        self._number = number
        self.agents: dict[int, Agent] = {}
        """The last agent of each node."""
        self.others: list[Process] = []
        """What another launcher has started."""
        (self.folder / "plan.json").write_text(json.dumps({**PLAN, **case.plan}))

    @property
    def options(self) -> list[str]:
        disk = self.environ.get("EVERSTEP_CORPUS_DISK", "")
        return [word.format(disk=disk) for word in self.case.options]

    def name(self, node: int) -> str:
        """Nodes have names of their own: what health knows of one is of this case."""
        return f"k{self._number}n{node}"

    def start(self, environ: Mapping[str, str]) -> None:
        """Start all agents, or the other launcher; `environ` tells what the machine gives."""
        self.environ = environ
        if self.case.begin is not None:
            self.case.begin(self)
            return
        for node in range(1, self.case.nodes + 1):
            self.start_node(node)
        if self.case.spares:  # those that come first have the slots
            self.cluster.until_fact("round_formed", within_s=WITHIN_S)
        for node in range(1, self.case.spares + 1):
            self.start_node(self.case.nodes + node)

    def start_node(self, node: int) -> None:
        case = self.case
        spares = ("--spares", str(case.spares)) if case.spares else ()
        sizes = ("--nproc-per-node", str(case.per_node), "--infra-rank", str(node - 1))
        nodes = () if "--nnodes" in case.options else ("--nnodes", str(case.nodes))
        self.agents[node] = self.cluster.run(
            *("--preload", _PRELOAD, *nodes, *spares, *sizes, "--stop-grace", "2"),
            *(*self.options, str(SCRIPT), str(self.folder)),
            node=self.name(node),
            **self.environ,
        )

    # -- what ranks really did ---------------------------------------------------------------

    def told(self, rank: int) -> list[tuple[int, int, str, int | None]]:
        """Round, process, word and step of each line of a rank."""
        path = self.folder / f"progress_{rank}"
        lines = path.read_text().splitlines() if path.exists() else []
        found = [match for line in lines if (match := _TOLD.fullmatch(line))]
        return [
            (int(it[1]), int(it[2]), it[3] or it[5], int(it[4]) if it[4] else None) for it in found
        ]

    def step(self, rank: int, round_: int) -> int:
        """The last step that a rank has finished in a round; 0 if none."""
        return max((it[3] or 0 for it in self.told(rank) if it[0] == round_), default=0)

    def first(self, round_: int) -> int | None:
        """After which step a round began."""
        found = [it[3] for it in self.told(0) if it[0] == round_ and it[2] == "begins after"]
        return found[0] if found else None

    def pid(self, rank: int, round_: int = 1) -> int:
        return next(it[1] for it in self.told(rank) if it[0] == round_)

    def ranks_of(self, node: int) -> tuple[int, ...]:
        each = self.case.per_node
        return tuple(range((node - 1) * each, node * each))

    @property
    def world(self) -> int:
        return self.case.nodes * self.case.per_node

    def until_step(self, step: int = 8, round_: int = 1, world: int | None = None) -> None:
        """Each rank has made so many steps in the round."""
        ranks = range(self.world if world is None else world)

        def made() -> bool:
            began = self.first(round_)
            return began is not None and all(self.step(r, round_) >= began + step for r in ranks)

        until(made, f"{len(ranks)} ranks make step {step} of round {round_}", within_s=WITHIN_S)

    # -- the end -----------------------------------------------------------------------------

    def finish(self, *, code: int = 0) -> None:
        """Let it come to its end; each agent that still runs ends with this code."""
        (self.folder / "end").touch()
        self.ended({node: code for node, it in self.agents.items() if it.poll() is None})

    def ended(self, codes: Mapping[int, int]) -> None:
        found = {node: self.agents[node].wait(WITHIN_S) for node in codes}
        assert found == dict(codes), f"agents ended with {found}, not {dict(codes)}"

    def incidents(self) -> list[Body]:
        """All incidents, once there are as many as the truth has, and each is judged."""
        wanted = self.case.truth.incidents
        if all(it.poll() is not None for it in (*self.cluster.agents, *self.others)):
            until(
                self.cluster.state, "the job has ended or left", despite=CliError,
                holds=lambda found: found["state"] not in {"running", "forming", "joining"},
            )  # fmt: skip

        def judged() -> bool:
            found = self.cluster.incidents()
            told = {one["incident"] for one in self.cluster.facts("verdict_reached")}
            return len(found) >= wanted and {one["incident"] for one in found} <= told

        with suppress(AssertionError):  # the table counts what is not judged
            until(lambda: not wanted or judged(), "each incident has a verdict", within_s=WITHIN_S)
        return [
            self.cluster.api.get(f"incidents/{one['incident']}") for one in self.cluster.incidents()
        ]


# -- what follows --------------------------------------------------------------------------------


def restarted(scene: Scene, *, round_: int = 2, world: int | None = None) -> None:
    """The training goes on in another round, and ends well."""
    scene.until_step(2, round_, world)
    scene.finish()
    rounds = {body["round"] for body in scene.cluster.facts("round_formed")}
    assert rounds == set(range(1, round_ + 1)), f"it has had the rounds {sorted(rounds)}"


def unharmed(scene: Scene) -> None:
    """The training goes on in its round, and ends well."""
    scene.until_step(scene.step(0, 1) - (scene.first(1) or 0) + 15)
    scene.finish()
    rounds = [body["round"] for body in scene.cluster.facts("round_formed")]
    assert rounds == [1], f"it has had the rounds {rounds}"
