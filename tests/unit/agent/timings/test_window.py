"""Pages taken apart into windows of steps: nothing twice, and each end in the window it is of."""

import time
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep_services.agent.timings.window import (
    SHORTEST_S,
    RankPage,
    SketchBuilder,
    StepRange,
    Stretch,
    section_at,
    steps_of,
)
from tests.unit.messages.sketches import sketch_of
from trainer_sdk import layout
from trainer_sdk.rank_session import session
from trainer_sdk.testing import Watch, watched

MANY = 10_000


@pytest.fixture
def watch() -> Iterator[Watch]:
    with watched() as watch:
        yield watch


def take(page: RankPage, watch: Watch, last: int) -> None:
    page.take(watch._page, last, time.monotonic())


def steps(count: int, sections: int = 1) -> None:
    for _ in range(count):
        for _ in range(sections):
            with session().section("forward"):
                pass
        session().step()


@given(st.lists(st.floats(0, 1e6), max_size=50))
def test_a_sketch_that_grows_is_the_sketch_of_all(durations: list[float]) -> None:
    builder = SketchBuilder()
    for one in durations:
        builder.add(one)
    grown, whole = builder.sketch(), sketch_of(durations)
    assert (grown.count, grown.buckets) == (whole.count, whole.buckets)
    assert grown.sum_s == pytest.approx(whole.sum_s, abs=1e-8)
    assert grown.min_s == pytest.approx(whole.min_s, abs=1e-9)
    assert grown.max_s == pytest.approx(whole.max_s, abs=1e-9)


@pytest.mark.parametrize(
    ("asked", "step_s", "steps"),
    [(16, None, 16), (16, 1.0, 16), (16, 0.01, 64), (16, 0.001, 512), (1, 30.0, 1), (0, None, 1)],
)
def test_windows_last_long_enough(asked: int, step_s: float | None, steps: int) -> None:
    assert steps_of(asked, step_s) == steps
    assert step_s is None or steps * step_s >= SHORTEST_S


@given(st.integers(0, 1000), st.sampled_from([1, 2, 16, 48, 64]))
def test_windows_end_at_multiples_wherever_one_begins(made: int, size: int) -> None:
    first = StepRange(made, made).after(size)
    assert first.first == made + 1
    assert first.last % size == 0
    assert first.is_whole(size) == (made % size == 0)
    assert first.after(size).is_whole(size)


def test_each_end_is_of_the_window_in_which_it_was(watch: Watch) -> None:
    page = RankPage()
    steps(3)
    take(page, watch, 4)
    steps(3)
    take(page, watch, 4)
    assert page.steps == 6
    first = page.close(StepRange(1, 4))
    assert [one.section for one in first.sections] == ["", "forward"]
    assert [one.wall.count for one in first.sections] == [3, 4], "the first step has no beginning"
    steps(2)
    take(page, watch, 8)
    second = page.close(StepRange(5, 8))
    assert [one.wall.count for one in second.sections] == [4, 4]
    assert first.ends_s == second.starts_s < second.ends_s
    assert second.window_s == pytest.approx(second.sections[0].wall.sum_s, rel=0.5, abs=1e-4)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=12), st.sampled_from([1, 4, 5]))
def test_nothing_is_taken_twice_or_lost_however_often_one_looks(
    parts: list[int], size: int
) -> None:
    with watched() as watch:
        page, window, counted = RankPage(), StepRange(1, size), [0, 0]
        take(page, watch, window.last)
        for part in parts:
            steps(part)
            take(page, watch, window.last)
            while page.steps >= window.last:
                closed = page.close(window)
                window = window.after(size)
                counted[0] += closed.sections[0].wall.count
                counted[1] += sum(one.wall.count for one in closed.sections[1:])
        rest = page.close(window)
        counted[0] += rest.sections[0].wall.count
        counted[1] += sum(one.wall.count for one in rest.sections[1:])
    assert counted == [max(0, sum(parts) - 1), sum(parts)]


def test_processor_times_come_with_their_section(watch: Watch) -> None:
    watch._page.time_cpu(is_wanted=True)
    page = RankPage()
    steps(1)
    take(page, watch, MANY)
    steps(20)
    take(page, watch, MANY)
    whole, forward = page.close(StepRange(1, MANY)).sections
    assert whole.cpu is None
    assert forward.cpu is not None
    assert forward.cpu.count == 4


def test_steps_that_the_optimizer_counts_are_timed_by_their_instants(watch: Watch) -> None:
    session()
    words = session()._words
    words[layout.COUNTED_BY] = layout.BY_OPTIMIZER
    seconds = words.cast("B").cast("d")
    page = RankPage()
    for step in range(1, 9):
        seconds[layout.ENDS_AT + step] = 100.0 + step / 4
        words[layout.STEPS] = step
        if step % 3 == 0:
            take(page, watch, 6)
    take(page, watch, 6)
    closed = page.close(StepRange(1, 6))
    assert closed.ends_s == 101.5
    assert closed.sections[0].wall.count == 5
    assert closed.sections[0].wall.max_s == 0.25
    assert page.close(StepRange(7, 12)).sections[0].wall.count == 2


def test_a_boundary_that_was_passed_too_fast_is_about_where_it_was(watch: Watch) -> None:
    page = RankPage()
    steps(1)
    page.take(watch._page, 100, 50.0)
    steps(199)
    page.take(watch._page, 100, 52.0)
    assert page.close(StepRange(1, 100)).ends_s == pytest.approx(51.0, abs=0.02)


def test_what_was_before_the_first_whole_window_counts_nothing(watch: Watch) -> None:
    page = RankPage()
    steps(5)
    take(page, watch, 5)
    page.restart()
    steps(2)
    take(page, watch, MANY)
    assert [one.wall.count for one in page.close(StepRange(6, 7)).sections] == [2, 2]


def test_the_innermost_section_of_an_instant() -> None:
    stretches = [Stretch(1, 0.0), Stretch(2, 10.0, 20.0), Stretch(3, 12.0, 15.0)]
    found = [section_at(stretches, at_s) for at_s in (5.0, 11.0, 13.0, 15.5, 30.0)]
    assert found == [1, 2, 3, 2, 1]
    assert section_at(stretches[1:], 5.0) is None


def test_collectives_find_their_section_and_open_ones_are_known(watch: Watch) -> None:
    run, page = session(), RankPage()
    steps(1)
    with run.section("backward"):
        inside = time.monotonic()
    run.begin("epoch")
    after = time.monotonic()
    run.step()
    take(page, watch, 2)
    closed = page.close(StepRange(1, 2))
    number = section_at(closed.stretches, inside)
    assert number is not None
    assert closed.sections[closed.numbers.index(number)].section == "backward"
    assert section_at(closed.stretches, after) not in closed.numbers, "it has not ended yet"
