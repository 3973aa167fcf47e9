"""The ranks of this node, also those of torchrun and of another launcher."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from everstep.messages import StartRanks
from everstep_services.agent.ranks.round_watch import WatchedRank
from trainer_sdk.page_content import PageReading


@dataclass(frozen=True, slots=True)
class RankSource:
    """The ranks of the present round."""

    live: Callable[[], Collection[int]]
    """The ranks that are expected to make progress."""
    watched: Callable[[int], WatchedRank | None]
    order: Callable[[int], StartRanks | None]
    """The order with which a rank was started, or with which rendezvous would have started it."""

    def page(self, rank: int) -> PageReading | None:
        """The contents of a rank's page; None before it is opened, or if it cannot be trusted."""
        watched = self.watched(rank)
        return None if watched is None else watched.reading()

    def folder(self, rank: int) -> Path | None:
        """The folder with a rank's sockets; None if there is no such rank."""
        watched = self.watched(rank)
        return None if watched is None else watched.folder

    def step(self, rank: int) -> int | None:
        """The last step of a rank in this round, as its page shows."""
        page = self.page(rank)
        return None if page is None or not page.step else page.step

    def pids(self, ranks: Collection[int]) -> dict[int, int]:
        """The process ids of these ranks."""
        pages = {rank: self.page(rank) for rank in ranks}
        return {rank: page.pid for rank, page in pages.items() if page is not None and page.pid}
