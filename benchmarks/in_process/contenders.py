"""Who restarts a training after an exception: wrappers in the process, and launchers."""

import json
import sys
import time
from pathlib import Path

from benchmarks.in_process.train import ORDER, RAISED
from benchmarks.restarts.contenders import Contender, Elastic, Shape, Training
from benchmarks.restarts.contenders import Everstep as Launcher
from benchmarks.restarts.marks import Life
from benchmarks.restarts.stage import Stage

SCRIPT = Path(__file__).with_name("train.py")
_RAISED_WITHIN_S = 30.0
_LIMIT_WITHIN_S = 120.0
_LOOK_EVERY_S = 0.005


def strike(stage: Stage, _: Life) -> float:
    """Have the last rank raise; when it did."""
    raised = stage.marks.folder / RAISED
    raised.unlink(missing_ok=True)
    (stage.marks.folder / ORDER).touch()
    deadline = time.monotonic() + _RAISED_WITHIN_S
    while not raised.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"no rank has raised within {_RAISED_WITHIN_S:g} s: {stage.folder}")
        time.sleep(_LOOK_EVERY_S)
    return float(json.loads(raised.read_text()))


class _Script(Training):
    """The training, as a rank of a launcher."""

    how: str

    def __init__(self, how: str) -> None:
        super().__init__()
        object.__setattr__(self, "how", how)

    def command(self, stage: Stage) -> list[str]:
        return [str(SCRIPT), str(stage.marks.folder), self.how]


class InProcess(Contender):
    """A wrapper in ranks that no launcher has started."""

    def __init__(self, name: str, python: Path, *, is_patient: bool) -> None:
        """With `is_patient`, it waits its default second before it aborts."""
        self.name = f"{name} in process{' by default' if is_patient else ''}"
        self._python = python
        package = "everstep" if name == "everstep" else "nvrx"
        self._how = package if is_patient else f"{package}-at-once"

    def start(self, stage: Stage, shape: Shape, training: Training) -> None:
        del training
        command = [str(self._python), str(SCRIPT), str(stage.marks.folder), self._how]
        environ = {"CUDA_VISIBLE_DEVICES": "", "EVERSTEP_ATTACH": "off"}
        stage.start("ranks", [*command, str(shape.ranks)], environ)


class Everstep(Launcher):
    """`everstep run`, which starts the processes again."""

    how = "plain"

    def start(self, stage: Stage, shape: Shape, training: Training) -> None:
        del training
        super().start(stage, shape, _Script(self.how))


class Wrapped(Everstep):
    """`everstep run` of a training that restarts in its processes."""

    how = "everstep-at-once"

    def __init__(self) -> None:
        super().__init__("warm")
        self.name = "everstep run in process"


class Torchrun(Elastic):
    """torchrun, which starts the processes again."""

    def __init__(self) -> None:
        super().__init__("torchrun", [sys.executable, "-m", "torch.distributed.run"])

    def start(self, stage: Stage, shape: Shape, training: Training) -> None:
        del training
        super().start(stage, shape, _Script("plain"))


def limit(folder: Path, ranks: int, times: int) -> list[float]:
    """Milliseconds that ranks which stay need for a new gloo group and a step."""
    folder.mkdir(parents=True)
    with Stage(folder) as stage:
        program = [sys.executable, "-m", "benchmarks.in_process.group_again"]
        stage.start("limit", [*program, str(stage.marks.folder), str(ranks), str(times)], {})
        found = stage.marks.folder / "times"
        while not found.exists():
            if stage.ended() or time.monotonic() > stage.began + _LIMIT_WITHIN_S:
                raise TimeoutError(f"the limit was not measured: {folder}")
            time.sleep(_LOOK_EVERY_S)
        return [float(took) for took in json.loads(found.read_text())]
