"""A process of simulated agents: it sends their beats over one connection.

    python -m benchmarks.fleets.sender CROWD BUS BEGAN NUMBER OF

CROWD and BUS are JSON, BEGAN an instant of the machine's monotonic clock; it is the NUMBERth OF
senders. Prints JSON at its end.
"""

import asyncio
import random
import sys
import time
from itertools import takewhile
from pathlib import Path

import msgspec

from benchmarks.fleets.jobs import Crowd, Job, beats_of
from everstep import subjects
from everstep.bus import BusSettings, connect
from everstep.bus.beside import beside
from everstep.bus.client import NatsBus
from everstep.messages import BeatNow
from everstep.messages.codec import encode

_PACE_S = 0.02


class Sent(msgspec.Struct):
    """What a sender did."""

    died: dict[str, float]
    """When, by node, on the monotonic clock."""
    beats: int = 0
    answers: int = 0
    """Beats that were asked for."""
    late_s: float = 0.0
    """At most, behind the moment at which a beat was due."""
    processor_s: float = 0.0


class Agents:
    """All agents of some jobs, over one connection."""

    def __init__(self, crowd: Crowd, began: float, number: int, of: int) -> None:
        self.sent = Sent({})
        self._crowd = crowd
        self._began = began
        self._jobs = {one: Job(one, crowd) for one in range(number, crowd.jobs, of)}
        self._rng = random.Random(crowd.seed + 10 + number)

    async def send(self, bus: NatsBus) -> None:
        """Every beat when it is due, until the time is over."""
        deaths = [one for one in self._crowd.deaths() if one.job in self._jobs]
        beats = beats_of(list(self._jobs.values()), self._crowd)
        client, sent = bus._connection.client, self.sent
        for at, job, slot in takewhile(lambda one: one[0] < self._crowd.seconds, beats):
            while (now := time.monotonic() - self._began) < at:
                await asyncio.sleep(_PACE_S)
            sent.late_s = max(sent.late_s, now - at)
            while deaths and deaths[0].at_s <= now:
                death = deaths.pop(0)
                sent.died[self._jobs[death.job].die(death)] = self._began + death.at_s
            job.go_on(now)
            beat = job.beat(slot, now)
            if beat is not None and not self._is_lost():
                sent.beats += 1
                await client.publish(subjects.beat(job.name, beat.node), encode(beat))
        await client.flush()

    async def answer(self, bus: NatsBus) -> None:
        """Beat when a node is asked to."""
        by_name = {job.name: job for job in self._jobs.values()}
        async with bus.subscribe(subjects.hail(None, None), BeatNow) as hails:
            async for hail in hails:
                job = by_name.get(hail.job)
                if job is None or hail.node not in job.nodes or self._is_lost():
                    continue
                beat = job.beat(job.nodes.index(hail.node), time.monotonic() - self._began)
                if beat is not None and not self._is_lost():
                    self.sent.answers += 1
                    bus.send(subjects.beat(hail.job, hail.node), beat)

    def _is_lost(self) -> bool:
        return self._rng.random() < self._crowd.lost_beats


async def send(crowd: Crowd, bus_settings: BusSettings, began: float, number: int, of: int) -> Sent:
    """Every beat of our jobs when it is due, until the time is over."""
    agents = Agents(crowd, began, number, of)
    async with connect(bus_settings, f"agents-{number}") as bus, beside(agents.answer(bus)):
        await agents.send(bus)
    agents.sent.processor_s = time.process_time()
    return agents.sent


def _made(kind: type[Path], value: str) -> Path:
    return kind(value)


def main(arguments: list[str]) -> None:
    crowd = msgspec.json.decode(arguments[0], type=Crowd)
    settings = msgspec.json.decode(arguments[1], type=BusSettings, dec_hook=_made)
    began, number, of = float(arguments[2]), int(arguments[3]), int(arguments[4])
    sent = asyncio.run(send(crowd, settings, began, number, of))
    print(msgspec.json.encode(sent).decode())


if __name__ == "__main__":
    main(sys.argv[1:])
