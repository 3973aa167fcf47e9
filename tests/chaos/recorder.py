"""A publisher to be killed: records facts, and notes each one only when it was acknowledged.

When the folder holds a file `quiet` it records no more, and only sends what still waits. Its last
argument is how long each of its ten tasks waits after a fact, by default 0.01 s.
"""

import asyncio
import os
import sys
from datetime import UTC, datetime
from pathlib import Path

from everstep.bus import BusSettings, connect
from everstep.ids import new_id
from everstep.messages import ProgressMade


async def main(url: str, login: Path, folder: Path, pace_s: float) -> None:
    settings = BusSettings(
        url=url, credentials_file=login,
        reconnect_wait_s=0.1, reconnect_jitter_s=0.05,
    )  # fmt: skip
    notes = os.open(folder / "acknowledged", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    async def record_for_ever(step: int) -> None:
        while not (folder / "quiet").exists():
            fact = ProgressMade(
                id=new_id(), job="chaos", at=datetime.now(UTC), source="chaos", round=0, step=step
            )
            await bus.record(fact)
            os.write(notes, f"{fact.id}\n".encode())  # survives our own death
            await asyncio.sleep(pace_s)

    async with (
        connect(settings, "recorder", spool=folder / "spool", wait=False) as bus,
        asyncio.TaskGroup() as tasks,
    ):
        for step in range(10):
            tasks.create_task(record_for_ever(step))
        await asyncio.Event().wait()


if __name__ == "__main__":
    pace_s = float(sys.argv[4]) if len(sys.argv) > 4 else 0.01
    asyncio.run(main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), pace_s))
