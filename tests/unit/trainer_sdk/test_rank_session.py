"""A session's page; no call of a session raises, for any arguments."""

import asyncio
import math
import sys
from collections.abc import Generator, Iterator

import pytest

from tests.waiting import turns
from trainer_sdk import layout, sdk_log
from trainer_sdk.page_content import CountedBy, SectionKind
from trainer_sdk.rank_session import Session, session
from trainer_sdk.testing import Watch, watched
from trainer_sdk.wire import Paused, Requested, Resumed, Stepped, StopSeen, Up


@pytest.fixture(autouse=True)
def nothing_was_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sdk_log, "_printed", set())


@pytest.fixture
def watch() -> Iterator[Watch]:
    with watched() as watch:
        yield watch


@pytest.fixture
def run(watch: Watch) -> Session:
    return session()


def opened(watch: Watch) -> tuple[str, ...]:
    (names,) = watch.open.values() or [()]
    return names


def test_steps_are_counted_or_numbered_by_the_script(watch: Watch, run: Session) -> None:
    assert [run.step(), run.step(), run.step(100), run.step()] == [1, 2, 100, 101]
    assert (watch.step, watch.reading.steps) == (101, 4)
    assert watch.reading.counted_by is CountedBy.SDK
    run.start_at(500, total=900)
    assert run.step() == watch.step == 501
    assert watch.reading.total_steps == 900


def test_an_agent_gets_messages_of_the_beginning_and_the_first_step(
    watch: Watch, run: Session
) -> None:
    run.start_at(40)
    for _ in range(3):
        run.step()
    up, stepped = watch.messages
    assert isinstance(up, Up)
    assert stepped == Stepped(round=1, rank=0, step=41)
    assert watch.reading.first_step_s > 0


def test_the_optimizer_counts_until_the_script_does(watch: Watch, run: Session) -> None:
    run.heartbeat()
    assert watch.reading.counted_by.value == "nobody"
    words = run._words
    words[layout.STEPS] = words[layout.STEP] = 4
    words[layout.FIRST_STEP_NS] = 5
    words[layout.COUNTED_BY] = layout.BY_OPTIMIZER
    assert run.step() == 1
    assert (watch.step, watch.reading.steps) == (1, 4)
    assert watch.reading.counted_by is CountedBy.SDK
    assert [type(one) for one in watch.messages] == [Up], "the first step was seen before"
    run.step()
    assert watch.reading.steps == 5


@pytest.mark.parametrize("number", [None, -1, 1 << 70, math.nan, "x", [], object(), 1j])
def test_an_invalid_step_number_counts_as_the_next_step(
    watch: Watch, run: Session, number: object
) -> None:
    run.step(7)
    assert run.step(number) == 8  # type: ignore[arg-type]
    run.start_at(number)  # type: ignore[arg-type]
    run.start_at(8, total=number)  # type: ignore[arg-type]
    assert run.step() == watch.step == 9


def test_sections_nest_and_end_with_their_inner_sections(watch: Watch, run: Session) -> None:
    with run.section("forward"), run.section("attention"):
        assert opened(watch) == ("forward", "attention")
        with run.section("forward"):
            assert opened(watch) == ("forward", "attention", "forward")
    assert not watch.open
    assert {name: one.count for name, one in watch.sections.items()} == {
        "forward": 2,
        "attention": 1,
    }
    assert watch.sections["forward"].longest_s > 0


def test_an_exception_ends_a_section(watch: Watch, run: Session) -> None:
    with pytest.raises(ZeroDivisionError), run.section("forward"):
        raise ZeroDivisionError
    assert not watch.open


def test_the_end_of_a_section_ends_the_open_sections_inside(watch: Watch, run: Session) -> None:
    run.begin("epoch")
    run.begin("data")
    run.begin("augment")
    run.end("epoch")
    assert not watch.open
    assert {name: one.count for name, one in watch.sections.items()} == {
        "epoch": 1,
        "data": 1,
        "augment": 1,
    }


def test_an_end_without_a_beginning_ends_no_other_section(
    watch: Watch, run: Session, capsys: pytest.CaptureFixture[str]
) -> None:
    run.section("data")
    with run.section("forward"):
        for _ in range(3):
            run.end("data")
            run.end("typo")
        assert opened(watch) == ("forward",)
    assert watch.misuses == 6
    assert "typo" not in watch.sections
    assert len(capsys.readouterr().err.splitlines()) == 2, "each is logged once"


def test_generators_that_end_their_sections_late_leave_nothing_open(
    watch: Watch, run: Session
) -> None:
    def items(name: str) -> Generator[int, None, None]:
        while True:
            with run.section(name):
                yield 1

    first, second = items("first"), items("second")
    for _ in range(5):
        next(first)
        next(second)
    with run.section("forward"):
        first.close()
        second.close()
    assert not watch.open
    assert watch.sections["forward"].count == 1


