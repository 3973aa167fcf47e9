"""The launchers that are compared, and the command of each for the same training."""

import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.restarts.ledger import Ledgers
from benchmarks.restarts.ports import free_port
from benchmarks.restarts.stage import Stage

SCRIPTS = {
    "own": "train.py",
    "torch": "train_torch.py",
    "none": "train_by_hand.py",
    "survives": "train_surviving.py",
}
"""By the optimizer they use."""
JOB = "bench"
_UP_WITHIN_S = 30.0
_ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Shape:
    """How many agents, how many of them to spare, and how many ranks on each."""

    nodes: int
    ranks: int
    spares: int = 0

    @property
    def names(self) -> list[str]:
        return [f"node-{number}" for number in range(self.nodes + self.spares)]


@dataclass(frozen=True)
class Training:
    """What runs."""

    optimizer: str = "own"
    rests: bool = False

    def command(self, stage: Stage) -> list[str]:
        script = Path(__file__).with_name(SCRIPTS[self.optimizer])
        return [str(script), str(stage.marks.folder), *(["rest"] if self.rests else [])]


class Contender(ABC):
    """One launcher with its options."""

    name: str

    @abstractmethod
    def start(self, stage: Stage, shape: Shape, training: Training) -> None:
        """Start as many agents as the shape wants. Returns at once, or when they can join."""

    def ledgers(self, _stage: Stage) -> Ledgers | None:
        """Where its own account of its incidents is."""
        return None


@dataclass(frozen=True)
class Revision:
    """Everstep as another commit has it, installed into a folder without its dependencies."""

    name: str
    folder: Path

    @classmethod
    def installed(cls, name: str, folder: Path) -> "Revision":
        source, target = folder / "source.tar.gz", folder / "installed"
        folder.mkdir(parents=True)
        prefix = ["--format", "tar.gz", "--prefix", "everstep/", "--output", str(source)]
        subprocess.run(["git", "-C", str(_ROOT), "archive", *prefix, name], check=True)
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(target)]
        subprocess.run([*pip, str(source)], check=True)
        return cls(name, target)


class Everstep(Contender):
    """`everstep run`; more than one agent share an `everstep up`, or `bus` with its services."""

    def __init__(
        self,
        start: str,
        *,
        with_up: bool = False,
        against: Revision | None = None,
        bus: tuple[str, Path] | None = None,
        survives: bool = False,
    ) -> None:
        self._survives = survives
        self._with_up = with_up
        self._bus = bus
        self._environ = {} if against is None else {"PYTHONPATH": f"{against.folder}:{_ROOT}"}
        self._options = [
            *(f"--{start}", "--console", "none", "--job", JOB),
            *("--max-restarts", "none", "--no-progress-limit", "none"),
        ]
        self.name = f"everstep {start}" + ("" if against is None else f" at {against.name}")
        if survives:
            self.name += " with survivors"
        if bus is not None:
            self.name += f" on {bus[0]}"
            self._options += ["--config", str(bus[1])]

    def start(self, stage: Stage, shape: Shape, training: Training) -> None:
        everstep = [sys.executable, "-m", "everstep_services.cli"]
        state = ["--state-dir", str(stage.folder / "state")]
        options = [*self._options, "--nproc-per-node", str(shape.ranks)]
        if self._bus is None and (self._with_up or len(shape.names) > 1):
            stage.start("up", [*everstep, "up", "--api-port", "0", *state], self._environ)
            Ledgers.wait(stage.folder / "state", _UP_WITHIN_S)
        if self._bus or self._with_up or len(shape.names) > 1:
            options += ["--nnodes", str(shape.nodes), "--spares", str(shape.spares)]
        for place, node in enumerate(shape.names):
            own = ["--node-id", node, "--infra-rank", str(place)]
            script = replace(training, optimizer="survives") if self._survives else training
            run = [*everstep, "run", *state, *own, *options, *script.command(stage)]
            stage.start(node, run, self.environ(node))

    def environ(self, _node: str) -> Mapping[str, str]:
        """What a node has of its own."""
        return self._environ

    def ledgers(self, _stage: Stage) -> Ledgers | None:
        return None if self._bus else Ledgers(_stage.folder / "state", JOB)


class Elastic(Contender):
    """A launcher with torchrun's options."""

    # Without it, ranks of a later round read gloo's keys of an earlier one, and hang.
    environ: Mapping[str, str] = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    # By default they wait 30 s for a lost node to come back.
    last_call = "last_call_timeout=1"

    def __init__(self, name: str, program: Sequence[str], options: Sequence[str] = ()) -> None:
        self.name = name
        self._launch = [*program, *options]

    def start(self, stage: Stage, shape: Shape, training: Training) -> None:
        most = shape.nodes + shape.spares
        nodes = f"{shape.nodes}:{most}" if shape.spares else str(shape.nodes)
        port = free_port()
        for place, node in enumerate(shape.names):
            meeting = [
                *("--rdzv-backend", "c10d", "--rdzv-id", JOB),
                *("--rdzv-endpoint", f"127.0.0.1:{port}", "--local-addr", "127.0.0.1"),
                *("--rdzv-conf", f"is_host={int(place == 0)},{self.last_call}"),
            ]
            run = [
                *(*self._launch, *meeting, "--max-restarts", "100"),
                *("--nnodes", nodes, "--nproc-per-node", str(shape.ranks)),
                *training.command(stage),
            ]
            stage.start(node, run, self.environ)


def torchrun() -> Elastic:
    return Elastic("torchrun", [sys.executable, "-m", "torch.distributed.run"])


def ft_launcher(program: Path, options: Sequence[str]) -> Elastic:
    """NVRx's, with its defaults: it restarts on any failure."""
    return Elastic("ft_launcher", [str(program)], options)
