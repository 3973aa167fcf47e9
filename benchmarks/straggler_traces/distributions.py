"""What makes steps of a healthy training unequal. Every draw comes from a seed.

| what | distribution | default |
|---|---|---|
| jitter of a computation | log-normal, by its coefficient of variation | 2 % |
| ranks are never equal | normal, constant over the trace | 0.5 % |
| a rank drifts (heat, neighbours) | AR(1) from step to step, 0.98 | 0.3 % |
| garbage collection | each step and rank with this chance; 5 to 20 % of a step, even | 1 % |
| checkpoint | at an interval of steps, on all ranks; 30 % of a step, log-normal 10 % | every 50 |
| lengths of sequences | log-normal a microbatch; computations follow it | 0, or 30 % |
| network over the day | transfers times 1 + 0.3 sin(day) | 24 h |
| transfers | log-normal | 10 % |

A slow rank's computations take `1 + ratio` times as long from one step on until another.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
DAY_S = 86_400.0


@dataclass(frozen=True)
class Noise:
    jitter: float = 0.02
    unequal: float = 0.005
    drift: float = 0.003
    collected: float = 0.01
    """The chance of a garbage collection."""
    checkpoint_every: int = 50
    lengths: float = 0.0
    """Coefficient of variation of sequence lengths."""
    day: float = 0.3
    transfers: float = 0.1


PLAIN = Noise()
VARIABLE = replace(PLAIN, lengths=0.3)


@dataclass(frozen=True)
class Slow:
    rank: int
    ratio: float
    first: int = 0
    last: int = 10**9
    what: str = "compute"
    """`compute`, `input` (the ratio is of the whole step) or `network` (of transfers)."""


def lognormal(random: np.random.Generator, deviation: float, shape: tuple[int, ...]) -> Array:
    """With mean 1."""
    if deviation == 0:
        return np.ones(shape)
    sigma = np.sqrt(np.log1p(deviation**2))
    return random.lognormal(-(sigma**2) / 2, sigma, shape)


def drifts(random: np.random.Generator, deviation: float, steps: int, ranks: int) -> Array:
    found, keep = np.zeros((steps, ranks)), 0.98
    now = random.normal(0, deviation, ranks)
    for step in range(steps):
        found[step] = now
        now = keep * now + random.normal(0, deviation * np.sqrt(1 - keep**2), ranks)
    return found


def speeds(random: np.random.Generator, noise: Noise, ranks: int) -> Array:
    """How long each rank takes, constantly."""
    found: Array = 1 + random.normal(0, noise.unequal, ranks)
    return found


def own_times(
    seed: int, steps: int, ranks: int, noise: Noise, slow: tuple[Slow, ...] = (),
    microbatches: int = 8, unequal: Array | None = None,
) -> Array:  # fmt: skip
    """Steps × ranks: what each rank computes in a step of 1 s, as a trace shows it.

    `unequal` continues a training: how fast its ranks are, as `speeds` draws it.
    """
    work, rest = healthy_times(seed, steps, ranks, noise, microbatches, unequal)
    return slowed(work, slow) + rest


def healthy_times(
    seed: int, steps: int, ranks: int, noise: Noise, microbatches: int = 8,
    unequal: Array | None = None,
) -> tuple[Array, Array]:  # fmt: skip
    """The same in two parts: computations, and what comes on top of them."""
    random = np.random.default_rng(seed)
    even = speeds(random, noise, ranks) if unequal is None else unequal
    work = even[None, :] * (1 + drifts(random, noise.drift, steps, ranks))
    # A step is forwards and backwards of each microbatch, each with jitter of its own.
    work *= lognormal(random, noise.jitter / np.sqrt(2 * microbatches), (steps, ranks))
    if noise.lengths:
        # The sum of log-normal lengths, nearly: of the same mean and deviation.
        work *= lognormal(random, noise.lengths / np.sqrt(microbatches), (steps, ranks))
    rest = (random.random((steps, ranks)) < noise.collected) * random.uniform(
        0.05, 0.2, (steps, ranks)
    )
    every = noise.checkpoint_every
    if every:
        count = len(range(every - 1, steps, every))
        rest[every - 1 :: every] += 0.3 * lognormal(random, 0.1, (count, ranks))
    return work, rest


def slowed(work: Array, slow: tuple[Slow, ...]) -> Array:
    found = work.copy()
    for one in slow:
        found[one.first : one.last, one.rank] *= 1 + one.ratio
    return found
