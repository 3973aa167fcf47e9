"""Thousands of connections to servers that are killed and started again (A14.2).

    python -m benchmarks.returns
    python -m benchmarks.returns --connections 1000
    python -m benchmarks.returns --servers 3

All connections are real ones of `everstep.bus`, with a subscription each, in one process. The
jitter is what the reference of `bus.reconnect_jitter_s` says: 0.005 s a connection, which makes 200
a second. Asked for: all are back within 90 s, no second has more than twice that rate, the server
has refused no login for lateness, and no connection was closed for good.
"""

import argparse
import asyncio
import logging
import os
import re
import signal
import sys
import tempfile
from bisect import bisect_left
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil

from benchmarks.restarts.buses import servers_alone
from everstep import subjects
from everstep.bus import BusSettings
from everstep.bus.client import NatsBus, connect
from everstep.bus.errors import BusTimeoutError
from everstep.bus.server.dev_server import dev_server
from everstep.messages import Order
from everstep.observe.connections import raise_descriptor_limit

JITTER_S = 0.005
WITHIN_S = 90.0
_OPEN_AT_ONCE = 50


@dataclass
class Returned:
    """How the connections came back."""

    connections: int
    back: int
    took_s: float
    peak_per_s: int
    bound_per_s: float
    late_logins: int
    """Lines of the server about logins that took too long."""
    rebuilt: int
    """Connections that the client library gave up, and we made anew."""
    memory_mib: float

    @property
    def is_good(self) -> bool:
        """Whether it is as asked for."""
        return (
            self.back == self.connections
            and self.took_s <= WITHIN_S
            and self.peak_per_s <= self.bound_per_s
            and not self.late_logins
        )


@asynccontextmanager
async def connected(settings: BusSettings, count: int) -> AsyncIterator[list[NatsBus]]:
    """So many connections, each with the subscription of an agent."""
    turns = asyncio.Semaphore(_OPEN_AT_ONCE)
    done, opened = asyncio.Event(), asyncio.Queue[NatsBus]()

    async def one(number: int) -> None:
        async with AsyncExitStack() as stack:
            async with turns:
                bus = await _opened(stack, settings, f"agent-{number}")
                subject = subjects.order("returns", f"n{number}")
                await stack.enter_async_context(bus.subscribe(subject, Order, capacity=4))
            opened.put_nowait(bus)
            await done.wait()

    async with asyncio.TaskGroup() as tasks:
        for number in range(count):
            tasks.create_task(one(number))
        yield [await opened.get() for _ in range(count)]
        done.set()


async def _opened(stack: AsyncExitStack, settings: BusSettings, name: str) -> NatsBus:
    """A connection; on a busy machine, its first login may be too late."""
    while True:
        try:
            return await stack.enter_async_context(connect(settings, name))
        except BusTimeoutError:
            await asyncio.sleep(1)


async def killed(kill: Callable[[], None], buses: Sequence[NatsBus]) -> list[float]:
    """Kill the servers, and wait until all are back; when each was, counted from the kill."""
    loop = asyncio.get_running_loop()
    times: list[float] = []
    began = loop.time()

    async def back(bus: NatsBus, before: int) -> None:
        while bus.returns == before:
            await bus.wait_connected()
            if bus.returns == before:  # its loss has not been noticed yet
                await asyncio.sleep(0.02)
        times.append(loop.time() - began)

    await asyncio.to_thread(kill)
    with suppress(TimeoutError):
        async with asyncio.timeout(2 * WITHIN_S), asyncio.TaskGroup() as tasks:
            for bus in buses:
                tasks.create_task(back(bus, bus.returns))
    return sorted(times)


def peak(times: Sequence[float]) -> int:
    """The most in any second of the sorted times."""
    return max((at + 1 - bisect_left(times, time - 1) for at, time in enumerate(times)), default=0)


@asynccontextmanager
async def _servers(
    folder: Path, count: int
) -> AsyncIterator[tuple[BusSettings, Callable[[], None]]]:
    """Yield how a service logs in, and what kills all of them; they start again by themselves."""
    if count == 1:
        async with dev_server(folder) as server:
            yield server.settings("service"), lambda: os.kill(server.pid, signal.SIGKILL)
        return
    with servers_alone(folder / "bus", count) as bus:
        settings = BusSettings(
            url=bus.environ["EVERSTEP_BUS__URL"],
            credentials_file=bus.keys / "service.creds",
            ca_file=Path(bus.environ["EVERSTEP_BUS__CA_FILE"]),
            replicas=count,
        )
        yield settings, bus.restart


async def measured(folder: Path, count: int, servers: int = 1) -> Returned:
    """One kill of the servers under so many connections."""
    jitter_s = JITTER_S * count
    async with _servers(folder, servers) as (login, kill):
        settings = msgspec.structs.replace(
            login, reconnect_jitter_s=jitter_s, connect_within_s=120.0
        )
        async with connected(settings, count) as buses:
            times = await killed(kill, buses)
            statistics = [bus.statistics() for bus in buses]
        log = "".join(path.read_text() for path in folder.rglob("*.log"))
    return Returned(
        connections=count,
        back=len(times),
        took_s=times[-1] if times else 0.0,
        peak_per_s=peak(times),
        bound_per_s=2 / JITTER_S,
        late_logins=len(re.findall(r"(?i)authentication timeout", log)),
        rebuilt=int(sum(one["rebuilds_total"] for one in statistics)),
        memory_mib=psutil.Process().memory_info().rss / 2**20,
    )


def main(arguments: Sequence[str]) -> int:
    """Print the figures; 1 when they are not as asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.returns")
    parser.add_argument("--connections", type=int, default=5000)
    parser.add_argument(
        "--servers", type=int, default=1, help="3: with TLS, as `bus setup` writes them"
    )
    asked = parser.parse_args(arguments)
    raise_descriptor_limit()
    logging.disable(logging.WARNING)  # a line for each lost connection
    with tempfile.TemporaryDirectory() as folder:
        seen = asyncio.run(measured(Path(folder), asked.connections, asked.servers))
    print(
        f"{seen.back} of {seen.connections} connections are back after {seen.took_s:.1f} s; "
        f"at most {seen.peak_per_s} in a second (bound {seen.bound_per_s:.0f}); "
        f"{seen.late_logins} logins refused for lateness; {seen.rebuilt} made anew; "
        f"{seen.memory_mib:.0f} MiB"
    )
    return 0 if seen.is_good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
