"""For the tests of a training: what its session says, seen as an agent sees it; without an agent.

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
from trainer_sdk.page import PageReading, PageView, make_page
from trainer_sdk.wire import Datagram


@dataclass(frozen=True, slots=True)
class Spent:
    """What was spent in a section."""

    count: int
    """How often it ended."""
    longest_s: float
    """Of the latest 64 times."""


class Watch:
    """What a rank says of itself; it may still be asked when the rank is no longer watched."""

    def __init__(self, page: PageView) -> None:
        self._page = page
        self._datagrams: list[bytes] = []

    @property
    def step(self) -> int:
        """The last step that is finished; 0 before the first."""
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
        """What was reported last, by name."""
        return self._page.values()

    @property
    def is_paused(self) -> bool:
        """The rank has asked not to be judged."""
        return self.reading.pauses > 0

    @property
    def misuses(self) -> int:
        """Calls that made no sense, such as the end of a section that had not begun."""
        return self.reading.misuses

    @property
    def messages(self) -> tuple[Datagram, ...]:
        """What an agent would have been told, in order."""
        return tuple(_DATAGRAM.decode(octets) for octets in self._datagrams)

    @property
    def reading(self) -> PageReading:
        """All that the page says."""
        reading = self._page.read()
        assert reading is not None, "the session has opened it"
        return reading

    def ask_to_stop(self, after_step: int | None = None) -> None:
        """Ask the training to stop, once it has finished this step; by default at once."""
        self._page.ask_to_stop(self.step if after_step is None else after_step)

    def ask_to_save(self, after_step: int | None = None) -> None:
        """Ask the training to save after this step, by default the present one, and to go on."""
        self._page.ask_to_save(self.step if after_step is None else after_step)

    def send(self, octets: bytes, /) -> int:
        """Take a datagram, as an agent does."""
        self._datagrams.append(octets)
        return len(octets)


@contextmanager
def watched(rank: int = 0) -> Iterator[Watch]:
    """Give this process a session that is watched; the one that it had comes back afterwards.

    Whoever has asked for `trainer_sdk.session()` before keeps what it got.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "page")
        watch = Watch(make_page(path))
        words = map_page(path)
    link = AgentLink({})
    link.attach(words, watch, number=1, rank=rank)
    link.up()
    session = rank_session.Session(link)
    before = rank_session.replace_session(session)
    try:
        yield watch
    finally:
        rank_session.replace_session(before)
        session._detach()  # noqa: SLF001 - one package


_DATAGRAM: "msgspec.json.Decoder[Datagram]" = msgspec.json.Decoder(Datagram)