def test_sections_that_are_never_left_are_bounded(watch: Watch, run: Session) -> None:
    """Open sections take a bounded amount of memory (A6.4)."""
    for _ in range(5000):
        run.begin("skipped")
    assert len(run._table.main.opened) <= 1025
    assert watch.misuses
    run.end_all()
    with run.section("forward"):
        assert opened(watch) == ("forward",)


def test_deep_sections_are_timed_though_only_the_outer_are_shown(
    watch: Watch, run: Session
) -> None:
    for depth in range(20):
        run.begin(f"level {depth}")
    assert opened(watch) == tuple(f"level {depth}" for depth in range(layout.DEEPEST))
    for depth in reversed(range(20)):
        run.end(f"level {depth}")
    assert {one.count for one in watch.sections.values()} == {1}
    assert not watch.misuses


def test_names_beyond_the_limit_share_a_section(
    watch: Watch, run: Session, capsys: pytest.CaptureFixture[str]
) -> None:
    """Names of sections take a bounded amount of memory (A6.4)."""
    for number in range(100):
        with run.section(f"step {number}"):
            pass
    sections = watch.sections
    assert len(sections) == layout.OTHERS
    assert sections["(others)"].count == 100 - (layout.OTHERS - 1)
    assert "more than 62 names" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("", "(unnamed)"),
        ("x" * 64, "x" * 64),
        ("x" * 65, "x" * 61 + "…"),
        ("日" * 30, "日" * 20 + "…"),
        ("\udcff", "?"),
        (None, "None"),
        (7, "7"),
        ([], "[]"),
    ],
)
def test_any_name_can_be_shown(watch: Watch, run: Session, name: object, shown: str) -> None:
    with run.section(name):  # type: ignore[arg-type]
        assert opened(watch) == (shown,)
    assert watch.sections[shown].count == 1


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("forward", SectionKind.PLAIN),
        ("evaluation", SectionKind.EVALUATION),
        ("val", SectionKind.EVALUATION),
        ("rank0_eval", SectionKind.EVALUATION),
        ("retrieval", SectionKind.PLAIN),
        ("interval", SectionKind.PLAIN),
        ("checkpointing", SectionKind.CHECKPOINT),
        ("async-save", SectionKind.CHECKPOINT),
        ("unsaved", SectionKind.PLAIN),
    ],
)
def test_the_kind_of_a_section_follows_from_its_name(
    watch: Watch, run: Session, name: str, kind: SectionKind
) -> None:
    run.section(name)
    assert {one.name: one.kind for one in watch._page.sections()}[name] is kind


def test_the_kind_of_a_section_can_be_given(watch: Watch, run: Session) -> None:
    run.section("publish", kind="checkpoint")
    run.section("odd", kind="nonsense")
    kinds = {one.name: one.kind for one in watch._page.sections()}
    assert (kinds["publish"], kinds["odd"]) == (SectionKind.CHECKPOINT, SectionKind.PLAIN)
    assert watch.misuses == 1


def test_a_decorated_function_is_a_section(watch: Watch, run: Session) -> None:
    @run.section("load")
    def load(path: str) -> str:
        """Read it."""
        assert opened(watch) == ("load",)
        return path

    @run.section("fetch")
    async def fetch(path: str) -> str:
        await turns()
        assert opened(watch) == ("fetch",)
        return path

    assert (load("a"), asyncio.run(fetch("b"))) == ("a", "b")
    assert load.__doc__ == "Read it."
    assert {one.count for one in watch.sections.values()} == {1}


def test_pauses_nest_and_end_when_the_last_one_does(watch: Watch, run: Session) -> None:
    with run.pause(reason="a debugger"):
        with run.pause(for_s=1):
            assert watch.reading.paused_until_s == 0, "the outer one has no end"
        assert watch.reading.pauses == 1
    assert watch.reading.pauses == 0
    _, paused, resumed = watch.messages
    assert paused == Paused(round=1, rank=0, reason="a debugger")
    assert resumed == Resumed(round=1, rank=0, step=0)


def test_the_later_end_of_two_pauses_counts(watch: Watch, run: Session) -> None:
    run.pause(for_s=1000)
    long = watch.reading.paused_until_s
    run.pause(for_s=10)
    assert watch.reading.paused_until_s == long
    run.resume()
    run.resume()
    assert not watch.is_paused
    run.resume()
    assert watch.misuses == 1


def test_a_pause_that_has_ended_by_itself_is_forgotten(watch: Watch, run: Session) -> None:
    with run.pause(for_s=0), run.pause():
        assert watch.reading.pauses == 1
    assert not watch.is_paused
    assert not watch.misuses


