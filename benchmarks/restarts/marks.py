"""The marks that ranks leave at their first step, and how they are read."""

import time
from dataclasses import dataclass
from pathlib import Path

import msgspec

_LOOK_EVERY_S = 0.01


class Mark(msgspec.Struct, frozen=True):
    """One rank has made its first step."""

    at: float
    life: int
    rank: int
    world: int
    pid: int
    node: str


@dataclass(frozen=True)
class Life:
    """The training from one start of its ranks to their end."""

    marks: tuple[Mark, ...]

    @property
    def id(self) -> int:
        return self.marks[0].life

    @property
    def at(self) -> float:
        """When the last rank had made its first step."""
        return max(mark.at for mark in self.marks)

    @property
    def nodes(self) -> list[str]:
        """By their lowest rank."""
        return list(dict.fromkeys(mark.node for mark in self.marks))


class Marks:
    """All lives of one training."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True)

    def lives(self) -> list[Life]:
        """Those in which every rank has made a step, the oldest first."""
        by_life: dict[int, list[Mark]] = {}
        for path in self.folder.glob("*.json"):
            one = msgspec.json.decode(path.read_bytes(), type=Mark)
            by_life.setdefault(one.life, []).append(one)
        lives = [
            Life(tuple(sorted(marks, key=lambda mark: mark.rank)))
            for marks in by_life.values()
            if len(marks) == marks[0].world
        ]
        return sorted(lives, key=lambda life: life.at)

    def after(self, moment: float, within_s: float) -> Life | None:
        """The first life whose ranks all made their first step after that moment."""
        while time.monotonic() < moment + within_s:
            for life in self.lives():
                if min(mark.at for mark in life.marks) > moment:
                    return life
            time.sleep(_LOOK_EVERY_S)
        return None
