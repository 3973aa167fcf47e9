"""The fleet before health's pure domain, in virtual time: ten minutes take less than two."""

import bisect
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from benchmarks.fleets.jobs import Crowd, Death, Job, beats_of
from everstep.messages import NodeBeat
from everstep_services.health.domain.findings import NodeLoss
from everstep_services.health.domain.fleet import Fleet
from everstep_services.health.settings import HealthSettings

Answer = Callable[[NodeBeat, float], NodeBeat | None]
"""What a node that is asked for a beat says at once, if the question and it arrive."""
Hears = Callable[[NodeBeat], bool | None]
"""Whether anybody receives a question to a node; None if that is unknown."""

PAUSE_S = 0.3
PAUSED_EVERY_S = 5.0


@dataclass
class Found:
    """What an observer found, and what there was to find."""

    deaths: int = 0
    detected_s: list[float] = field(default_factory=list)
    false: list[str] = field(default_factory=list)
    beats: int = 0
    hails: int = 0
    probes: int = 0


class Watching:
    """One observer with its pauses: what comes meanwhile is heard after them, and after a tick."""

    def __init__(
        self, settings: HealthSettings, seconds: float, seed: int, answer: Answer, hears: Hears
    ) -> None:
        self._answer = answer
        self._hears = hears
        self.hails = self.probes = 0
        self.fleet = Fleet(settings)
        self.found: list[tuple[float, NodeLoss]] = []
        rng = random.Random(seed)
        gaps = (rng.uniform(PAUSE_S, 2 * PAUSED_EVERY_S) for _ in itertools.count())
        starts = itertools.takewhile(lambda at: at < seconds, itertools.accumulate(gaps))
        self._pauses = list(starts)
        self._ticks_at = self._said_at = settings.tick_s

    def awake(self, at: float) -> float:
        """The moment itself, or the end of the pause that it is in."""
        place = bisect.bisect(self._pauses, at)
        return max(at, self._pauses[place - 1] + PAUSE_S) if place else at

    def judge(self, now: float) -> None:
        """Every tick until then."""
        while (at := self.awake(self._ticks_at)) <= now:
            found = self.fleet.judge(at, is_blind=False, read_at=self._said_at)
            self.found += [(at, lost) for lost in found]
            self._said_at = at  # that word is back before the next tick
            for asked in self.fleet.hails(at):
                self.hails += 1
                self._hear(self._answer(asked, at), at)
            for asked in self.fleet.probes(at):
                self.probes += 1
                is_there = self._hears(asked)
                self.fleet.probed(asked, is_there, at)
                if is_there:
                    self._hear(self._answer(asked, at), at)
            self._ticks_at = at + self.fleet.tick_s

    def _hear(self, beat: NodeBeat | None, at: float) -> None:
        if beat is not None:
            self.fleet.hear(beat, at)


class Network:
    """Between agents and the observer; it loses some of the messages."""

    def __init__(self, jobs: Sequence[Job], crowd: Crowd) -> None:
        self._by_name = {job.name: job for job in jobs}
        self._lost = crowd.lost_beats
        self._rng = random.Random(crowd.seed + 2)

    def carried(self, beat: NodeBeat | None) -> NodeBeat | None:
        """The beat, if it arrives."""
        return None if self._rng.random() < self._lost else beat

    def hears(self, asked: NodeBeat) -> bool | None:
        """A dead node's connection is closed; what another one takes in, it may say in vain."""
        if not self._by_name[asked.job].lives(asked.node):
            return False
        return None if self.carried(asked) is None else True

    def answer(self, asked: NodeBeat, at: float) -> NodeBeat | None:
        """What a node that is asked for a beat says at once."""
        job, slot = self._by_name[asked.job], asked.slot or 0
        is_asked = self.carried(asked) is not None and job.nodes[slot] == asked.node
        return self.carried(job.beat(slot, at)) if is_asked else None


def watched(crowd: Crowd, settings: HealthSettings) -> Found:
    """All that happens to the crowd, seen by one observer."""
    jobs = [Job(number, crowd) for number in range(crowd.jobs)]
    network = Network(jobs, crowd)
    watching = Watching(settings, crowd.seconds, crowd.seed + 3, network.answer, network.hears)
    deaths, dead, found = list(crowd.deaths()), dict[str, Death](), Found()
    found.deaths = len(deaths)
    for at, job, slot in beats_of(jobs, crowd):
        if at > crowd.seconds:
            break
        while deaths and deaths[0].at_s <= at:
            death = deaths.pop(0)
            dead[jobs[death.job].die(death)] = death
        job.go_on(at)
        beat = network.carried(job.beat(slot, at))
        if beat is not None:
            now = watching.awake(at)
            watching.judge(now)
            watching.fleet.hear(beat, now)
            found.beats += 1
    found.hails, found.probes = watching.hails, watching.probes
    for at, lost in watching.found:
        known = dead.pop(lost.beat.node, None)
        if known is None:
            found.false.append(lost.reason)
        else:
            found.detected_s.append(at - known.at_s)
    return found
