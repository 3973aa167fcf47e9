"""Torch compiles in the middle of a training: it takes as long as it takes, and is not a stall."""

import importlib.util
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from everstep.messages import LimitsDocument, SectionLimit
from everstep_services.agent.settings import AgentSettings
from everstep_services.agent.stalls.limits import LimitRules
from tests.unit.agent.stalls.monitored_ranks import WatchedNode
from tests.unit.agent.stalls.stalled_ranks import Clock, clock_of_pages
from trainer_sdk import layout
from trainer_sdk.bootstrap import compilation
from trainer_sdk.bootstrap.agent_link import AgentLink
from trainer_sdk.bootstrap.import_hook import watch_compiling, when_imported

LEARNED = LimitsDocument(
    job="j",
    limits=(
        SectionLimit(section="forward", limit_s=120, source="floor"),
        SectionLimit(section="exchange", limit_s=120, source="floor"),
        SectionLimit(section="", limit_s=120, source="floor"),
    ),
    first_step_limit_s=3600,
    first_step_longest_s=60,
    config_fingerprint="",
    reason="",
)


@pytest.fixture
def clock() -> Iterator[Clock]:
    clock = Clock()
    with clock_of_pages(clock):
        yield clock


def learned(folder: Path, clock: Clock, ranks: int) -> WatchedNode:
    """Ranks that have made their first steps; what is typical of them was learned."""
    node = WatchedNode(folder, clock, LimitRules(), ranks)
    node.watch.learned(LEARNED)
    for rank in node.ranks:
        rank.run.step()
    return node


@pytest.fixture
def node(tmp_path: Path, clock: Clock) -> WatchedNode:
    return learned(tmp_path, clock, 1)


@pytest.fixture
def pair(tmp_path: Path, clock: Clock) -> WatchedNode:
    return learned(tmp_path, clock, 2)


def found(node: WatchedNode) -> list[tuple[int, str, str | None, float]]:
    places = [one.place for one in node.stalled]
    return [(one.rank, one.phase, one.section, one.limit.s) for one in places]


def test_a_rank_that_compiles_has_the_time_of_a_first_step(node: WatchedNode) -> None:
    (first,) = node.ranks
    first.run.begin("forward")
    node.wait(100)
    compilation.show_begin(first.link)
    node.wait(3599)
    assert found(node) == []
    compilation.show_end(first.link)
    node.wait(119)  # from then on the section has its own limit again, from its beginning
    assert found(node) == []
    node.wait(2)
    assert found(node) == [(0, "section", "forward", 120)]


def test_a_compilation_that_hangs_is_found(node: WatchedNode) -> None:
    (first,) = node.ranks
    first.run.begin("forward")
    compilation.show_begin(first.link)
    node.wait(3601)
    assert found(node) == [(0, "compile", "forward", 3600)]


def test_without_a_compilation_the_learned_limit_holds(node: WatchedNode) -> None:
    node.ranks[0].run.begin("forward")
    node.wait(121)
    assert found(node) == [(0, "section", "forward", 120)]


def test_who_waits_for_a_rank_that_compiles_has_not_stalled(pair: WatchedNode) -> None:
    first, other = pair.ranks
    other.run.begin("exchange")
    pair.wait(60)
    first.run.begin("forward")
    compilation.show_begin(first.link)
    pair.wait(3000)
    assert found(pair) == []


def test_another_thread_may_wait_for_the_one_that_compiles(node: WatchedNode) -> None:
    (first,) = node.ranks
    first.run.begin("exchange")  # as the thread that brings data would: any open section counts
    first.run.begin("forward")
    compilation.show_begin(first.link)
    node.wait(3000)
    assert found(node) == []


def test_a_compilation_before_the_first_step_has_no_less_time(tmp_path: Path, clock: Clock) -> None:
    node = WatchedNode(tmp_path, clock, LimitRules(AgentSettings(first_step_limit_s=600)), 1)
    (rank,) = node.ranks
    assert rank.run.steps_made == 0
    node.wait(500)
    compilation.show_begin(rank.link)
    node.wait(599)
    assert found(node) == []
    node.wait(2)
    assert found(node) == [(0, "compile", None, 600)]


