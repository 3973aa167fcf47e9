"""A page can be read at any moment, for each state of its rank and each content."""

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.trainer_sdk.script_ranks import ScriptRank, script_rank
from tests.waiting import until
from trainer_sdk import layout
from trainer_sdk.bootstrap.agent_link import map_page
from trainer_sdk.page import BadPageError, PageView, make_page
from trainer_sdk.rank_session import session
from trainer_sdk.testing import watched

NAMES = ("data", "forward", "evaluation", "checkpoint")
Event = tuple[str, str]
EVENTS = st.one_of(
    st.tuples(st.sampled_from(("begin", "end")), st.sampled_from(NAMES)),
    st.tuples(st.sampled_from(("step", "heartbeat", "pause", "resume", "end_all")), st.just("")),
)


class Expected:
    """The expected content of a page."""

    def __init__(self) -> None:
        self.open: list[str] = []
        self.counts = dict.fromkeys(NAMES, 0)
        self.steps = self.pauses = self.misuses = 0

    def apply(self, event: Event) -> None:
        kind, name = event
        match kind:
            case "begin":
                self.open.append(name)
            case "end":
                self._end(name)
            case "end_all":
                while self.open:
                    self.counts[self.open.pop()] += 1
            case "step":
                self.steps += 1
            case "pause":
                self.pauses += 1
            case "resume":
                self.misuses += not self.pauses
                self.pauses = max(0, self.pauses - 1)
            case _:
                assert kind == "heartbeat"

    def _end(self, name: str) -> None:
        if name not in self.open:
            self.misuses += 1
            return
        while True:
            last = self.open.pop()
            self.counts[last] += 1
            if last == name:
                return


@settings(deadline=None, max_examples=200)
@given(st.lists(EVENTS, max_size=60))
def test_the_page_is_right_for_each_order_of_calls(events: list[Event]) -> None:
    with watched() as watch:
        run, expected = session(), Expected()
        for kind, name in events:
            getattr(run, kind)(*([name] if name else []))
            expected.apply((kind, name))
            (opened,) = watch.open.values() or [()]
            assert opened == tuple(expected.open[: layout.DEEPEST])
            assert (watch.step, watch.reading.pauses) == (expected.steps, expected.pauses)
            assert watch.misuses == expected.misuses
        counted = {name: one.count for name, one in watch.sections.items()}
        assert counted == {name: expected.counts[name] for name in counted}
        for number, section in enumerate(watch._page.sections()):
            assert section.longest_s >= 0
            assert min(watch._page.durations(number, 0), default=0) >= 0
        run.step()
        assert watch.reading.longest_step_s >= 0


BUSY = """
import random, sys, threading, trainer_sdk
run, ending = trainer_sdk.session(), threading.Event()
def work(seed):
    chance = random.Random(seed)
    while not ending.is_set():
        with run.section(f"section {chance.randrange(60)}"):
            if chance.random() < 0.5:
                with run.section("inner"):
                    run.heartbeat()
        if not seed:
            run.report(f"value {chance.randrange(20)}", run.step())
threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
for thread in threads:
    thread.start()
sys.stdin.read()
ending.set()
for thread in threads:
    thread.join()
print(run.steps_made)
"""
LOOKS = 150


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[ScriptRank]:
    with script_rank(tmp_path) as rank:
        yield rank


def test_a_concurrent_reader_never_sees_an_impossible_page(rank: ScriptRank) -> None:
    steps = ends = 0
    with rank.start("-c", BUSY) as process:
        until(rank.page.read, "the session")
        for _ in range(LOOKS):
            read_all(rank.page)
            before, steps = steps, rank.reading.steps
            assert steps >= before, "counters never go back"
            before, ends = ends, sum(rank.counts().values())
            assert ends >= before
            assert all(len(lane.frames) <= 2 for lane in rank.page.lanes())
        out, err = process.communicate(timeout=50)
    assert err == ""
    assert rank.reading.steps == int(out) > 0
    assert not any(lane.frames for lane in rank.page.lanes())


def read_all(view: PageView) -> None:
    """Read everything that an agent reads."""
    view.read()
    for lane in view.lanes():
        for frame in lane.frames:
            view.section(frame.section)
    for number, _ in enumerate(view.sections()):
        view.durations(number, 0)
    view.take(0, {}, {}, {})
    view.values()


def attempts(view: PageView) -> list[Callable[[], object]]:
    return [
        view.read,
        view.lanes,
        view.sections,
        view.values,
        lambda: view.section(63),
        lambda: view.section(64),
        lambda: view.durations(63, 0),
        lambda: view.durations(-1, 0),
        lambda: view.take(0, {}, {}, {}),
        lambda: view.take(1 << 62, {1: 5, 63: 1}, {1: 5}, {1: 7}),
        lambda: read_all(view),
    ]


@pytest.mark.parametrize("seed", range(40))
def test_random_words_are_read_or_reported(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    view = make_page(str(tmp_path / "page"))
    words = map_page(str(tmp_path / "page"))
    likely = (0, 1, -1, 63, 64, 1 << 57, 1 << 62, -(1 << 63), (1 << 63) - 1, layout.MAGIC)
    for place in range(layout.PAGE_BYTES // 8):
        words[place] = chance.choice((*likely, chance.randrange(-(1 << 63), 1 << 63)))
    words[layout.MAGIC_AT] = layout.MAGIC
    if seed % 2:  # only some of it: the rest is what an idle rank writes
        for place in range(layout.PAGE_BYTES // 8):
            if chance.random() < 0.98:
                words[place] = layout.MAGIC if place == layout.MAGIC_AT else int(place == 6)
    reported = 0
    for attempt in attempts(view):
        try:
            attempt()
        except BadPageError as error:
            reported += 1
            assert str(error)
    assert reported


def test_a_truncated_page_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "page"
    view = make_page(str(path))
    os.truncate(path, 4096)
    for attempt in attempts(view):
        with pytest.raises(BadPageError, match="4096 bytes"):
            attempt()
    with pytest.raises(BadPageError):
        view.ask_to_stop(3)


def test_a_page_with_another_magic_is_rejected(tmp_path: Path) -> None:
    view = make_page(str(tmp_path / "page"))
    assert view.read() is None
    map_page(str(tmp_path / "page"))[layout.MAGIC_AT] = 5
    with pytest.raises(BadPageError, match="begins with 0x5"):
        view.read()


@pytest.mark.parametrize(
    ("place", "number"), [(layout.PID, 1 << 40), (layout.PID, 1 << 62), (layout.STEP, 1 << 60)]
)
def test_a_number_that_no_process_and_no_fact_may_have_is_rejected(
    tmp_path: Path, place: int, number: int
) -> None:
    """An agent asks the kernel for this process: a number too large for it ended the agent."""
    view = make_page(str(tmp_path / "page"))
    words = map_page(str(tmp_path / "page"))
    words[place], words[layout.MAGIC_AT] = number, layout.MAGIC
    with pytest.raises(BadPageError, match=f"its word {place} is {number}"):
        view.read()


def test_a_new_page_is_a_new_file(tmp_path: Path) -> None:
    """A rank of an earlier round cannot write into the page of the next (A3.3)."""
    path = str(tmp_path / "page")
    make_page(path)
    left = map_page(path)
    view = make_page(path)
    left[layout.MAGIC_AT] = layout.MAGIC
    assert view.read() is None, "a rank of an earlier round writes to its own"
    assert os.stat(path).st_blocks * 512 >= layout.PAGE_BYTES, "nothing is left to be allocated"
