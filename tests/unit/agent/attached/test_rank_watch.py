"""Ranks of another launcher may send whatever they like to the agent that watches them."""

from pathlib import Path
from typing import Any

from everstep.clock import SystemClock
from everstep_services.agent.attached.rank_watch import RankWatch
from trainer_sdk.launchers import LaunchedRank


class EndlessDoor:
    """A socket whose senders are faster than its reader."""

    heard = 0

    def recv(self, size: int) -> bytes:
        self.heard += 1
        return bytes(min(size, 100))


def test_a_rank_that_sends_without_end_leaves_the_loop_its_other_work(tmp_path: Path) -> None:
    door: Any = EndlessDoor()
    place = LaunchedRank("torchrun", 0, 0, 1, 1, 0, 0, 0)
    watching = RankWatch(tmp_path, place, door, SystemClock())
    watching._hear()
    assert 0 < door.heard == watching.ranks.bad_datagrams < 1000