class Processes:
    """What the kernel says of processes, as a test has it."""

    def __init__(self, proc: Path) -> None:
        self._proc = proc

    def use(self, pid: int, ticks: int, *, parent: int = 1, of_children: int = 0) -> None:
        folder = self._proc / str(pid)
        folder.mkdir(parents=True, exist_ok=True)
        zeros = "0 " * 9
        (folder / "stat").write_text(f"{pid} (a (b)) S {parent} {zeros}{ticks} 0 {of_children} 0")

    def end(self, pid: int) -> None:
        shutil.rmtree(self._proc / str(pid))


@pytest.fixture
def processes(pair: WatchedNode) -> Processes:
    """A pair: rank 0 compiles and rank 1 waits for it; each has a child."""
    made = Processes(pair.proc)
    for rank in (100, 101):
        made.use(rank, 5000)
        made.use(rank + 1000, 700, parent=rank)
    pair.ranks[1].run.begin("exchange")
    pair.wait(1)
    pair.ranks[0].run.begin("forward")
    compilation.show_begin(pair.ranks[0].link)
    return made


TICKS = os.sysconf("SC_CLK_TCK")
WINDOW_S = 360  # three times the section's limit
STEP_S = 5


def watch(node: WatchedNode, seconds: float, each: Callable[[float], None]) -> None:
    """Let time pass and look closer; `each` is called with the seconds that have passed."""
    for passed in range(0, int(seconds), STEP_S):
        each(passed)
        node.wait(STEP_S)
        node.watch._closer._compilers.look(node.watch._compiling())
    node.wait(STEP_S)


def nothing(passed: float) -> None:
    """It computes nothing."""


def test_a_compilation_that_computes_nothing_has_hung(
    pair: WatchedNode, processes: Processes
) -> None:
    watch(pair, 120 + WINDOW_S - 2 * STEP_S, nothing)
    assert found(pair) == []
    watch(pair, 4 * STEP_S, nothing)
    assert found(pair)[0] == (0, "compile", "forward", 120)


@pytest.mark.parametrize("pid", [100, 1100], ids=["itself", "below it"])
def test_a_compilation_that_computes_has_its_time(
    pair: WatchedNode, processes: Processes, pid: int
) -> None:
    def compute(passed: float) -> None:
        processes.use(pid, int(5000 + 0.03 * passed * TICKS), parent={100: 1, 1100: 100}[pid])

    watch(pair, 3000, compute)
    assert found(pair) == []


def test_what_children_have_used_counts_when_they_have_ended(
    pair: WatchedNode, processes: Processes
) -> None:
    def compute(passed: float) -> None:
        processes.use(1100, 700, parent=100, of_children=int(0.03 * passed * TICKS))

    watch(pair, 3000, compute)
    assert found(pair) == []


def test_time_begins_anew_with_the_end_of_a_child_and_where_nobody_looked(
    pair: WatchedNode, processes: Processes
) -> None:
    watch(pair, 400, nothing)
    processes.end(1100)
    watch(pair, WINDOW_S - 20, nothing)
    assert found(pair) == []
    pair.clock.now += 100
    watch(pair, WINDOW_S - 20, nothing)
    assert found(pair) == []
    watch(pair, 60, nothing)
    assert found(pair)[0][:2] == (0, "compile")


def test_another_rank_that_compiles_and_computes_may_be_what_it_waits_for(
    pair: WatchedNode, processes: Processes
) -> None:
    compilation.show_begin(pair.ranks[1].link)

    def compute(passed: float) -> None:
        processes.use(101, int(5000 + 0.03 * passed * TICKS))

    watch(pair, 3000, compute)
    assert found(pair) == []


def test_nobody_is_looked_at_before_its_ordinary_limit(
    pair: WatchedNode, processes: Processes
) -> None:
    pair.wait(119)
    assert pair.watch._compiling() == {}
    pair.wait(6)
    assert set(pair.watch._compiling()) == {0}
    compilation.show_end(pair.ranks[0].link)
    pair.wait(6)
    assert pair.watch._compiling() == {}


