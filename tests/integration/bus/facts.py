"""Facts and beats that a test can tell apart, and what the stream has of them."""

from datetime import UTC, datetime

import msgspec

from everstep import ids
from everstep.bus import BusSettings
from everstep.bus.auth.roles import SERVICE
from everstep.bus.client import NatsBus
from everstep.bus.server.dev_server import DevServer
from everstep.messages import JobEnded, NodeBeat
from everstep.messages.codec import decode


def settings_of(nats: DevServer, **changes: object) -> BusSettings:
    """Quick to come back: a test has no fleet."""
    quick = {"reconnect_jitter_s": 0.01, "reconnect_wait_s": 0.05, **changes}
    return msgspec.structs.replace(nats.settings(SERVICE), **quick)


def ended(number: int) -> JobEnded:
    return JobEnded(
        id=ids.new_id(),
        job="j",
        at=datetime.now(UTC),
        source="test",
        state="failed",
        exit_code=number,
        reason="test",
    )


def beat(sequence: int) -> NodeBeat:
    return NodeBeat(job="j", node="n", sequence=sequence, at=datetime.now(UTC), state="running")


async def numbers(bus: NatsBus, count: int) -> list[int]:
    """The first `count` facts in the stream, by their numbers."""
    found: list[int] = []
    async with bus.facts(None) as reader:
        while len(found) < count:
            batch = await reader.fetch(1000, 2)
            facts = [decode(one.data) for one in batch.facts]
            found += [fact.exit_code or 0 for fact in facts if isinstance(fact, JobEnded)]
    return found
