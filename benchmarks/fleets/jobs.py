"""Simulated jobs: their agents beat once a second, their ranks step, until a node dies.

All agents and ranks here are numbers; a seed gives the same deaths in every process that asks.
"""

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from everstep.messages import NodeBeat, RankBeat

RANKS = 8
BACK_S = 8.0
"""How long the round stands after a death; then the next begins, with a spare in the slot."""
QUIET_S = 30.0
"""A job loses no other node within this: its next loss is another incident."""
LATE_S = 0.02
"""How much later than it should an agent may beat."""
_SECTIONS = ("data", "forward_backward", "optimizer")
_AT = datetime(2026, 1, 1, tzinfo=UTC)


@dataclass(frozen=True)
class Crowd:
    """Who takes part, and what becomes of them."""

    nodes: int
    job_nodes: int
    step_s: float
    losses: int
    seconds: float
    lost_beats: float
    """Of all beats, the share that never arrives."""
    seed: int

    @property
    def jobs(self) -> int:
        return self.nodes // self.job_nodes

    def deaths(self) -> Sequence["Death"]:
        """Nodes that fall silent, spread over the time at random."""
        rng, found = random.Random(self.seed), list[Death]()
        free_at = dict.fromkeys(range(self.jobs), 0.0)
        for at_s in sorted(rng.uniform(5.0, self.seconds - BACK_S) for _ in range(self.losses)):
            free = [job for job, since_s in free_at.items() if since_s <= at_s]
            if free:
                job = rng.choice(free)
                free_at[job] = at_s + QUIET_S
                found.append(Death(at_s, job, rng.randrange(self.job_nodes)))
        return found


@dataclass(frozen=True, order=True)
class Death:
    """A node falls silent without a word, and its training stands."""

    at_s: float
    job: int
    slot: int


class Job:
    """The nodes of one job. Times are seconds since everything began."""

    def __init__(self, number: int, crowd: Crowd) -> None:
        self.name = f"job-{number}"
        self.number = number
        self.nodes = [f"j{number}-n{slot}" for slot in range(crowd.job_nodes)]
        self._step_s = crowd.step_s
        self._round = 1
        self._began_s = 0.0
        self._died: Death | None = None
        self._born_s = [0.0] * crowd.job_nodes

    def die(self, death: Death) -> str:
        """The node that is no more."""
        self._died = death
        return self.nodes[death.slot]

    def go_on(self, now: float) -> None:
        """The next round begins, if the time for it has come."""
        died = self._died
        if died is not None and now >= died.at_s + BACK_S:
            self.nodes[died.slot] += "b"
            self._born_s[died.slot] = now
            self._round, self._began_s, self._died = self._round + 1, now, None

    def lives(self, node: str) -> bool:
        """It is in the round, and not dead."""
        died = self._died
        return node in self.nodes and (died is None or self.nodes[died.slot] != node)

    def beat(self, slot: int, now: float) -> NodeBeat | None:
        """What the node says now; nothing, if it is dead."""
        died = self._died
        if died is not None and died.slot == slot:
            return None
        moving_s = (now if died is None else died.at_s) - self._began_s
        step = 1 + int(moving_s / self._step_s)
        age_s = now - self._began_s - (step - 1) * self._step_s
        section = _SECTIONS[int(3 * age_s / self._step_s) % 3]
        first = slot * RANKS
        return NodeBeat(
            job=self.name,
            node=self.nodes[slot],
            sequence=1 + int(now - self._born_s[slot]),
            at=_AT,
            state="running",
            round=self._round,
            slot=slot,
            watch="armed",
            ranks=tuple(
                RankBeat(
                    rank=rank,
                    step=step,
                    progress_age_s=round(age_s + 0.001, 3),
                    section=section,
                    section_age_s=round(age_s % 0.1, 3),
                    limit_s=120.0,
                    limit_source="floor",
                )
                for rank in range(first, first + RANKS)
            ),
        )


def beats_of(jobs: Sequence[Job], crowd: Crowd) -> Iterator[tuple[float, Job, int]]:
    """Which agent beats when, for ever: each at its own moment of a second, or a little later."""
    rng = random.Random(crowd.seed + 1)
    phases = [
        (rng.random() * (1 - LATE_S), job, slot) for job in jobs for slot in range(crowd.job_nodes)
    ]
    for second in itertools.count():
        due = [(second + phase + rng.random() * LATE_S, job, slot) for phase, job, slot in phases]
        yield from sorted(due, key=lambda one: one[0])
