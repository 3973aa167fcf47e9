"""The labels of the corpus, and `run_fault`: one run of one fault, and what happened in it."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tests.corpus.training import STEPS, draw
from tests.waiting import until

Cause = Literal[
    "user_code", "configuration", "data", "framework", "gpu", "host", "network", "storage",
    "scheduler", "unknown",
]  # fmt: skip
Culprit = Literal["drawn", "pair", "all"]
Need = Literal["cgroup", "small_disk"]

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).parent / "training.py"
WORLD = 4
_QUIET_LOOKS = 50
"""After this number of looks without any news, ranks stand still."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that goes wrong, and whose fault it is."""

    name: str
    variant: int
    cause: Cause
    culprit: Culprit = "drawn"
    hangs: bool = False
    """Whether some ranks stand still for ever; otherwise all of them end."""
    ends: tuple[int, ...] = ()
    """How a culprit may end: its exit status, negative for a signal. Empty where it does not."""
    also: tuple[Cause, ...] = ()
    """Causes that a careful reader of the evidence may give, too."""
    needs: Need | None = None

    def culprits(self, seed: int, world: int) -> tuple[int, ...]:
        """The ranks that an answer should name."""
        rank, _ = draw(seed, world)
        match self.culprit:
            case "drawn":
                return (rank,)
            case "pair":
                return tuple(sorted((rank, (rank + 1) % world)))
            case "all":
                return tuple(range(world))

    def __str__(self) -> str:
        return f"{self.name}-{self.variant}"


def _hangs(name: str, cause: Cause, *culprits: Culprit) -> list[Fault]:
    return [Fault(name, number, cause, one, hangs=True) for number, one in enumerate(culprits)]


def _ends(name: str, cause: Cause, *ends: int, culprit: Culprit = "drawn") -> list[Fault]:
    return [Fault(name, number, cause, culprit, ends=(code,)) for number, code in enumerate(ends)]


