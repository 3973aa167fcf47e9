"""For the tests of a training: shows what an agent would see of its session, without an agent.

with trainer_sdk.testing.watched() as watch:
    train_one_step()
assert watch.step == 1
assert watch.sections["forward"].count == 1
"""

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from trainer_sdk import rank_session
from trainer_sdk.bootstrap.agent_link import AgentLink, map_page
from trainer_sdk.page import PageView, make_page
from trainer_sdk.page_content import PageReading
from trainer_sdk.wire import Datagram


@dataclass(frozen=True, slots=True)
class Spent:
    """The count and longest time of a section."""

    count: int
    """How often the section has ended."""
    longest_s: float
    """The longest of the latest 64 times."""


class Watch:
    """The page and messages of a watched session; it can still be read after the session."""

    def __init__(self, page: PageView) -> None:
        self._page = page
        self._datagrams: list[bytes] = []

    @property
    def step(self) -> int:
        """The last finished step; 0 before the first."""
        return self.reading.step

    @property
    def sections(self) -> Mapping[str, Spent]:
        """Every section that was entered, by name."""
        spent = {}
        for number, section in enumerate(self._page.sections()):
            if section.name:
                longest_s = max(self._page.durations(number, 0), default=0.0)
                spent[section.name] = Spent(section.count, longest_s)
        return spent

    @property
    def open(self) -> Mapping[int, tuple[str, ...]]:
        """The sections that are open, the outermost first, by `threading.get_native_id()`."""
        return {
            lane.thread: tuple(self._page.section(frame.section).name for frame in lane.frames)
            for lane in self._page.lanes()
            if lane.frames
        }

    @property
    def values(self) -> Mapping[str, float]:
        """The latest value of each metric, by name."""
        return self._page.values()

    @property
    def is_paused(self) -> bool:
        """Whether a pause is open."""
        return self.reading.pauses > 0

    @property
    def misuses(self) -> int:
        """The number of invalid calls, such as the end of a section that had not begun."""
        return self.reading.misuses

    @property
    def messages(self) -> tuple[Datagram, ...]:
        """The messages that an agent would have received, in order."""
        return tuple(_DATAGRAM.decode(octets) for octets in self._datagrams)

    @property
    def reading(self) -> PageReading:
        """The whole content of the page."""
        reading = self._page.read()
        assert reading is not None, "the session has opened it"
        return reading

    def ask_to_stop(self, after_step: int | None = None) -> None:
        """Ask the training to stop once it has finished this step; by default at once."""
        self._page.ask_to_stop(self.step if after_step is None else after_step)

    def ask_to_save(self, after_step: int | None = None) -> None:
        """Ask the training to save after this step, by default the present one, and to go on."""
        self._page.ask_to_save(self.step if after_step is None else after_step)

    def send(self, octets: bytes, /) -> int:
        """Receive a datagram, as an agent does."""
        self._datagrams.append(octets)
        return len(octets)


@contextmanager
def watched(rank: int = 0) -> Iterator[Watch]:
    """Give this process a watched session within the `with` block; afterwards restore the former.

    Code that has called `trainer_sdk.session()` before keeps the session that it got.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "page")
        watch = Watch(make_page(path))
        words = map_page(path)
    link = AgentLink({})
    link.attach(words, watch, number=1, rank=rank)
    link.up()
    session = rank_session.Session(link)
    former = rank_session.replace_session(session)
    try:
        yield watch
    finally:
        rank_session.replace_session(former)
        session._detach()  # noqa: SLF001 - the same package


_DATAGRAM: "msgspec.json.Decoder[Datagram]" = msgspec.json.Decoder(Datagram)
