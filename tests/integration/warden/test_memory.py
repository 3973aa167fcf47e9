"""A rank that the kernel really kills for its memory, and one that somebody else kills."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from everstep_services.agent.ranks.protocol import RankRuns
from tests.integration.scripts.rig import opened
from tests.memory_groups import limited_group

MOST_MIB = 256


@pytest.fixture
def small() -> Iterator[Path]:
    with limited_group(MOST_MIB) as folder:
        yield folder


async def test_a_rank_that_the_kernel_kills_for_its_memory_is_told_from_one_that_is_killed(
    tmp_path: Path, small: Path
) -> None:
    async with opened(tmp_path, "hungry.py", str(4 * MOST_MIB)) as node:
        (small / "cgroup.procs").write_text(str(node.warden()))
        await node.start()
        gone = (await node.gone())[0]
        assert (gone.signal, gone.memory) == ("SIGKILL", "rank")
        await node.keeper.stop(0)


async def test_a_rank_that_somebody_kills_is_not_said_to_be_out_of_memory(tmp_path: Path) -> None:
    async with opened(tmp_path, "stay.py", "quiet") as node:
        await node.start()
        (runs,) = await node.next(RankRuns)
        os.kill(runs.pid, signal.SIGKILL)
        gone = (await node.gone())[0]
        assert gone.signal == "SIGKILL"
        assert gone.memory != "rank"
        await node.keeper.stop(0)
