"""One stall of one contender: when it was found, and when the training went on."""

import json
import os
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from benchmarks.restarts.contenders import JOB, Elastic, Everstep, Shape, Training
from benchmarks.restarts.stage import Stage
from benchmarks.stalling.train import HANG_FILE
from everstep_services.cli.api.client import Api
from everstep_services.cli.errors import CliError
from everstep_services.cli.machine.state import StateDir

LIMIT_S = 2.0
_HERE = Path(__file__).parent
_LAUNCH_WITHIN_S = 90.0
_BACK_WITHIN_S = 90.0
_LOOK_EVERY_S = 0.005


@dataclass(frozen=True)
class Hanging(Training):
    """The training that hangs once, or is only watched."""

    kind: str = "sleep"
    library: str = "everstep"

    def command(self, stage: Stage) -> list[str]:
        return [str(_HERE / "train.py"), str(stage.marks.folder), self.library, self.kind]


@dataclass(frozen=True)
class Watched(Training):
    """The one that never hangs."""

    def command(self, stage: Stage) -> list[str]:
        return [str(_HERE / "watched.py"), str(stage.marks.folder)]


class Limited(Everstep):
    """`everstep run` with limits set by hand."""

    library = "everstep"

    def __init__(self, *, with_up: bool = False) -> None:
        super().__init__("warm", with_up=with_up)
        self.name = "everstep"
        for name in ("data", "forward", "outside"):
            self._options += ["--limit", f"{name}={LIMIT_S:g}"]


class Sectioned(Elastic):
    """NVRx's launcher with its section timeouts."""

    library = "nvrx"

    def __init__(self, program: Path, options: list[str], check_s: float | None) -> None:
        own = [
            *("--ft-rank-section-timeouts", f"data:{LIMIT_S:g},forward:{LIMIT_S:g}"),
            *("--ft-rank-out-of-section-timeout", f"{LIMIT_S:g}"),
        ]
        name = "NVRx"
        if check_s is not None:
            own += ["--ft-workload-check-interval", f"{check_s:g}"]
            name += f", looks every {check_s:g} s"
        super().__init__(name, [str(program)], [*options, *own])


@dataclass(frozen=True)
class Outcome:
    """Milliseconds, the first two from the moment at which the limit was passed."""

    found_ms: float | None
    killed_ms: float
    back_ms: float
    """From the limit to the last rank's first step of the next round."""


def play(folder: Path, contender: Limited | Sectioned, ranks: int, kind: str) -> Outcome:
    """Start it, let it hang, and wait until its training goes on."""
    folder.mkdir(parents=True)
    with Stage(folder) as stage:
        contender.start(stage, Shape(1, ranks), Hanging(kind=kind, library=contender.library))
        stage.first_life(_LAUNCH_WITHIN_S)
        hang = _hang(stage)
        limit_at = hang["at"] + LIMIT_S
        killed_at = _gone(int(hang["pid"]))
        after = stage.marks.after(hang["at"], _BACK_WITHIN_S)
        if after is None:
            raise TimeoutError(f"not back within {_BACK_WITHIN_S:g} s; ended {stage.ended()}")
        found_ms = None
        if isinstance(contender, Everstep):
            found_ms = 1000 * (_found(stage) - hang["wall"] - LIMIT_S)
        return Outcome(found_ms, 1000 * (killed_at - limit_at), 1000 * (after.at - limit_at))


def _hang(stage: Stage) -> dict[str, float]:
    note, deadline = stage.marks.folder / HANG_FILE, time.monotonic() + _LAUNCH_WITHIN_S
    while not note.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"no rank has hung; look into {stage.folder}")
        time.sleep(_LOOK_EVERY_S)
    found: dict[str, float] = json.loads(note.read_text())
    return found


def _gone(pid: int) -> float:
    """When that rank was dead."""
    deadline = time.monotonic() + _BACK_WITHIN_S
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return time.monotonic()
        if state == "Z":
            return time.monotonic()
        time.sleep(_LOOK_EVERY_S)
    raise TimeoutError(f"the rank that hangs was not ended within {_BACK_WITHIN_S:g} s")


def _found(stage: Stage, within_s: float = 10.0) -> float:
    """When the finding was made, by the fact, on the wall clock."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        running = StateDir(stage.folder / "state").running()
        if running is not None:
            try:
                with Api(running.api, Path(running.token_file).read_text().strip()) as api:
                    asked = {"job": JOB, "kind": "rank_stalled"}
                    for fact in api.pages("facts", asked, most=None):
                        return datetime.fromisoformat(fact["body"]["at"]).timestamp()
            except CliError:
                pass  # history has not heard of it yet
        time.sleep(0.05)
    raise TimeoutError("no fact says that a rank has stalled")


def agent_ms_a_second(folder: Path, ranks: int, seconds: float) -> float:
    """Processor time of the agent alone, while it watches ranks that report all the time."""
    folder.mkdir(parents=True)
    with Stage(folder) as stage:
        Limited(with_up=True).start(stage, Shape(1, ranks), Watched())
        deadline = time.monotonic() + _LAUNCH_WITHIN_S
        while len(list(stage.marks.folder.glob("up.*"))) < ranks:
            if time.monotonic() > deadline:
                raise TimeoutError(f"not all ranks are up; look into {stage.folder}")
            time.sleep(0.05)
        time.sleep(3.0)
        pid = stage.pid("node-0")
        before, began = _ticks(pid), time.monotonic()
        time.sleep(seconds)
        spent, took_s = _ticks(pid) - before, time.monotonic() - began
        return 1000 * spent / os.sysconf("SC_CLK_TCK") / took_s


def _ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])
