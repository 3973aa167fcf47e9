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
from everstep.messages.codec import encode

_PACE_S = 0.02


class Sent(msgspec.Struct):
    """What a sender did."""

    died: dict[str, float]
    """When, by node, on the monotonic clock."""
    beats: int = 0
    late_s: float = 0.0
    """At most, behind the moment at which a beat was due."""
    processor_s: float = 0.0


async def send(crowd: Crowd, bus_settings: BusSettings, began: float, number: int, of: int) -> Sent:
    """Every beat of our jobs when it is due, until the time is over."""
    jobs = {one: Job(one, crowd) for one in range(number, crowd.jobs, of)}
    deaths = [one for one in crowd.deaths() if one.job in jobs]
    due = takewhile(lambda one: one[0] < crowd.seconds, beats_of(list(jobs.values()), crowd))
    rng, sent = random.Random(crowd.seed + 10 + number), Sent({})
    async with connect(bus_settings, f"agents-{number}") as bus:
        client = bus._connection.client
        for at, job, slot in due:
            while (now := time.monotonic() - began) < at:
                await asyncio.sleep(_PACE_S)
            sent.late_s = max(sent.late_s, now - at)
            while deaths and deaths[0].at_s <= now:
                death = deaths.pop(0)
                sent.died[jobs[death.job].die(death)] = began + death.at_s
            job.go_on(now)
            beat = job.beat(slot, now)
            if beat is not None and rng.random() >= crowd.lost_beats:
                sent.beats += 1
                await client.publish(subjects.beat(job.name, beat.node), encode(beat))
        await client.flush()
    sent.processor_s = time.process_time()
    return sent


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
