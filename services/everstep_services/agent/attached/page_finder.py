"""Finds the pages that ranks of another launcher have made."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from trainer_sdk.attachment import PAGE
from trainer_sdk.page import BadPageError, PageView, view_page


@dataclass(frozen=True, slots=True)
class FoundPage:
    """A rank that has opened its page."""

    round: int
    rank: int
    local_rank: int
    pid: int
    folder: Path
    page: PageView


class PageFinder:
    """Finds each page of a job once, also a page that replaced another."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[Path, int] = {}

    def look(self, oldest: int) -> list[FoundPage]:
        """The new pages of the first round, from this one on, that has any."""
        for number, at in sorted(_numbered(self._folder)):
            if number >= oldest:
                found = [
                    folder
                    for place in sorted(at.iterdir())
                    if (folder := self._found(number, place))
                ]
                if found:
                    return found
        return []

    def _found(self, number: int, place: Path) -> FoundPage | None:
        rank, dash, local_rank = place.name.partition("-")
        path = place / PAGE
        if not dash or not rank.isdigit() or not local_rank.isdigit():
            return None
        try:
            inode = os.stat(path).st_ino
            if self._known.get(path) == inode:
                return None
            page = view_page(str(path))
        except (OSError, ValueError):
            return None  # not there yet, or gone again
        self._known[path] = inode
        try:
            reading = page.read()
        except BadPageError:
            reading = None
        if reading is None or (reading.round, reading.rank) != (number, int(rank)):
            page.close()
            return None
        return FoundPage(number, int(rank), int(local_rank), reading.pid, place, page)


def _numbered(folder: Path) -> Iterator[tuple[int, Path]]:
    try:
        found = list(folder.iterdir())
    except FileNotFoundError:
        return
    for page in found:
        if page.name.isdigit() and page.is_dir():
            yield int(page.name), page
