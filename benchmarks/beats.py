"""Beats a second from one client to another: `everstep.bus` next to raw nats-py, in turns.

Raw moves the same bytes; "raw and coded" also encodes and decodes them, as anybody who uses
them must. All run in this one process, against the same server.
"""

import asyncio
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

import nats
from nats.aio.client import Client
from nats.aio.msg import Msg

from benchmarks.rig import HEAD, row
from everstep import subjects
from everstep.bus import connect
from everstep.bus.client import NatsBus
from everstep.bus.server.dev_server import DevServer, dev_server
from everstep.messages import NodeBeat, RankBeat
from everstep.messages.codec import decode, encode

ROUNDS, COUNT, BURST = 7, 20_000, 500


def beat(sequence: int) -> NodeBeat:
    """A node with eight ranks, as its agent would send it."""
    ranks = tuple(
        RankBeat(rank=rank, state="running", step=sequence, section="forward", section_age_s=0.1)
        for rank in range(8)
    )
    return NodeBeat(
        job="bench", node="n1", sequence=sequence, at=datetime.now(UTC), state="running",
        round=1, ranks=ranks,
    )  # fmt: skip


async def raw(sender: Client, receiver: Client, *, coded: bool) -> float:
    heard, done = 0, asyncio.Event()
    example = beat(1)
    payload = encode(example)

    async def on_message(message: Msg) -> None:
        nonlocal heard
        heard += 1
        if coded:
            decode(message.data)
        if heard == COUNT:
            done.set()

    subscription = await receiver.subscribe("bench.raw", cb=on_message)
    await receiver._flush_pending(force_flush=True)  # its PING would overtake the SUB
    await receiver.flush()
    began = time.perf_counter()
    for number in range(COUNT):
        await sender.publish("bench.raw", encode(example) if coded else payload)
        if number % BURST == 0:
            await asyncio.sleep(0)
    await done.wait()
    rate = COUNT / (time.perf_counter() - began)
    await subscription.unsubscribe()
    return rate


async def ours(sender: NatsBus, receiver: NatsBus) -> float:
    example, subject = beat(1), subjects.beat("bench", "n1")
    async with receiver.subscribe(subject, NodeBeat, capacity=COUNT) as heard:
        began = time.perf_counter()
        for number in range(COUNT):
            sender.send(subject, example)
            if number % BURST == 0:
                await asyncio.sleep(0)
        for _ in range(COUNT):
            await heard.get()
        return COUNT / (time.perf_counter() - began)


async def raw_client(server: DevServer) -> Client:
    login = server.settings("admin").credentials_file
    return await nats.connect(server.url, user_credentials=str(login))


async def main() -> None:
    rates: dict[str, list[float]] = {"everstep.bus": [], "raw": [], "raw and coded": []}
    with tempfile.TemporaryDirectory(prefix="everstep-bench-") as name:
        async with dev_server(Path(name)) as server:
            settings = server.settings("service")
            sender, receiver = await raw_client(server), await raw_client(server)
            async with connect(settings, "a") as one, connect(settings, "b") as other:
                for _ in range(ROUNDS):
                    rates["everstep.bus"].append(await ours(one, other))
                    rates["raw"].append(await raw(sender, receiver, coded=False))
                    rates["raw and coded"].append(await raw(sender, receiver, coded=True))
            await sender.close()
            await receiver.close()
    print(f"beats of {len(encode(beat(1)))} bytes, {COUNT} a round")
    print(HEAD)
    for name, values in rates.items():
        print(row(name, values, "a second"))
    for peer in ("raw", "raw and coded"):
        ratios = [a / b for a, b in zip(rates["everstep.bus"], rates[peer], strict=True)]
        ratios.sort()
        print(
            f"everstep.bus / {peer}: median {ratios[len(ratios) // 2]:.2f}, "
            f"min {ratios[0]:.2f}, max {ratios[-1]:.2f}, n {len(ratios)}"
        )


if __name__ == "__main__":
    asyncio.run(main())
