"""How late the agent's event loop is while ranks write and the console follows their files.

    python -m benchmarks.console

Eight ranks write nothing, 100 MB/s together, and as fast as they can. The screen takes everything.
"""

import asyncio
import os
import sys
import tempfile
from pathlib import Path

from everstep_services.agent.output.console import Rank, Screen, opened_console
from everstep_services.agent.run_plan import ConsoleChoice

RANKS, SECONDS, WAKE_EVERY_S = 8, 3.0, 0.005
WRITER = """
import os, sys, time
line = b"step 000001 loss 2.345678 lr 0.0003 tokens/s 123456 " + b"x" * 46 + b"\\n"
block, rate, seconds = line * 655, float(sys.argv[1]), float(sys.argv[2])
began, done = time.monotonic(), 0
while (passed := time.monotonic() - began) < seconds:
    if done < passed * rate:
        done += os.write(1, block)
    else:
        time.sleep(0.001)
"""


async def lags(folder: Path, screen: Screen, rate: float) -> tuple[list[float], float]:
    """How late each wake-up was, the latest last; and how many bytes a second were written."""
    loop, late = asyncio.get_running_loop(), []
    async with opened_console("n1", ConsoleChoice(), (screen, screen)) as console:
        writers = [await _writer(folder / str(number), rate / RANKS) for number in range(RANKS)]
        for number in range(RANKS):
            console.follow(Rank(number, number, folder / str(number)))
        ended = asyncio.gather(*(writer.wait() for writer in writers))
        while not ended.done():
            due = loop.time() + WAKE_EVERY_S
            await asyncio.sleep(WAKE_EVERY_S)
            late.append(loop.time() - due)
        await console.drain(20)
    size = sum((folder / str(number) / "stdout").stat().st_size for number in range(RANKS))
    return sorted(late), size / SECONDS


async def _writer(folder: Path, rate: float) -> asyncio.subprocess.Process:
    folder.mkdir(parents=True)
    (folder / "stderr").touch()
    with (folder / "stdout").open("ab") as out:
        return await asyncio.create_subprocess_exec(
            *[sys.executable, "-c", WRITER, str(rate), str(SECONDS)], stdout=out
        )


def main() -> None:
    print(f"loop lag, {RANKS} ranks, {SECONDS:g} s each\n")
    print(f"{'MB/s':>8}{'median ms':>12}{'p99 ms':>12}{'max ms':>12}{'n':>8}")
    with (
        tempfile.TemporaryDirectory(prefix="everstep-bench-") as name,
        open(os.devnull, "w") as null,
    ):
        screen = Screen(null.fileno())
        for rate in (0.0, 100e6, float("inf")):
            late, written = asyncio.run(lags(Path(name) / str(rate), screen, rate))
            median, high = late[len(late) // 2], late[int(len(late) * 0.99)]
            found = "".join(f"{1e3 * lag:12.2f}" for lag in (median, high, late[-1]))
            print(f"{written / 1e6:8.0f}{found}{len(late):8}")


if __name__ == "__main__":
    main()