def test_nothing_is_learned_from_a_compilation(node: WatchedNode, clock: Clock) -> None:
    run = node.ranks[0].run
    for compiles in (True, False):
        with run.section("forward"):
            clock.now += 1
            if compiles:
                compilation.show_begin(node.ranks[0].link)
                clock.now += 600
                compilation.show_end(node.ranks[0].link)
            clock.now += 2
        if compiles:
            compilation.show_begin(node.ranks[0].link)
            clock.now += 300
            compilation.show_end(node.ranks[0].link)
        clock.now += 4
        run.step()
    longest = {one.section: one.longest_s for one in node.watch.sections_seen()}
    assert longest == {"forward": pytest.approx(3), "": pytest.approx(4)}


# -- how torch reports it ------------------------------------------------------------------------


@pytest.fixture
def callbacks(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Torch's own module, without the rest of torch."""
    torch = importlib.util.find_spec("torch")
    assert torch is not None
    assert torch.submodule_search_locations
    path = Path(torch.submodule_search_locations[0]) / "_dynamo" / "callback.py"
    spec = importlib.util.spec_from_file_location("torch._dynamo.callback", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def state(link: AgentLink) -> tuple[bool, bool]:
    """Whether it compiles, and whether it ever has."""
    return link.words[layout.COMPILING_NS] > 0, link.words[layout.COMPILED_NS] > 0


def fail() -> None:
    raise RuntimeError("the graph cannot be compiled")


@pytest.mark.parametrize("inside", [fail, lambda: None], ids=["fails", "ends"])
def test_torch_says_when_it_compiles(callbacks: Any, inside: Callable[[], None]) -> None:
    link, handler = AgentLink({}), callbacks.callback_handler
    watch_compiling(link)

    def compiles() -> AbstractContextManager[None]:
        made: AbstractContextManager[None] = handler.install_callbacks(
            callbacks.CallbackTrigger.DYNAMO, "0"
        )
        return made

    assert state(link) == (False, False)
    with compiles():
        assert state(link) == (True, False)
        with pytest.raises(RuntimeError) if inside is fail else compiles(), compiles():
            inside()
        assert state(link) == (True, False), "the end of an inner one is not the end"
    assert state(link) == (False, True)


def test_torch_says_so_after_a_reset_too(callbacks: Any) -> None:
    link, handler = AgentLink({}), callbacks.callback_handler
    watch_compiling(link)
    handler.clear()
    assert (len(handler.start_callbacks), len(handler.end_callbacks)) == (1, 1)
    with handler.install_callbacks(callbacks.CallbackTrigger.LAZY_BACKWARD, "1"):
        assert state(link) == (True, False)
        with pytest.raises(AssertionError):
            handler.clear()
    assert state(link) == (False, True)


def test_a_fork_of_a_rank_does_not_say_that_it_compiles(callbacks: Any) -> None:
    link, handler = AgentLink({}), callbacks.callback_handler
    page = link.words
    watch_compiling(link)
    link.detach()  # as in the child
    with handler.install_callbacks(callbacks.CallbackTrigger.DYNAMO, "2"):
        assert state(link) == (True, False)
        assert page[layout.COMPILING_NS] == 0


def test_another_release_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch._dynamo.callback", ModuleType("callback"))
    watch_compiling(AgentLink({}))


def test_a_module_is_noticed_when_its_body_has_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "comes_later.py").write_text("there = True\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "comes_later", raising=False)
    before, noticed = list(sys.meta_path), []
    when_imported("comes_later", lambda: noticed.append("first"))
    when_imported("comes_later", lambda: noticed.append(sys.modules["comes_later"].there))
    try:
        assert noticed == []
        importlib.import_module("comes_later")
        assert noticed == ["first", True]
        assert sys.meta_path == before
        when_imported("comes_later", lambda: noticed.append("again"))
        assert noticed == ["first", True, "again"]
    finally:
        sys.modules.pop("comes_later", None)