_FIVE: tuple[Culprit, ...] = ("drawn",) * 5
_TERM, _KILL, _SEGV = -signal.SIGTERM, -signal.SIGKILL, -signal.SIGSEGV
_REFUSED = (1, -signal.SIGABRT)
"""gloo ends a rank that gets more than it expects, and its peers lose it."""
_TABLE = (
    *_hangs("skipped_collective", "user_code", *_FIVE),
    Fault("wrong_shape", 0, "user_code", ends=_REFUSED),
    Fault("wrong_shape", 1, "user_code", ends=_REFUSED),
    Fault("wrong_shape", 2, "user_code", hangs=True),
    Fault("wrong_shape", 3, "user_code", ends=_REFUSED),
    Fault("wrong_shape", 4, "user_code", ends=_REFUSED),
    *_hangs("wrong_order", "user_code", *_FIVE[:4], "pair"),
    *_hangs("two_groups", "user_code", *("all",) * 5),
    *_hangs("lock_held", "user_code", *_FIVE, "drawn"),
    *_hangs("sleeping_rank", "user_code", *_FIVE, "drawn"),
    *_hangs("stuck_loader", "data", *_FIVE[:3]),
    Fault("stuck_loader", 3, "data", hangs=True, also=("user_code",)),
    Fault("stuck_loader", 4, "data", hangs=True, also=("user_code",)),
    *_hangs("stuck_checkpoint", "storage", *_FIVE),
    Fault("dead_peer", 0, "unknown", ends=(1,), also=("user_code",)),
    Fault("dead_peer", 1, "user_code", ends=(0,), also=("unknown",)),
    Fault("dead_peer", 2, "host", hangs=True, also=("unknown",)),
    Fault("dead_peer", 3, "network", ends=_REFUSED),
    Fault("dead_peer", 4, "unknown", ends=(-signal.SIGABRT,), also=("framework", "user_code")),
    *_ends("sigkill", "unknown", *[_KILL] * 4),
    Fault("sigkill", 4, "unknown", hangs=True, ends=(_KILL,)),
    *_ends("segfault", "unknown", *[_SEGV] * 5),
    *_ends("preempted", "scheduler", _TERM, _KILL, _TERM, _TERM, 143, culprit="all"),
    *_ends("exception", "user_code", 1, 1, 1, 1, 1, 1),
    Fault("missing_file", 0, "data", ends=(1,), also=("configuration",)),
    Fault("missing_file", 1, "configuration", "all", ends=(1,)),
    Fault("missing_file", 2, "configuration", ends=(1,), also=("storage",)),
    Fault("missing_file", 3, "data", ends=(1,), also=("configuration",)),
    Fault("missing_file", 4, "configuration", ends=(1,)),
    *_ends("bad_config", "configuration", 2, 1, 1, 1, 1, culprit="all"),
    *_ends("out_of_memory", "host", 1, 1, 1, 1),
    Fault("out_of_memory", 4, "host", ends=(_KILL,), needs="cgroup"),
    *_ends("nan", "user_code", 1, 1, 1),
    Fault("nan", 3, "user_code", "all", ends=(1,)),
    Fault("nan", 4, "user_code", ends=(1,)),
    *_ends("disk_full", "storage", 1, 1, 1),
    Fault("disk_full", 3, "storage", ends=(1,), needs="small_disk"),
    Fault("disk_full", 4, "storage", ends=(1,), needs="small_disk"),
    *_ends("permission", "configuration", 1, 1, 1),
    Fault("permission", 3, "configuration", "all", ends=(1,)),
    Fault("permission", 4, "configuration", ends=(1,)),
)
FAULTS = {(one.name, one.variant): one for one in _TABLE}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What happened in one run."""

    fault: Fault
    seed: int
    world: int
    ends: Mapping[int, int | None]
    """The exit status of each rank; None where it did not end."""
    progress: Mapping[int, tuple[str, ...]]
    """What each rank told."""
    output: Mapping[int, str]
    """The end of what each rank wrote, stdout and stderr."""

    @property
    def culprits(self) -> tuple[int, ...]:
        return self.fault.culprits(self.seed, self.world)

    @property
    def hit(self) -> tuple[int, ...]:
        """The ranks in which the fault really was injected."""
        return tuple(rank for rank, told in sorted(self.progress.items()) if _is_hit(told))

    @property
    def hangs(self) -> bool:
        return None in self.ends.values()


def _is_hit(told: Sequence[str]) -> bool:
    return any(line.startswith("fault") for line in told)


@dataclass
class Run:
    """Ranks of one fault, as processes."""

    fault: Fault
    seed: int
    folder: Path
    ranks: Mapping[int, "subprocess.Popen[bytes]"] = field(repr=False)

    def settle(self, within_s: float = 150.0) -> Outcome:
        """Wait until all ranks have ended or, where the fault hangs, until nothing moves."""
        looks: list[object] = []

        def quiet() -> bool:
            state = self._state()
            ends, told = state
            if None not in ends:
                return True
            if not self.fault.hangs:
                return False
            is_same = looks[-1:] == [state] and not any(map(_computes, self._watched()))
            looks[:] = [*looks, state] if is_same else [state]
            return len(looks) > _QUIET_LOOKS and any(map(_is_hit, told))

        until(quiet, f"{self.fault} has finished", within_s=within_s)
        return self.outcome()

    def _watched(self) -> list[int]:
        """The processes of the ranks that wait: a culprit may spin, and any other must stand."""
        culprits = self.fault.culprits(self.seed, len(self.ranks))
        waiting = set(self.ranks) - set(culprits) or set(self.ranks)
        return [one.pid for rank, one in self.ranks.items() if rank in waiting]

    def _state(self) -> tuple[tuple[int | None, ...], tuple[tuple[str, ...], ...]]:
        ends = tuple(one.poll() for one in self.ranks.values())
        return ends, tuple(self._told(rank) for rank in self.ranks)

    def _told(self, rank: int) -> tuple[str, ...]:
        path = self.folder / f"progress_{rank}"
        return tuple(path.read_text().splitlines()) if path.exists() else ()

    def outcome(self) -> Outcome:
        """What has happened up to now."""
        return Outcome(
            self.fault,
            self.seed,
            len(self.ranks),
            {rank: one.poll() for rank, one in self.ranks.items()},
            {rank: self._told(rank) for rank in self.ranks},
            {rank: _end_of(self.folder / f"output_{rank}") for rank in self.ranks},
        )


def _computes(pid: int) -> bool:
    """Whether a thread of the process has, or wants, a processor."""
    with suppress(OSError):  # it may end while it is looked at
        stats = [one.read_text() for one in Path(f"/proc/{pid}/task").glob("*/stat")]
        return any(one.rpartition(")")[2].split()[0] == "R" for one in stats)
    return False


def _end_of(path: Path) -> str:
    return path.read_bytes()[-16_000:].decode(errors="replace")


def command(fault: Fault, seed: int, folder: Path, steps: int = STEPS) -> list[str]:
    """The words after a launcher's own."""
    words = [str(SCRIPT), "--fault", fault.name, "--variant", str(fault.variant)]
    return [*words, "--seed", str(seed), "--folder", str(folder), "--steps", str(steps)]


@contextmanager
def running(
    fault: Fault,
    folder: Path,
    *,
    seed: int = 0,
    world: int = WORLD,
    environ: Mapping[str, str] | None = None,
) -> Iterator[Run]:
    """Ranks without a launcher: nobody ends those that stand still, until the block is left."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    folder.chmod(0o755)
    ranks: dict[int, subprocess.Popen[bytes]] = {}
    try:
        for rank in range(world):
            own = _environment(rank, world, port) | dict(environ or {})
            with (folder / f"output_{rank}").open("wb") as output:
                ranks[rank] = subprocess.Popen(
                    [sys.executable, *command(fault, seed, folder)],
                    env=own,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        yield Run(fault, seed, folder, ranks)
    finally:
        for process in ranks.values():
            _end(process)


def run_fault(
    fault: Fault,
    folder: Path,
    *,
    seed: int = 0,
    world: int = WORLD,
    environ: Mapping[str, str] | None = None,
) -> Outcome:
    """Run it once, to its end or until it stands still."""
    with running(fault, folder, seed=seed, world=world, environ=environ) as run:
        return run.settle()


def _environment(rank: int, world: int, port: int) -> dict[str, str]:
    inherited = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
    return inherited | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "PYTHONFAULTHANDLER": "1",
        "PYTHONUNBUFFERED": "1",
    }


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End a rank and what it has started; a session of its own has all of it."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
