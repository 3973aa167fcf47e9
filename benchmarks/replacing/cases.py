"""One node of a training that is lost with its memory, and what comes back to the spare's."""

import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TypeVar

import msgspec

from benchmarks.restarts.contenders import Everstep, Shape, Training
from benchmarks.restarts.stage import Stage, kill
from trainer_sdk.checkpoint.manifest import INDEX
from trainer_sdk.checkpoint.restore.choice import MEMORY, PEER

SAVED = 2
_WITHIN_S = 90.0
_LOOK_EVERY_S = 0.01
_COPIES = f"*/everstep-*/images/*/held/slot-*/rank-*/{SAVED}-*/{INDEX}"
Seen = TypeVar("Seen")


@dataclass(frozen=True)
class Saving(Training):
    """The case that keeps some MiB of each rank in memory, and restores after a while."""

    mib: int = 512
    building_s: float = 0.0

    def command(self, stage: Stage) -> list[str]:
        script = Path(__file__).with_name("train.py")
        told = (stage.marks.folder, self.mib, SAVED, self.building_s)
        return [str(script), *map(str, told)]


class Apart(Everstep):
    """`everstep run`, each node with a memory of its own."""

    def __init__(self, start: str, memory: Path) -> None:
        super().__init__(start)
        self._memory = memory

    def environ(self, node: str) -> Mapping[str, str]:
        own = self._memory / node
        own.mkdir()
        return {
            "EVERSTEP_AGENT__CHECKPOINTS__MEMORY_DIR": str(own),
            "EVERSTEP_LOG__LEVEL": "info",
            "EVERSTEP_LOG__FORMAT": "json",
        }


class Back(msgspec.Struct, frozen=True):
    """What a rank has written down of its way back."""

    rank: int
    called_at: float
    back_at: float
    step: int
    tier: str
    is_equal: bool

    @property
    def ms(self) -> float:
        return 1000 * (self.back_at - self.called_at)


@dataclass(frozen=True)
class Outcome:
    """Milliseconds."""

    own_ms: float
    """The call of `restore()` on the node that stayed."""
    peer_ms: float
    """And on that which is new."""
    fetch_ms: float
    """From the order to start its ranks until its agent has said what there is."""
    ahead_ms: float
    """How long that was before its rank called `restore()`."""
    back_ms: float
    """From the kill to the first step after it."""


def play(folder: Path, memory: Path, start: str, training: Saving) -> Outcome:
    """Start it, kill a node when its state is with the other, and wait until all is back."""
    shape = Shape(2, 1, 1)
    with Stage(folder) as stage:
        Apart(start, memory).start(stage, shape, training)
        life = stage.first_life(_WITHIN_S)
        lost = life.marks[1].node
        (spare,) = set(shape.names) - set(life.nodes)
        said = folder / f"{spare}.log"
        _until(lambda: len(list(memory.glob(_COPIES))) == 2, f"two copies in {memory}")
        _until(
            lambda: start == "cold" or b"forge_ready" in said.read_bytes(), f"a forge on {spare}"
        )
        struck_at = kill(stage.pids(lost))
        shutil.rmtree(memory / lost)
        after = stage.marks.after(struck_at, _WITHIN_S)
        if after is None:
            raise TimeoutError(f"not back within {_WITHIN_S:g} s; look into {folder}")
        own, peer = (_back(stage, rank) for rank in (0, 1))
        assert after.marks[1].node == spare
        assert [(one.step, one.tier) for one in (own, peer)] == [(SAVED, MEMORY), (SAVED, PEER)]
        assert own.is_equal
        assert peer.is_equal
        events = _events(said)
        return Outcome(
            own_ms=own.ms,
            peer_ms=peer.ms,
            fetch_ms=1000 * (events["images_offered"] - events["StartRanks"]),
            ahead_ms=1000 * (peer.called_at - events["images_offered"]),
            back_ms=1000 * (after.at - struck_at),
        )


def _until(look: Callable[[], Seen], what: str) -> Seen:
    deadline = time.monotonic() + _WITHIN_S
    while not (seen := look()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {_WITHIN_S:g} s: {what}")
        time.sleep(_LOOK_EVERY_S)
    return seen


def _back(stage: Stage, rank: int) -> Back:
    note = stage.marks.folder / f"back-{rank}"
    _until(note.exists, str(note))
    return msgspec.json.decode(note.read_bytes(), type=Back)


def _events(log: Path) -> dict[str, float]:
    """What an agent has logged, orders by their type, and when last, on the clock of the ranks."""
    found = {}
    wall_less_ours = time.time() - time.monotonic()
    for line in log.read_bytes().splitlines():
        if line.startswith(b"{"):
            said = msgspec.json.decode(line)
            name = said["type"] if said["event"] == "order" else said["event"]
            found[name] = datetime.fromisoformat(said["at"]).timestamp() - wall_less_ours
    return found
