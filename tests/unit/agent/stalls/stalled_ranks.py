"""Ranks whose pages are written by the real SDK, on a clock of the test's own."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from unittest import mock

from everstep_services.agent.stalls.limits import LimitRules, StallLimits
from everstep_services.agent.stalls.rank_view import ActivitySigns, RankView
from trainer_sdk import layout, pauses, rank_session, sections
from trainer_sdk.bootstrap import agent_link as links
from trainer_sdk.bootstrap import compilation
from trainer_sdk.page import PageView, make_page
from trainer_sdk.rank_session import Session


class Clock:
    """Monotonic seconds that pass when the test moves them."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.ranks: dict[Path, StallRank] = {}
        """The rank of each page: its descriptors are open."""

    def ns(self) -> int:
        return int(self.now * 1e9)

    def seconds(self) -> float:
        return self.now


class StallRank:
    """A rank with a page; `run` is its session once it has one."""

    def __init__(self, folder: Path, rank: int, clock: Clock) -> None:
        path = folder / f"page-{rank}"
        if (former := clock.ranks.pop(path, None)) is not None:
            former.close()
        clock.ranks[path] = self
        self.rank = rank
        self.view_of_page: PageView = make_page(str(path))
        self.born_s = clock.now
        self.signs = ActivitySigns()
        self.looked_s = 0.0
        self.link = links.AgentLink({})
        self.link.words = links.map_page(str(path))
        self.link.words[layout.PID] = 100 + rank
        self.link.words[layout.RANK] = rank
        self.link.words[layout.PHASE] = layout.PHASE_STARTING
        self.link.words[layout.PROGRESS_NS] = clock.ns()
        self.link.words[layout.MAGIC_AT] = layout.MAGIC
        self._run: Session | None = None

    @property
    def run(self) -> Session:
        if self._run is None:
            self.link.up()
            self._run = Session(self.link)
        return self._run

    def close(self) -> None:
        """Unmap the page on both sides: each mapping keeps a descriptor open."""
        self.view_of_page.close()
        if self._run is None:
            self.link.detach()
        else:
            self._run._detach()

    def view(self) -> RankView:
        page = self.view_of_page
        return RankView(
            self.rank,
            self.born_s,
            page=page.read(),
            lanes=page.lanes(),
            section=page.section,
            signs=self.signs,
            looked_s=self.looked_s,
        )


@contextmanager
def clock_of_pages(clock: Clock) -> Iterator[None]:
    """Let every page be written by this clock; at the end, close all pages."""
    with (
        mock.patch.object(sections, "monotonic", clock.seconds),
        mock.patch.object(rank_session, "monotonic", clock.seconds),
        mock.patch.object(pauses, "monotonic", clock.seconds),
        mock.patch.object(links, "monotonic_ns", clock.ns),
        mock.patch.object(compilation, "monotonic_ns", clock.ns),
    ):
        yield
    paths = tuple(map(str, clock.ranks))
    for rank in clock.ranks.values():
        rank.close()
    clock.ranks.clear()
    left = [path for path in _open_paths() if path.startswith(paths)]
    assert not left, f"still open: {left}"


def _open_paths() -> Iterator[str]:
    """The path of each open descriptor of this process; a deleted file has ` (deleted)` behind."""
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # that of the listing itself
            yield os.readlink(f"/proc/self/fd/{descriptor}")


def limits_of(**configured: float) -> StallLimits:
    return StallLimits(
        LimitRules(configured={name.replace("_", "-"): s for name, s in configured.items()})
    )
