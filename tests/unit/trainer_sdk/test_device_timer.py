"""Times of sections on the accelerator are measured by events, without a wait (A6.6)."""

import sys
from collections.abc import Iterator
from threading import Thread
from types import ModuleType, SimpleNamespace

import pytest

from everstep_services.agent.timings.window import RankPage, StepRange
from tests.fakes.cuda import Cuda, Stream
from trainer_sdk import layout, sdk_log
from trainer_sdk.device.device_timer import EACH_STEP, PAIRS_MOST
from trainer_sdk.page import BadPageError, PageView
from trainer_sdk.rank_session import Session, session
from trainer_sdk.sections import Section
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


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    cuda = Cuda()
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(sdk_log, "_printed", set())
    return cuda


def spend(run: Session, cuda: Cuda, name: str, ms: float = 0.0, times: int = 1) -> None:
    for _ in range(times):
        with run.section(name):
            cuda.run(ms)


def device_times(page: PageView, number: int, after: int = 0) -> tuple[int, tuple[float, ...]]:
    taken = page.take(0, {}, {}, {number: after})
    return taken.device_counts[number], tuple(round(one, 9) for one in taken.device_s[number])


def dropped(run: Session) -> int:
    timer = run._table.device
    assert timer is not None
    return timer.dropped


def test_times_are_read_once_the_accelerator_is_done_without_a_wait(
    run: Session, page: PageView, cuda: Cuda
) -> None:
    assert run.time_device()
    spend(run, cuda, "forward", 30.0)
    spend(run, cuda, "backward", 60.0)
    run.step()
    assert device_times(page, 1) == (0, ())
    cuda.done_ms = 30.0
    run.step()
    assert device_times(page, 1) == (1, (0.03,))
    assert device_times(page, 2) == (0, ())
    cuda.finish()
    run.step()
    assert device_times(page, 2) == (1, (0.06,))
    assert device_times(page, 1, 1) == (1, ()), "nothing twice"
    assert len(cuda.events) == 4
    spend(run, cuda, "forward", 1.0)
    assert len(cuda.events) == 4, "events are used again"


def test_nested_sections_and_threads_have_separate_times(
    run: Session, page: PageView, cuda: Cuda
) -> None:
    run.time_device()
    with run.section("outer"):
        spend(run, cuda, "inner", 10.0)
        cuda.run(5.0)
    thread = Thread(target=spend, args=(run, cuda, "inner", 20.0))
    thread.start()
    thread.join()
    cuda.finish()
    run.step()
    assert device_times(page, 1)[1] == (0.015,)
    assert device_times(page, 2)[1] == (0.01, 0.02)


def test_processor_and_accelerator_are_measured_at_once(
    run: Session, page: PageView, cuda: Cuda
) -> None:
    spend(run, cuda, "forward")
    run.time_device()
    page.time_cpu(is_wanted=True)
    run.step()
    spend(run, cuda, "forward", 1.0, 5)
    cuda.finish()
    page.time_cpu(is_wanted=False)
    run.step()
    spend(run, cuda, "forward", 1.0)
    cuda.finish()
    run.step()
    taken = page.take(0, {}, {}, {})
    assert taken.counts == {1: 7}
    assert taken.cpu_counts == {1: 1}
    assert taken.device_counts == {1: EACH_STEP + 1}, "a few of each step"


def test_unusual_sections_do_not_break_device_timing(
    run: Session, page: PageView, cuda: Cuda
) -> None:
    run.begin("open")
    run.time_device()
    run.begin("inside")
    run.end("open")
    for depth in range(layout.DEEPEST + 2):
        run.begin(f"deep {depth}")
    run.end_all()
    spend(run, cuda, "evaluation")
    run.end("open")
    cuda.finish()
    run.step()
    taken = page.take(0, {}, {}, {})
    assert set(taken.counts.values()) == {1}
    names = {number: page.section(number).name for number in taken.counts}
    unmeasured = {names[number] for number, count in taken.device_counts.items() if not count}
    assert unmeasured == {"open", "evaluation", "deep 16", "deep 17"}


def test_while_a_graph_is_captured_nothing_is_asked_or_recorded(
    run: Session, page: PageView, cuda: Cuda
) -> None:
    run.time_device()
    spend(run, cuda, "forward", 1.0)
    run.begin("capture")
    cuda.captures = True
    spend(run, cuda, "forward", 1.0)
    run.end("capture")
    run.step()
    cuda.captures = False
    with run.section("replay"):
        cuda.run(5.0)
    cuda.finish()
    run.step()
    taken = page.take(0, {}, {}, {})
    assert taken.counts == {1: 2, 2: 1, 3: 1}
    assert taken.device_counts == {1: 1, 2: 0, 3: 1}
    assert dropped(run) == 1, "what had begun before the capture"


