"""What is done to a training, and how long it takes until it makes its next step."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.restarts.contenders import Contender, Shape, Training
from benchmarks.restarts.marks import Life
from benchmarks.restarts.stage import Stage, freeze, kill

SETTLE_S = 1.0
LAUNCH_WITHIN_S = 90.0
BACK_WITHIN_S = 60.0


@dataclass(frozen=True)
class Case:
    """One kind of trouble: `strike` makes it, and says when."""

    name: str
    strike: Callable[[Stage, Life], float]


@dataclass
class Outcome:
    """What one contender's stage gave."""

    launch_ms: float
    back_ms: list[float] = field(default_factory=list)
    not_back: list[str] = field(default_factory=list)
    """Why there is no figure."""
    left: list[int] = field(default_factory=list)
    """Ranks of the life before that were still there when the next made its first step."""
    worlds: list[int] = field(default_factory=list)
    """How many ranks it went on with."""
    phases: list[Mapping[str, float]] = field(default_factory=list)


def _rank(_: Stage, life: Life) -> float:
    return kill([life.marks[-1].pid])


def _victim(life: Life) -> str:
    """A node that trains, and is not the first: the peers' stores live there."""
    return next(node for node in reversed(life.nodes) if node != "node-0")


def _node(stage: Stage, life: Life) -> float:
    return kill(stage.pids(_victim(life)))


def _agent(stage: Stage, life: Life) -> float:
    return kill([stage.pid(_victim(life))])


def _silence(stage: Stage, life: Life) -> float:
    return freeze(stage.pids(_victim(life)))


RANK = Case("SIGKILL of a rank", _rank)
NODE = Case("SIGKILL of an agent with all its ranks", _node)
AGENT = Case("SIGKILL of an agent alone", _agent)
SILENT = Case("SIGSTOP of an agent with all its ranks", _silence)


def play(
    folder: Path, contender: Contender, shape: Shape, case: Case, training: Training, times: int
) -> Outcome:
    """Start the contender, strike it `times` times, and end it."""
    folder.mkdir(parents=True)
    with Stage(folder) as stage:
        contender.start(stage, shape, training)
        life = stage.first_life(LAUNCH_WITHIN_S)
        outcome = Outcome(1000 * (life.at - stage.began))
        for _ in range(times):
            time.sleep(SETTLE_S)
            struck_at = case.strike(stage, life)
            after = stage.marks.after(struck_at, BACK_WITHIN_S)
            if after is None:
                ended = f", ended {ended}" if (ended := stage.ended()) else ""
                outcome.not_back.append(f"nothing within {BACK_WITHIN_S:g} s{ended}")
                break
            outcome.back_ms.append(1000 * (after.at - struck_at))
            outcome.left.append(stage.left_of(life))
            outcome.worlds.append(len(after.marks))
            life = after
        ledgers = contender.ledgers(stage)
        if ledgers is not None and outcome.back_ms:
            outcome.phases = ledgers.read(len(outcome.back_ms))
    return outcome
