"""What can be injected, by the name of the fault and its variant."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

Hook = Literal[
    "start", "prepare", "load", "forward", "backward", "optimize", "metrics", "save"
]  # fmt: skip
"""The part of a step, or of the time before the first one, that a fault takes the place of."""
HOURS_S = 36_000
"""Longer than anybody looks."""


class Training(Protocol):
    """What an injection may use of the rank in which it runs."""

    rank: int
    world: int
    culprit: int
    step: int
    at: int
    folder: Path
    workers: int
    trap: Callable[[], Any] | None
    loss: Any
    net: Any
    metrics_group: Any
    other_group: Any

    @property
    def is_culprit(self) -> bool: ...

    @property
    def neighbour(self) -> int: ...

    def tell(self, text: str) -> None: ...
    def forward(self) -> None: ...
    def backward(self) -> None: ...
    def optimize(self) -> None: ...
    def metrics(self) -> None: ...
    def save(self) -> None: ...
    def finish(self) -> None: ...


Run = Callable[[Training], Any]


@dataclass(frozen=True, slots=True)
class Injection:
    """The fault, and the part of a step that it replaces."""

    hook: Hook
    run: Run
    runs_everywhere: bool
    """Whether all ranks run it, and not the drawn one alone."""


_INJECTIONS: dict[tuple[str, int], Injection] = {}


def fault(name: str, hook: Hook, *, everywhere: bool = False) -> Callable[[Run], Run]:
    """Register the next variant of a fault."""

    def register(run: Run) -> Run:
        variant = sum(known == name for known, _ in _INJECTIONS)
        _INJECTIONS[name, variant] = Injection(hook, run, everywhere)
        return run

    return register


def injections() -> Mapping[tuple[str, int], Injection]:
    """All that can be injected."""
    from tests.corpus.injected import collectives, errors, losses, standstills

    assert all((collectives, errors, losses, standstills))
    return _INJECTIONS