@pytest.mark.parametrize("for_s", [math.nan, -1, "x", [], 1j])
def test_a_pause_with_an_invalid_time_ends_only_by_resume(
    watch: Watch, run: Session, for_s: float
) -> None:
    with run.pause(for_s=for_s, reason=3):  # type: ignore[arg-type]
        assert watch.reading.paused_until_s == 0
        assert watch.is_paused
    with run.pause(for_s=math.inf):
        assert watch.reading.paused_until_s > 1e9
    assert len(watch.messages) == 5


def test_the_latest_value_is_shown(watch: Watch, run: Session) -> None:
    run.report("loss", 2.5)
    run.report("loss", 1.5)
    run.report("tokens", 10**15)
    run.report("日" * 20, 1)
    values = dict(watch.values)
    assert values == {"loss": 1.5, "tokens": 1e15, "日" * 9 + "…": 1.0}
    run.report("loss", math.nan)
    assert math.isnan(watch.values["loss"])


@pytest.mark.parametrize("value", [None, "x", [], 10**400, 1j])
def test_a_metric_that_is_not_a_number_is_not_shown(
    watch: Watch, run: Session, value: float
) -> None:
    run.report("loss", value)
    assert not watch.values
    assert watch.misuses == 1


def test_a_metric_on_a_gpu_is_refused_without_a_wait(watch: Watch, run: Session) -> None:
    class OnGpu:
        is_cuda = True

        def __float__(self) -> float:
            raise AssertionError("this would synchronise")

    run.report("loss", OnGpu())  # type: ignore[arg-type]
    assert not watch.values


def test_metrics_beyond_the_limit_are_not_shown(watch: Watch, run: Session) -> None:
    for number in range(30):
        run.report(f"value {number}", number)
        run.report("value 0", -number)
    assert len(watch.values) == layout.VALUES_MOST
    assert watch.values["value 0"] == -29


def test_the_training_is_asked_to_stop_after_a_step(watch: Watch, run: Session) -> None:
    watch.ask_to_stop(after_step=2)
    stops = []
    for _ in range(3):
        run.step()
        stops.append(run.should_stop)
    assert stops == [False, True, True]
    assert [one for one in watch.messages if isinstance(one, StopSeen)] == [
        StopSeen(round=1, rank=0, step=2)
    ]
    assert watch.reading.stop_seen_s > 0


def test_the_training_is_asked_to_save_after_one_step_only(watch: Watch, run: Session) -> None:
    watch.ask_to_save(after_step=2)
    saves = []
    for _ in range(4):
        saves.append(run.should_save)
        run.step()
    assert saves == [False, False, True, False]
    assert not run.should_stop


def test_the_training_can_be_asked_to_stop_at_once(watch: Watch, run: Session) -> None:
    assert int(watch.reading.listens) == 0
    assert not run.should_stop
    assert int(watch.reading.listens) == 1
    watch.ask_to_stop()
    assert run.should_stop


def test_a_request_is_passed_on(watch: Watch, run: Session) -> None:
    run.request("exclude", 'it says "no"')
    assert watch.messages[-1] == Requested(round=1, rank=0, kind="exclude", reason='it says "no"')


def test_the_end_of_the_session_ends_its_sections(watch: Watch, run: Session) -> None:
    with run:
        run.begin("epoch")
    assert not watch.open


def test_durations_before_the_first_step_are_not_typical(watch: Watch, run: Session) -> None:
    with run.section("compile"):
        pass
    run.begin("epoch")
    run.step()
    with run.section("late"):
        pass
    run.end("epoch")
    found = {one.name: one for one in watch._page.sections()}
    assert found["compile"].observed == 0
    assert found["compile"].longest_s == 0
    assert found["late"].longest_s > 0
    since_step_s = watch.reading.progress_s
    left_s = watch._page.lanes()[0].moved_s
    assert 0 < found["epoch"].longest_s <= left_s - since_step_s + 1e-6


def test_the_latest_durations_of_steps_are_known(watch: Watch, run: Session) -> None:
    run.step()
    assert watch._page.step_durations() == (), "the first has no beginning"
    for _ in range(100):
        run.step()
    took = watch._page.step_durations()
    assert len(took) == 64
    assert 0 < max(took) <= watch.reading.longest_step_s + 1e-6


def test_a_session_without_an_agent_warns_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a launcher every call works, and one line is printed (A1.4)."""
    from trainer_sdk.agent_lookup import own_link

    for _ in range(2):
        run = Session(own_link({"LOCAL_RANK": "0"}))
        with run.section("forward"):
            run.step()
        run.heartbeat()
        run.report("loss", 1.0)
        run.request("stop", "")
        with run.pause():
            assert not run.should_stop
        assert not run.is_watched
    own_link({"LOCAL_RANK": "1"})
    (line,) = capsys.readouterr().err.splitlines()
    assert "everstep run" in line
    monkeypatch.setattr(sdk_log, "_printed", set())
    monkeypatch.setattr(sys, "stderr", None)
    own_link({})
