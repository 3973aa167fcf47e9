"""Failures of trainings that survive, drawn from a seed: the shape, the kind, and the moment."""

import random
from dataclasses import dataclass
from typing import Literal

Shape = Literal[
    "ddp 2",
    "ddp 3",
    "ddp 4",
    "ddp 8",
    "hsdp 2x2",
    "fsdp 4",
    "pipeline 2x2",
    "twins 2x2",
    "numerics 4",
]
"""`pipeline` has two stages of other forms, `twins` two of the same, which name their places.
`numerics` is DDP whose steps are judged by `run.numerics`."""
Kind = Literal["kill", "segfault", "raise", "hang", "node", "agent"]
Point = Literal["any", "optimizer", "stepped", "save", "heal"]

STEPS = 80
_APART = 4
"""Steps from one failure to the next."""
_SHAPES: dict[Shape, int] = {
    "ddp 2": 2, "ddp 3": 1, "ddp 4": 4, "ddp 8": 2, "hsdp 2x2": 4, "fsdp 4": 3,
    "pipeline 2x2": 3, "twins 2x2": 1, "numerics 4": 2,
}  # fmt: skip
_KINDS: dict[Kind, int] = {"kill": 5, "segfault": 3, "raise": 3, "hang": 2}
_POINTS: dict[Point, int] = {"any": 5, "optimizer": 2, "stepped": 1, "save": 2, "heal": 2}
HEALINGS = ("build", "agree", "copy", "copied")


@dataclass(frozen=True, kw_only=True)
class Failure:
    """What happens to a rank, or to its node."""

    kind: Kind
    rank: int
    point: Point
    step: int
    """The first step in which it may happen; in the healing after the failure before, if not 0."""
    healing: str = ""
    """The part of a healing."""
    delay_ms: float = 0.0
    """From the point, where another thread ends the process."""

    @property
    def of_node(self) -> bool:
        return self.kind in ("node", "agent")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A training with its failures, in their order."""

    seed: int
    shape: Shape
    nodes: int
    saves_every: int
    failures: tuple[Failure, ...]

    @property
    def world(self) -> int:
        return world_of(self.shape)


def world_of(shape: Shape) -> int:
    return 4 if "x" in shape else int(shape[-1])


def drawn(seed: int) -> Case:
    """The case of a seed."""
    dice = random.Random(f"survive {seed}")
    (shape,) = dice.choices(list(_SHAPES), list(_SHAPES.values()))
    nodes = 2 if dice.random() < 0.15 and world_of(shape) == 4 else 1
    failures, step = [], 0
    # A training is long in coming, and a failure is not.
    for number in range(dice.choice((1, 2, 3, 10, 12)) if nodes == 1 else 1):
        step += dice.randint(1, _APART) + (_APART // 2 if number else 0)
        failures.append(_failure(dice, shape, step, is_first=number == 0, of_node=nodes > 1))
    return Case(
        seed=seed, shape=shape, nodes=nodes, failures=tuple(failures),
        # Every shape has images, so that a step that no rank has costs few.
        saves_every=dice.choice((1, 2, 3)),
    )  # fmt: skip


def _failure(
    dice: random.Random, shape: Shape, step: int, *, is_first: bool, of_node: bool
) -> Failure:
    (kind,) = dice.choices(list(_KINDS), list(_KINDS.values()))
    (point,) = dice.choices(list(_POINTS), list(_POINTS.values()))
    if of_node:
        kind, point = dice.choice(("node", "agent")), "any"
    if point == "heal" and is_first:
        point = "any"
    # A thread can end a process at any moment of it, but not raise in its training.
    is_random = kind in ("kill", "segfault", "node", "agent")
    return Failure(
        kind=kind, point=point, step=step, rank=dice.randrange(world_of(shape)),
        healing=dice.choice(HEALINGS) if point == "heal" else "",
        delay_ms=dice.uniform(0, 20) if is_random and point in ("any", "save", "heal") else 0.0,
    )  # fmt: skip
