"""A rank that the kernel kills for its memory is on record as that, not as killed by somebody."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.cluster import Cluster
from tests.memory_groups import limited_group

MOST_MIB = 512
SCRIPT = f"""
import os, time

if os.environ["EVERSTEP_ROUND"] == "1":
    time.sleep(1000)
taken = [bytearray(b"x" * (1 << 20)) for _ in range({4 * MOST_MIB})]
"""


@pytest.fixture
def small() -> Iterator[Path]:
    with limited_group(MOST_MIB) as folder:
        yield folder


def test_a_rank_that_is_killed_for_its_memory_is_said_to_be(cluster: Cluster, small: Path) -> None:
    script = cluster.folder / "hungry.py"
    script.write_text(SCRIPT)
    agent = cluster.run("--cold", "--max-restarts", "1", str(script))
    cluster.pid_of(0, 1)
    (small / "cgroup.procs").write_text(str(agent.warden))  # the next round's rank is born there
    cluster.kill_rank(0, 1)
    assert agent.wait() == 1
    first = cluster.until_fact("rank_exited", lambda body: body["round"] == 1)
    second = cluster.until_fact("rank_exited", lambda body: body["round"] == 2)
    assert (first["how"], first["signal"]) == ("signal", "SIGKILL")
    assert (second["how"], second["signal"]) == ("out_of_memory", "SIGKILL")
    assert "round 2 is over: rank 0 was killed by the kernel: out of memory" in agent.said