def test_a_section_that_ends_on_another_stream_has_no_time(
    run: Session, page: PageView, cuda: Cuda
) -> None:
    run.time_device()
    for other in (Stream(0, 7), Stream(1)):
        run.begin("moves")
        cuda.stream = other
        run.end("moves")
        spend(run, cuda, "there", 2.0)
        cuda.stream = Stream()
    cuda.finish()
    run.step()
    assert page.take(0, {}, {}, {}).device_counts == {1: 0, 2: 2}
    assert dropped(run) == 2


def test_an_accelerator_that_lags_loses_times_and_takes_no_more_memory(
    run: Session, page: PageView, cuda: Cuda
) -> None:
    run.time_device()
    steps = PAIRS_MOST // EACH_STEP + 5
    for _ in range(steps):
        spend(run, cuda, "forward", 1.0, EACH_STEP)
        run.step()
    assert len(cuda.events) == 2 * PAIRS_MOST
    assert dropped(run) == 5 * EACH_STEP
    cuda.finish()
    run.step()
    first, _ = device_times(page, 1)
    assert 0 < first < PAIRS_MOST, "a bounded number a step"
    run.step()
    assert device_times(page, 1)[0] == PAIRS_MOST
    spend(run, cuda, "forward", 1.0)
    assert dropped(run) == 5 * EACH_STEP


@pytest.mark.parametrize("when", ["begin", "end", "step"])
def test_an_error_switches_the_timer_off_with_one_warning(
    run: Session, page: PageView, cuda: Cuda, when: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run.time_device()
    error = RuntimeError("CUDA error: an illegal\nmemory access")
    cuda.error = error if when == "begin" else None
    with run.section("forward"):
        cuda.error = error if when == "end" else cuda.error
    cuda.error = error if when == "step" else cuda.error
    for _ in range(3):
        run.step()
        spend(run, cuda, "forward")
    assert capsys.readouterr().err.count("\n") == 1
    assert page.take(0, {}, {}, {}).counts == {1: 4}
    assert type(run.section("forward")) is Section
    cuda.error = None
    assert not run.time_device(), "off for good"


@pytest.mark.parametrize("torch", [None, ModuleType("torch"), SimpleNamespace(cuda=Cuda(False))])
def test_without_initialised_cuda_it_is_not_begun(
    run: Session, torch: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert not run.time_device()
    assert type(run.section("forward")) is Section


def test_device_timing_needs_an_agent_and_ends_in_a_fork(run: Session, cuda: Cuda) -> None:
    assert run.time_device()
    run._detach()
    assert type(run.section("forward")) is Section
    assert not run.time_device()
    spend(run, cuda, "forward")
    run.step()
    assert not cuda.events


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf"), 1e300])
def test_absurd_times_and_counts_are_reported(
    run: Session, page: PageView, cuda: Cuda, seconds: float
) -> None:
    run.time_device()
    spend(run, cuda, "forward", 1.0)
    run.section("forward").take_device(seconds)
    with pytest.raises(BadPageError, match="it has a time of"):
        device_times(page, 1)
    at = layout.SECTIONS_AT + layout.SECTION_WORDS + layout.SECTION_DEVICE_COUNT
    run._words[at] = -2
    with pytest.raises(BadPageError, match="is -2"):
        device_times(page, 1)


def test_the_agent_makes_a_sketch_of_the_durations(run: Session, watch: Watch, cuda: Cuda) -> None:
    pages = RankPage()
    run.time_device()
    for step in range(1, 7):
        spend(run, cuda, "forward", 10.0 * step)
        with run.section("host"):
            pass
        cuda.finish()
        run.step()
        pages.take(watch._page, 6, float(step))
    whole, forward, host = pages.close(StepRange(1, 6)).sections
    assert (whole.device, host.device and host.device.sum_s) == (None, 0.0)
    assert forward.device is not None
    assert (forward.device.count, forward.device.max_s) == (6, 0.06)


@pytest.mark.gpu
def test_a_real_gpu_is_timed(run: Session, page: PageView) -> None:
    """By real events, with a CUDA graph, and without a wait (A6.6)."""
    torch = pytest.importorskip("torch")
    matrix = torch.randn(2048, 2048, device="cuda")
    assert run.time_device()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    with run.section("forward"):
        for _ in range(20):
            matrix = torch.tanh(matrix @ matrix)
    end.record()
    graph, static = torch.cuda.CUDAGraph(), matrix.clone()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph), run.section("capture"):
        torch.tanh(static @ static)
        run.step()
    with run.section("replay"):
        graph.replay()
    torch.cuda.synchronize()
    run.step()
    taken = page.take(0, {}, {}, {})
    assert taken.device_counts == {1: 1, 2: 0, 3: 1}
    (forward_s,), (replay_s,) = taken.device_s[1], taken.device_s[3]
    assert 0 < forward_s <= begin.elapsed_time(end) / 1e3
    assert replay_s > 0
    assert run._table.device is not None
