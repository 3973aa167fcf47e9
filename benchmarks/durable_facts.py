"""Facts a second by what the server promises: one and three copies, and how often it syncs.

One run measures all, in turns. "together" is what a busy control plane does: facts that wait for
the bus are sent as one batch. "one by one" is the same without batches. "alone" is the time of one
write of a document, as of a decision.

    python -m benchmarks.durable_facts --rounds 3
"""

import argparse
import asyncio
import statistics
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from itertools import islice
from pathlib import Path

from benchmarks.facts_to_rest import facts
from benchmarks.rig import HEAD, row
from everstep.bus import BusSettings, connect, topology
from everstep.bus.auth.accounts import Operator
from everstep.bus.auth.job_access import login_file
from everstep.bus.auth.roles import ADMIN
from everstep.bus.client import NatsBus
from everstep.bus.errors import BusError
from everstep.bus.facts import outbox
from everstep.bus.server.config import ServerPlan, cluster_plans, write_config
from everstep.bus.server.dev_server import find_program

SYNCS = ("2m", "1s", "always")
FIRST_PORT = 14_222


@contextmanager
def servers(folder: Path, copies: int, sync: str) -> Iterator[BusSettings]:
    """One server, or a cluster of three without TLS, as `everstep bus setup` would write it."""
    operator = Operator.made(folder / "keys")
    login = login_file(folder / "keys", operator, ADMIN)
    plan = ServerPlan(folder / "store", port=FIRST_PORT, sync=sync)
    members = [("127.0.0.1", FIRST_PORT + number) for number in range(copies)]
    plans = [plan] if copies == 1 else cluster_plans(plan, members, operator.password_of_routes)
    running = []
    try:
        for own in plans:
            write_config(folder / f"{own.name}.json", own, operator)
            command = [find_program(), "-c", str(folder / f"{own.name}.json")]
            running.append(subprocess.Popen(command, stderr=subprocess.DEVNULL))
        urls = ",".join(f"nats://{host}:{port}" for host, port in members)
        yield BusSettings(url=urls, credentials_file=login, replicas=copies, connect_within_s=60)
    finally:
        for process in running:
            process.kill()
            process.wait()


@asynccontextmanager
async def ready(settings: BusSettings, folder: Path) -> AsyncIterator[NatsBus]:
    async with connect(settings, "bench", spool=folder / "spool") as bus:
        while True:
            try:
                await topology.init(bus.jetstream, replicas=settings.replicas)
                break
            except BusError:  # the servers are still finding each other
                await asyncio.sleep(0.2)
        yield bus


async def rate(bus: NatsBus, count: int) -> float:
    """Facts acknowledged a second, of facts that are recorded by hundreds."""
    source = facts()
    began = time.perf_counter()
    for _ in range(count // 100):
        await asyncio.gather(*(bus.record(fact) for fact in islice(source, 100)))
    await bus.flush(300)
    return count / (time.perf_counter() - began)


async def alone(bus: NatsBus) -> float:
    """Milliseconds of one write of a document, the median of a hundred."""
    took, documents = [], bus.documents("CONTROL")
    for number in range(100):
        began = time.perf_counter()
        await documents.put("bench", b"%d" % number, revision=None)
        took.append(1000 * (time.perf_counter() - began))
    return statistics.median(took)


async def measured(copies: int, sync: str, count: int) -> tuple[float, float, float]:
    with tempfile.TemporaryDirectory(prefix="everstep-bench-") as name:
        folder, least = Path(name), outbox._BATCH_LEAST
        with servers(folder, copies, sync) as settings:
            async with ready(settings, folder) as bus:
                await rate(bus, 1000)  # the first ones make files and lists
                together = await rate(bus, count)
                outbox._BATCH_LEAST = 1 << 30
                try:
                    return together, await rate(bus, count), await alone(bus)
                finally:
                    outbox._BATCH_LEAST = least


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--facts", type=int, default=8000)
    asked = parser.parse_args()
    found: dict[tuple[int, str], list[tuple[float, float, float]]] = {}
    for _ in range(asked.rounds):
        for copies in (1, 3):
            for sync in SYNCS:
                found.setdefault((copies, sync), []).append(
                    await measured(copies, sync, asked.facts)
                )
    print(HEAD)
    for (copies, sync), runs in found.items():
        together, singly, once = zip(*runs, strict=True)
        name = f"R{copies}, sync {sync}"
        print(row(f"{name}: together", together, "facts/s"))
        print(row(f"{name}: one by one", singly, "facts/s"))
        print(row(f"{name}: alone", once, "ms"))


if __name__ == "__main__":
    asyncio.run(main())
