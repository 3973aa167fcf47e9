"""A process of simulated agents: it sends their beats over one connection.

    python -m benchmarks.fleets.sender CROWD BUS NUMBER OF

CROWD and BUS are JSON; it is the NUMBERth OF senders. It makes all beats first, prints a line when
it is ready, and reads from its input when to begin, an instant of the machine's monotonic clock: so
it takes little more of the machine meanwhile than writing takes. Prints JSON at its end.
"""

import asyncio
import random
import sys
import time
from collections.abc import Iterator
from itertools import groupby, takewhile
from pathlib import Path

import msgspec

from benchmarks.fleets.jobs import Crowd, Job, beats_of
from everstep import subjects
from everstep.bus import BusSettings, connect
from everstep.bus.background import in_background
from everstep.bus.client import NatsBus
from everstep.messages import BeatNow, NodeBeat
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


class Jobs:
    """The jobs of one sender, as they are at one moment after the other."""

    def __init__(self, crowd: Crowd, number: int, of: int) -> None:
        self.by_name = {f"job-{one}": Job(one, crowd) for one in range(number, crowd.jobs, of)}
        self.died: dict[str, float] = {}
        self._deaths = [one for one in crowd.deaths() if f"job-{one.job}" in self.by_name]

    def go_on(self, now: float) -> None:
        """Let die who dies, and begin the rounds after them."""
        while self._deaths and self._deaths[0].at_s <= now:
            death = self._deaths.pop(0)
            self.died[self.by_name[f"job-{death.job}"].die(death)] = death.at_s
        for job in self.by_name.values():
            job.go_on(now)


class Agents:
    """All agents of some jobs, over one connection."""

    def __init__(self, crowd: Crowd, number: int, of: int) -> None:
        self.sent = Sent({})
        self._crowd = crowd
        self._rng = random.Random(crowd.seed + 10 + number)
        self._jobs = Jobs(crowd, number, of)
        self._bundles = list(self._made(Jobs(crowd, number, of)))

    async def send(self, bus: NatsBus, began: float) -> None:
        """Every beat when it is due, until the time is over."""
        client = bus._connection.client
        assert client._transport is not None
        for due_s, bundle in self._bundles:
            while (now := time.monotonic() - began) < due_s:
                await asyncio.sleep(due_s - now)
            self.sent.late_s = max(self.sent.late_s, now - due_s)
            client._transport.write(bundle)
            await client._transport.drain()  # type: ignore[no-untyped-call]
        await client.flush()
        self._jobs.go_on(self._crowd.seconds)
        self.sent.died = {node: began + at_s for node, at_s in self._jobs.died.items()}

    async def answer(self, bus: NatsBus, began: float) -> None:
        """Beat when a node is asked to."""
        async with bus.subscribe(subjects.hail(None, None), BeatNow) as hails:
            async for hail in hails:
                job = self._jobs.by_name.get(hail.job)
                if job is None or self._is_lost():
                    continue
                now = time.monotonic() - began
                self._jobs.go_on(now)
                if hail.node not in job.nodes or self._is_lost():
                    continue
                beat = job.beat(job.nodes.index(hail.node), now)
                if beat is not None:
                    self.sent.answers += 1
                    bus.send(subjects.beat(hail.job, hail.node), beat)

    def _made(self, jobs: Jobs) -> Iterator[tuple[float, bytes]]:
        """The facts to write, and the time of each."""
        beats = beats_of(list(jobs.by_name.values()), self._crowd)
        due = takewhile(lambda one: one[0] < self._crowd.seconds, beats)
        for number, bundle in groupby(due, lambda one: int(one[0] / _PACE_S)):
            due_s, frames = (number + 1) * _PACE_S, list[bytes]()
            jobs.go_on(due_s)
            for _, job, slot in bundle:
                beat = job.beat(slot, due_s)
                if beat is not None and not self._is_lost():
                    frames.append(_frame(beat))
            self.sent.beats += len(frames)
            yield due_s, b"".join(frames)

    def _is_lost(self) -> bool:
        return self._rng.random() < self._crowd.lost_beats


def _frame(beat: NodeBeat) -> bytes:
    """As nats-server reads it."""
    body = encode(beat)
    return b"PUB %s %d\r\n%s\r\n" % (subjects.beat(beat.job, beat.node).encode(), len(body), body)


async def send(crowd: Crowd, bus_settings: BusSettings, number: int, of: int) -> Sent:
    """Every beat of our jobs when it is due, until the time is over."""
    agents = Agents(crowd, number, of)
    print("ready", flush=True)
    began = float(sys.stdin.readline())
    async with (
        connect(bus_settings, f"agents-{number}") as bus,
        in_background(agents.answer(bus, began)),
    ):
        await agents.send(bus, began)
    return agents.sent


def _made(kind: type[Path], value: str) -> Path:
    return kind(value)


def main(arguments: list[str]) -> None:
    crowd = msgspec.json.decode(arguments[0], type=Crowd)
    settings = msgspec.json.decode(arguments[1], type=BusSettings, dec_hook=_made)
    number, of = int(arguments[2]), int(arguments[3])
    sent = asyncio.run(send(crowd, settings, number, of))
    print(msgspec.json.encode(sent).decode())


if __name__ == "__main__":
    main(sys.argv[1:])
