"""What an agent reads from a page about steps and reported values."""

import math
from collections.abc import Iterator

import pytest

from everstep_services.agent.telemetry.step_figures import NO_FIGURES, StepCounter, read_figures
from tests.fakes.clock import FakeClock
from trainer_sdk import layout
from trainer_sdk.page import PageView
from trainer_sdk.rank_session import Session, session
from trainer_sdk.testing import Watch, watched


@pytest.fixture
def watch() -> Iterator[Watch]:
    with watched() as watch:
        yield watch


@pytest.fixture
def page(watch: Watch) -> PageView:
    return watch._page


@pytest.fixture
def run(watch: Watch) -> Session:
    return session()


def put_steps(page: PageView, durations: list[float]) -> None:
    """Write steps of these lengths, as the SDK does after a first step without a beginning."""
    with page._words() as words:
        seconds = words.cast("B").cast("d")
        for number, took in enumerate(durations, start=2):
            seconds[layout.STEPS_AT + (number & (layout.STEPS_ENTRIES - 1))] = took
        words[layout.STEPS] = len(durations) + 1


def test_median_p99_and_longest_step_of_a_minute(page: PageView, run: Session) -> None:
    run.start_at(40, total=900)
    put_steps(page, [9.0] * 20 + [1.0] * 98 + [2.0, 3.0])
    figures = read_figures(page, steps=100)
    assert (figures.p50_s, figures.p99_s, figures.max_s) == (1.0, 2.0, 3.0)
    assert figures.total == 900


def test_more_steps_than_a_page_keeps_are_its_latest(page: PageView, run: Session) -> None:
    run.step()
    put_steps(page, [9.0] * 300 + [1.0] * 600)
    assert read_figures(page, steps=900).max_s == 1.0


def test_steps_without_a_length_are_not_steps_of_no_time(page: PageView, run: Session) -> None:
    run.step()
    put_steps(page, [0.0] * 20)
    figures = read_figures(page, steps=20)
    assert (figures.p50_s, figures.p99_s, figures.max_s) == (None, None, None)


def test_values_are_the_latest_and_finite_ones(page: PageView, run: Session) -> None:
    for loss in (3.0, 2.5):
        run.report("loss", loss)
    run.report("grad_norm", math.nan)
    run.report("scale", math.inf)
    (reported,) = read_figures(page, steps=1).values
    assert (reported.name, reported.value) == ("loss", 2.5)


def test_a_script_that_reports_nothing_has_no_figures(page: PageView, run: Session) -> None:
    assert read_figures(page, steps=1) == NO_FIGURES


def test_a_damaged_page_has_no_figures(page: PageView, run: Session) -> None:
    run.report("loss", 1.0)
    with page._words() as words:
        words[layout.VALUES] = 10**9
    assert read_figures(page, steps=1) == NO_FIGURES


async def test_steps_that_are_made_again_count_twice() -> None:
    clock = FakeClock()
    counter = StepCounter(clock)
    counter.first(1)
    counter.went_back(400)
    await clock.advance(60)
    made = counter.since(301)
    assert made is not None
    assert (made.step, made.steps, made.steps_s) == (301, 700, 60)
    assert counter.since(301, is_last=True) is None
    counter.went_back(2)
    last = counter.since(300, is_last=True)
    assert last is not None
    assert (last.step, last.steps) == (300, 1)
