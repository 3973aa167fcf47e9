"""The ends of sections and steps, and processor times, as an agent reads them."""

import time
from collections.abc import Iterator
from threading import Event

import pytest

from trainer_sdk import layout
from trainer_sdk.page import BadPageError, PageView
from trainer_sdk.page_content import SectionEnd
from trainer_sdk.rank_session import Session, session
from trainer_sdk.testing import Watch, watched


@pytest.fixture
def watch() -> Iterator[Watch]:
    with watched() as watch:
        yield watch


@pytest.fixture
def run(watch: Watch) -> Session:
    return session()


@pytest.fixture
def page(watch: Watch) -> PageView:
    return watch._page


def endings(page: PageView, number: int, after: int = 0) -> tuple[SectionEnd, ...]:
    return page.take(0, {number: after}, {}, {}).sections.get(number, ())


def cpu_times(page: PageView, number: int, after: int = 0) -> tuple[int, tuple[float, ...]]:
    taken = page.take(0, {}, {number: after}, {})
    return taken.cpu_counts[number], taken.cpu_s[number]


def counts(page: PageView) -> dict[int, int]:
    return dict(page.take(0, {}, {}, {}).counts)


def spend(run: Session, name: str, times: int = 1) -> None:
    for _ in range(times):
        with run.section(name):
            pass


def test_each_end_of_a_section_has_its_instant_and_its_duration(
    run: Session, page: PageView
) -> None:
    before = time.monotonic()
    spend(run, "forward", 3)
    after = time.monotonic()
    found = endings(page, 1)
    assert [one.number for one in found] == [1, 2, 3]
    instants = [one.ended_s for one in found if one.ended_s is not None]
    assert instants == sorted(instants)
    assert before <= instants[0] <= instants[-1] <= after
    assert [one.took_s for one in found] == list(page.durations(1, 0))
    assert [one.number for one in endings(page, 1, 2)] == [3]
    assert counts(page) == {1: 3}


def test_the_latest_ends_are_kept_with_their_instants(run: Session, page: PageView) -> None:
    spend(run, "forward", 200)
    found = endings(page, 1)
    assert found[-1].number == 200
    assert len(found) == layout.RING_ENTRIES - 1, "the next one may be written just then"
    known = [one.number for one in found if one.ended_s is not None]
    assert known == list(range(200 - layout.ENDS_ENTRIES + 2, 201))


def test_deep_sections_and_sections_of_long_phases_have_instants_too(
    run: Session, page: PageView
) -> None:
    for depth in range(layout.DEEPEST + 2):
        run.begin(f"deep {depth}")
    run.end_all()
    spend(run, "evaluation")
    assert counts(page) == dict.fromkeys(range(1, layout.DEEPEST + 4), 1)
    for number in range(1, layout.DEEPEST + 4):
        (ending,) = endings(page, number)
        assert ending.ended_s is not None


def test_steps_have_instants_under_each_counter(run: Session, page: PageView) -> None:
    for _ in range(3):
        run.step()
    made = page.take(0, {}, {}, {}).steps
    assert [one.number for one in made] == [1, 2, 3]
    first, second, third = (one.ended_s or 0.0 for one in made)
    assert 0 < first <= second <= third
    assert made[0].took_s is None, "nobody knows when it began"
    assert made[2].took_s == pytest.approx(third - second)
    run._words[layout.COUNTED_BY] = layout.BY_OPTIMIZER
    assert [one.took_s for one in page.take(1, {}, {}, {}).steps] == [None, None]


def test_processor_times_are_measured_while_the_agent_wants_them(
    run: Session, page: PageView
) -> None:
    run.step()
    spend(run, "forward")
    assert cpu_times(page, 1) == (0, ())
    page.time_cpu(is_wanted=True)
    spend(run, "forward")
    assert cpu_times(page, 1) == (0, ()), "it is looked at once a step"
    run.step()
    spend(run, "forward", 103)
    spend(run, "new since")
    count, times = cpu_times(page, 1)
    assert (count, len(times)) == (20, layout.CPU_ENTRIES - 1), "every fifth of a hundred"
    assert all(0 <= one < 1 for one in times)
    assert cpu_times(page, 1, 18)[1] == times[-2:]
    assert cpu_times(page, 2)[0] == 1
    page.time_cpu(is_wanted=False)
    run.step()
    spend(run, "forward")
    assert cpu_times(page, 1, 20) == (20, ())
    assert counts(page) == {1: 106, 2: 1}


def test_waiting_takes_no_processor_time(run: Session, page: PageView) -> None:
    page.time_cpu(is_wanted=True)
    run.step()
    with run.section("waits"):
        began = time.thread_time()
        Event().wait(0.05)
        most = time.thread_time() - began
    (ending,) = endings(page, 1)
    _, (cpu_s,) = cpu_times(page, 1)
    assert ending.took_s is not None
    assert most <= cpu_s < ending.took_s


def test_a_section_that_is_open_when_timing_is_switched_is_not_measured(
    run: Session, page: PageView
) -> None:
    run.begin("open")
    page.time_cpu(is_wanted=True)
    run.step()
    run.begin("inside")
    run.end("open")
    assert counts(page) == {1: 1, 2: 1}
    assert [cpu_times(page, number)[0] for number in (1, 2)] == [0, 1]
    page.time_cpu(is_wanted=False)
    run.begin("open")
    run.step()
    run.end("open")
    assert counts(page) == {1: 2, 2: 1}
    assert cpu_times(page, 1)[0] == 0


def test_a_count_below_zero_is_reported(run: Session, page: PageView) -> None:
    spend(run, "forward")
    at = layout.SECTIONS_AT + layout.SECTION_WORDS
    run._words[at + layout.SECTION_CPU_COUNT] = -1
    with pytest.raises(BadPageError, match="is -1"):
        cpu_times(page, 1)
    run._words[at] = -5
    with pytest.raises(BadPageError, match="is -5"):
        endings(page, 1)
