"""What lies below every launcher."""

import json
import sys
import time
from pathlib import Path

from benchmarks.restarts.contenders import Contender, Shape, Training
from benchmarks.restarts.ports import free_port
from benchmarks.restarts.stage import Stage

_WITHIN_S = 120.0


def forked(folder: Path, ranks: int, times: int) -> list[float]:
    """Milliseconds from the first fork of a process that has torch, to the last first step."""
    folder.mkdir(parents=True)
    with Stage(folder) as stage:
        program = [sys.executable, "-m", "benchmarks.restarts.floor", str(stage.marks.folder)]
        stage.start("floor", [*program, str(ranks), str(times)], {})
        found = stage.marks.folder / "times"
        while not found.exists():
            if stage.ended() or time.monotonic() > stage.began + _WITHIN_S:
                raise TimeoutError(f"the floor has not ended: {folder}")
            time.sleep(0.05)
        return [float(took) for took in json.loads(found.read_text())]


class ByHand(Contender):
    """No launcher at all: one interpreter for each rank, with its place in the environment."""

    name = "no launcher"

    def start(self, stage: Stage, shape: Shape, training: Training) -> None:
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        world = {"WORLD_SIZE": str(shape.ranks)}
        for rank in range(shape.ranks):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            command = [sys.executable, *training.command(stage)]
            stage.start(f"rank-{rank}", command, {**place, **world, **own})
