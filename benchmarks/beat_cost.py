"""What a beat costs health, from the bytes of its connection to its rules, in one process.

    python -m benchmarks.beat_cost
    python -m benchmarks.beat_cost --nodes 12500 --seconds 10

No server: the bytes that nats-server would send to health are made before, and go through the
reader and parser of the connection, the inbox and the observer, in virtual time. Every tick judges.
A twentieth of the beats is missing. The figure is processor time, so other work hardly moves it.
"""

import argparse
import asyncio
import random
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from itertools import groupby, takewhile
from typing import Any

from nats.aio.subscription import Subscription

from benchmarks.fleets.jobs import Crowd, Job, beats_of
from everstep import subjects
from everstep.bus.inbox import BoundedInbox
from everstep.bus.nats_patches import PatchedClient
from everstep.clock import SystemClock
from everstep.messages import NodeBeat
from everstep.messages.codec import encode
from everstep_services.health.replica import HealthReplica
from everstep_services.health.settings import HealthSettings

_READ_BYTES = 32_768
_SUBSCRIPTION = 7
_WRITTEN_EVERY_S = 0.01


class Clock(SystemClock):
    """Stands where it is put."""

    at = 1000.0

    def now(self) -> float:
        return self.at


class Bus:
    """A connection without a server: what is sent goes nowhere."""

    connected = True
    leases = None

    def __init__(self) -> None:
        self.client = PatchedClient()
        self.reader = asyncio.StreamReader(limit=_READ_BYTES)
        self.sent = 0

    def send(self, _subject: str, _message: object) -> None:
        self.sent += 1

    async def deliver(self, _subject: str, _message: object, *, within_s: float) -> bool:
        return within_s > 0

    def documents(self, _bucket: str) -> None: ...

    @asynccontextmanager
    async def subscribe(
        self, subject: str, of: Any, *, capacity: int = 4096
    ) -> AsyncIterator[BoundedInbox[Any]]:
        inbox: BoundedInbox[Any] = BoundedInbox(subject, of, capacity)
        if of is NodeBeat:
            subscription = Subscription(self.client, _SUBSCRIPTION, subject)
            self.client.hear_at_once(subscription, inbox.hear)
        yield inbox

    async def read(self, data: bytes) -> None:
        """Take in what the server has written, as nats-py's read loop does."""
        self.reader.feed_data(data)
        left = len(data)
        while left:
            chunk = await self.reader.read(_READ_BYTES)
            left -= len(chunk)
            await self.client._ps.parse(chunk)


def written(crowd: Crowd) -> Iterator[tuple[float, int, bytes]]:
    """When the server writes something to health, how many beats that is, and its bytes."""
    jobs, rng = [Job(number, crowd) for number in range(crowd.jobs)], random.Random(crowd.seed)
    due = takewhile(lambda beat: beat[0] < crowd.seconds, beats_of(jobs, crowd))
    for number, bundle in groupby(due, lambda beat: int(beat[0] / _WRITTEN_EVERY_S)):
        at_s = (number + 1) * _WRITTEN_EVERY_S
        beats = [job.beat(slot, at_s) for _, job, slot in bundle]
        frames = [_frame(beat) for beat in beats if beat and rng.random() >= crowd.lost_beats]
        yield at_s, len(frames), b"".join(frames)


def _frame(beat: NodeBeat) -> bytes:
    subject, body = subjects.beat(beat.job, beat.node).encode(), encode(beat)
    return b"MSG %s %d %d\r\n%s\r\n" % (subject, _SUBSCRIPTION, len(body), body)


async def measured(crowd: Crowd) -> tuple[int, float, float]:
    """The beats that were heard, and the seconds of processor for them and for judging."""
    pieces = list(written(crowd))
    clock, bus, settings = Clock(), Bus(), HealthSettings()
    observer = HealthReplica(settings, bus, clock).observer  # type: ignore[arg-type]
    reading_s = judging_s = 0.0
    tick_at, began = clock.at, clock.at
    async with asyncio.TaskGroup() as tasks:
        hearing = tasks.create_task(observer.hear_for_ever())
        await asyncio.sleep(0)
        for at_s, _, data in pieces:
            clock.at = began + at_s
            spent_s = time.process_time()
            await bus.read(data)
            await asyncio.sleep(0)  # the observer hears them
            reading_s += time.process_time() - spent_s
            if clock.at >= tick_at:
                tick_at += settings.tick_s
                spent_s = time.process_time()
                observer._judge(tasks)
                judging_s += time.process_time() - spent_s
        hearing.cancel()
    heard = int(observer.statistics()["beats_total"])
    assert heard == sum(count for _, count, _ in pieces), "each beat that was written was heard"
    return heard, reading_s, judging_s


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, default=12_500, help="in jobs of 100 (12500)")
    parser.add_argument("--seconds", type=float, default=6.0, help="of virtual time (6)")
    asked = parser.parse_args()
    crowd = Crowd(
        nodes=asked.nodes,
        job_nodes=100,
        step_s=0.5,
        losses=0,
        seconds=asked.seconds,
        lost_beats=0.05,
        seed=7,
    )
    beats, reading_s, judging_s = asyncio.run(measured(crowd))
    print(
        f"{beats} beats of {asked.nodes} nodes: {1e6 * reading_s / beats:.2f} us a beat, "
        f"and {1e6 * judging_s / beats:.2f} us for judging"
    )


if __name__ == "__main__":
    main()
