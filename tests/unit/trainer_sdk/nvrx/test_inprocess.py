"""The parts of NVRx's in-process restart that need no other rank: numbers, plugins, interrupts."""

import datetime
import json
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.e2e.ports import free_port
from tests.unit.trainer_sdk.script_ranks import RANK, ROUND, script_rank
from trainer_sdk.nvrx import aliases
from trainer_sdk.nvrx.inprocess import plugins
from trainer_sdk.nvrx.inprocess.compose import Compose
from trainer_sdk.nvrx.inprocess.interruption import Interruptible, RankShouldRestart
from trainer_sdk.nvrx.inprocess.iteration_store import BarrierTimeout, IterationStore
from trainer_sdk.nvrx.inprocess.plugins import (
    FaultCounter,
    FaultCounterExceeded,
    Initialize,
    RetryController,
    ThreadedFinalize,
)
from trainer_sdk.nvrx.inprocess.rank_assignment import (
    ActivateAllRanks,
    ActiveWorldSizeDivisibleBy,
    FillGaps,
    FilterCountGroupedByKey,
    Layer,
    LayerFlag,
    MaxActiveWorldSize,
    RankAssignment,
    RankAssignmentCtx,
    RankDiscarded,
    ShiftRanks,
    Tree,
)
from trainer_sdk.nvrx.inprocess.state import FrozenState, Mode, RestartAbort, State
from trainer_sdk.nvrx.inprocess.state import TimeoutError as PluginTimeoutError
from trainer_sdk.nvrx.inprocess.wrapper import Wrapper
from trainer_sdk.wire import Hung, Restarted

WITHIN_S = 60.0
RESTARTING = Path(__file__).parents[3] / "integration/nvrx/scripts/restarting.py"
RESERVE, BACKFILL = LayerFlag.RESERVE, LayerFlag.BACKFILL


def store_of(world_size: int) -> IterationStore:
    return IterationStore(dist.HashStore(), "test", world_size)  # type: ignore[attr-defined]


def assigned(
    make: Callable[[], RankAssignment], world_size: int, *losses: set[int]
) -> list[int | str]:
    """For each initial rank its active number, `waits`, or `lost`, after these losses in turn."""
    ranks = {rank: (make(), State(rank, world_size)) for rank in range(world_size)}
    left = dict(ranks)
    for lost in [set[int](), *losses]:
        shared = store_of(max(1, len(left)))
        together: dict[int, State | None] = {}

        threads = [
            threading.Thread(
                target=assign,
                args=(initial, assignment, RankAssignmentCtx(state, shared, set(lost)), together),
            )
            for initial, (assignment, state) in left.items()
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WITHIN_S)
        left = {
            initial: (left[initial][0], state)
            for initial, state in together.items()
            if state is not None
        }
    return ["lost" if rank not in left else number(left[rank][1]) for rank in range(world_size)]


def assign(
    initial: int,
    assignment: RankAssignment,
    context: RankAssignmentCtx,
    into: dict[int, State | None],
) -> None:
    try:
        into[initial] = assignment(context).state
    except RankDiscarded:
        into[initial] = None


def number(state: State) -> int | str:
    if state.mode is Mode.INACTIVE:
        return "waits"
    assert state.active_rank is not None
    return state.active_rank


def composed(*parts: Any) -> Callable[[], Any]:
    return lambda: Compose(*(part() for part in parts))


LOST = {1, 4, 5}


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (composed(ActivateAllRanks, ShiftRanks), [0, "lost", 1, 2, "lost", "lost", 3, 4]),
        (composed(ActivateAllRanks, FillGaps), [0, "lost", 2, 3, "lost", "lost", 1, 4]),
        (
            composed(lambda: MaxActiveWorldSize(3), ShiftRanks),
            [0, "lost", 1, 2, "lost", "lost", "waits", "waits"],
        ),
        (
            composed(lambda: ActiveWorldSizeDivisibleBy(2), ShiftRanks),
            [0, "lost", 1, 2, "lost", "lost", 3, "waits"],
        ),
    ],
)
def test_ranks_get_numbers_after_a_loss(make: Callable[[], Any], expected: list[int | str]) -> None:
    """The examples of NVRx's documentation: 8 ranks, of which 1, 4 and 5 are lost."""
    assert assigned(make, 8, LOST) == expected


def test_groups_that_are_too_small_are_excluded() -> None:
    def make() -> Any:
        in_pairs = FilterCountGroupedByKey(
            lambda state: str((state.initial_rank or 0) // 2), lambda count: count == 2
        )
        in_pairs.name = "pairs"  # each rank has an object of its own in this test
        return Compose(ActivateAllRanks(), ShiftRanks(), in_pairs)

    lost = "lost"
    assert assigned(make, 8, LOST) == [lost, lost, 0, 1, lost, lost, 2, 3]


def tree(*layers: Layer, **options: Any) -> Callable[[], Tree]:
    return lambda: Tree(list(layers), **options)


def host(state: State) -> str:
    return str((state.initial_rank or 0) // 4)


def test_a_tree_replaces_a_lost_rank_by_one_that_waits_on_the_same_host() -> None:
    make = tree(
        Layer(key_or_fn="all", max_ranks=6, flag=RESERVE),
        Layer(key_or_fn=host, max_ranks=3, flag=RESERVE),
    )
    assert assigned(make, 8) == [0, 1, 2, "waits", 3, 4, 5, "waits"]
    assert assigned(make, 8, {0}) == ["lost", 1, 2, 0, 3, 4, 5, "waits"]
    assert assigned(make, 8, {0, 1}) == ["lost", "lost", 2, 0, 3, 4, 5, 1]
    assert assigned(make, 8, {0}, {0, 1}) == ["lost", "lost", "lost", 0, 2, 3, 4, 1]


def test_a_tree_excludes_a_host_with_too_few_ranks_and_closes_the_gaps() -> None:
    make = tree(Layer(key_or_fn="all"), Layer(key_or_fn=host, min_ranks=4))
    lost = "lost"
    assert assigned(make, 12, {5}) == [0, 1, 2, 3, lost, lost, lost, lost, 4, 5, 6, 7]
    make = tree(Layer(key_or_fn="all", min_ranks=8), Layer(key_or_fn=host, min_ranks=4))
    assert assigned(make, 8, {5}) == [lost] * 8


def test_a_tree_backfills_on_the_host_and_lowers_the_number_of_ranks() -> None:
    make = tree(Layer(key_or_fn="all"), Layer(key_or_fn=host, flag=BACKFILL))
    assert assigned(make, 8, {1}) == [0, "lost", 2, 1, 3, 4, 5, 6]
    make = tree(Layer(key_or_fn="all"), world_size_filter=lambda size: size // 4 * 4)
    assert assigned(make, 6) == [0, 1, 2, 3, "waits", "waits"]


def test_a_tree_needs_a_single_root() -> None:
    with pytest.raises(RuntimeError, match="same key at the first layer"):
        shared = store_of(2)
        shared.put("place/1", '[1, ["b"]]')
        Tree([Layer(key_or_fn="a")])(RankAssignmentCtx(State(0, 2), shared, set()))


def frozen(**fields: Any) -> FrozenState:
    return State(**({"rank": 0, "world_size": 4, "active_world_size": 4} | fields)).freeze()


def test_compose_calls_from_last_to_first_and_is_of_the_shared_kind() -> None:
    calls: list[str] = []

    class Noting(Initialize):
        def __init__(self, name: str) -> None:
            self.name = name

        def __call__(self, state: FrozenState) -> FrozenState:
            calls.append(self.name)
            return state

    both: Any = Compose(Noting("a"), Compose(Noting("b"), RetryController(3)))
    assert isinstance(both, Initialize)
    assert not isinstance(both, plugins.Abort)
    state = frozen()
    assert both(state) is state
    assert calls == ["b", "a"]


@pytest.mark.parametrize(
    ("limits", "fields"),
    [
        ({"max_iterations": 3}, {"iteration": 3}),
        ({"min_world_size": 5}, {}),
        ({"min_active_world_size": 3}, {"active_world_size": 2}),
    ],
)
def test_retries_end_past_a_limit(limits: Any, fields: Any) -> None:
    RetryController(**limits)(frozen(iteration=2, world_size=5))
    with pytest.raises(RestartAbort):
        RetryController(**limits)(frozen(**fields))


def test_faults_of_a_rank_are_counted() -> None:
    check = FaultCounter(1)
    check(frozen())
    check(frozen(fn_exception=ValueError()))
    with pytest.raises(FaultCounterExceeded, match="has failed 2 times"):
        check(frozen(fn_exception=ValueError()))


def test_a_threaded_finalize_raises_what_it_raises_and_ends_in_time() -> None:
    second = datetime.timedelta(seconds=WITHIN_S)
    assert ThreadedFinalize(second, lambda: None)(frozen()) == frozen()
    with pytest.raises(ZeroDivisionError):
        ThreadedFinalize(second, lambda: 1 / 0)(frozen())
    waits = threading.Event()
    with pytest.raises(PluginTimeoutError, match=r"was not done after 0\.01 s"):
        ThreadedFinalize(datetime.timedelta(seconds=0.01), waits.wait)(frozen())
    waits.set()


def test_a_function_is_interrupted_however_it_resists() -> None:
    interruptible, started, swallowed = Interruptible(), threading.Event(), [0]

    def function() -> None:
        while True:
            try:
                started.set()
                while True:
                    threading.Event().wait(0.001)
            except BaseException:
                swallowed[0] += 1
                if swallowed[0] == 3:
                    raise

    def interrupt() -> None:
        started.wait(WITHIN_S)
        with interruptible.atomic_lock:
            interruptible.interrupt()

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(RankShouldRestart):
        interruptible.call(function)
    thread.join(WITHIN_S)
    assert not thread.is_alive()
    assert swallowed == [3]


def test_nothing_is_raised_after_the_function() -> None:
    interruptible = Interruptible()
    assert interruptible.call(lambda: 5) == 5
    interruptible.interrupt()  # returns at once: the function is over


def test_a_barrier_counts_each_rank_once_and_ends() -> None:
    ranks = store_of(2)
    ranks.arrive("again", 0)
    ranks.arrive("again", 0)
    with pytest.raises(BarrierTimeout, match="1 of 2 ranks came to the barrier again"):
        ranks.wait("again", 0.01)
    ranks.arrive("again", 1)
    ranks.wait("again", WITHIN_S)


def test_losses_and_interruptions_are_seen_by_all() -> None:
    ranks = store_of(2)
    assert not ranks.is_interrupted()
    ranks.lose(1)
    ranks.interrupt(1, "TERMINATED")
    assert ranks.is_interrupted()
    assert ranks.interruptions() == [(1, "TERMINATED")]
    assert ranks.lost() == {1}


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"initialize": FaultCounter()}, "initialize must be a Initialize, and is"),
        ({"soft_timeout": 60}, "soft_timeout must be a timedelta, and is 60"),
        (
            {"soft_timeout": datetime.timedelta(seconds=95)},
            "soft_timeout must be shorter than hard_timeout, and they are 95 s and 90 s",
        ),
        ({"monitor_process_logfile": "log"}, "must be an absolute path, and is log"),
    ],
)
def test_wrong_parameters_are_refused_in_one_line(given: Any, error: str) -> None:
    with pytest.raises((TypeError, ValueError), match=error):
        Wrapper(**given)


def test_a_wrapper_that_is_off_leaves_the_function_as_it_is() -> None:
    def function() -> None:
        """Nothing."""

    assert Wrapper(enabled=False)(function) is function


def test_the_first_rank_waits_for_those_that_train_on_and_not_for_the_dead() -> None:
    """Rank 1 and its monitor are gone: it never comes; rank 2 trains on for a while."""
    shared, looks = store_of(3), 0

    def train_on() -> None:
        nonlocal looks
        looks += 1
        if looks <= 3:
            shared.beat()

    shared.arrive("end", 0)
    with pytest.raises(BarrierTimeout, match="1 of 3 ranks came to the barrier end"):
        shared.wait_for_the_living("end", 0.0, 3, train_on)
    assert looks == 4, "as long as anybody beats"
    shared.arrive("end", 1)
    shared.arrive("end", 2)
    shared.wait_for_the_living("end", 0.0, 3)


@pytest.mark.parametrize("flag", [RESERVE, BACKFILL])
def test_a_tree_looks_at_each_rank_once_a_layer_however_many_are_lost(flag: LayerFlag) -> None:
    size, layers, looked = 512, 3, 0

    class Counting(Tree):
        def _in(self, place: tuple[str, ...], mode: Any) -> Any:
            nonlocal looked
            looked += len(self._by_place[place])
            return super()._in(place, mode)

    shared = store_of(size)
    for rank in range(1, size):
        shared.put(f"place/{rank}", json.dumps([rank, ["all", str(rank // 64), str(rank // 8)]]))
    tree = Counting([
        Layer(key_or_fn="all", flag=flag), Layer(key_or_fn="0", max_ranks=48, flag=flag),
        Layer(key_or_fn="0", flag=flag),
    ])  # fmt: skip
    found = tree(RankAssignmentCtx(State(0, size), shared, set(range(1, size, 4))))
    assert found.state.world_size == size * 3 // 4
    assert 0 < looked <= layers * size


HANGS = """
import time
from datetime import timedelta
from trainer_sdk.nvrx.inprocess.state import State
from trainer_sdk.nvrx.inprocess.watch import MonitorLink
from trainer_sdk.nvrx.inprocess.wrapper import Wrapper
soon = timedelta(seconds=0.1)
wrapper = Wrapper(
    monitor_process_interval=soon, monitor_thread_interval=soon, progress_watchdog_interval=soon,
    soft_timeout=2 * soon, hard_timeout=4 * soon,
)
MonitorLink(wrapper, State(3, 4), None)
time.sleep(1000)
"""


def test_the_monitor_tells_the_agent_before_it_ends_a_rank(tmp_path: Path) -> None:
    """Otherwise nobody would know that it was no scheduler."""
    with script_rank(tmp_path) as rank, rank.start("-c", HANGS) as process:
        _, err = process.communicate(timeout=WITHIN_S)
        assert process.returncode == -signal.SIGTERM
        assert "everstep: rank 3 has stood still" in err
        assert rank.messages()[1:] == [Hung(round=ROUND, rank=RANK, limit_s=0.4)]


FREED = HANGS.replace("MonitorLink(", "monitor = MonitorLink(").replace(
    "time.sleep(1000)", '''
import signal
signal.signal(signal.SIGTERM, lambda *_: (monitor.send("left"), monitor.send("pause")))
signal.pause()
monitor.close()
''')  # fmt: skip


def test_the_monitor_leaves_a_rank_alone_that_its_signal_has_freed(tmp_path: Path) -> None:
    """All ranks restart then: a kill some seconds later would end their training again."""
    with script_rank(tmp_path) as rank, rank.start("-c", FREED) as process:
        assert process.wait(WITHIN_S) == 0
        hung = Hung(round=ROUND, rank=RANK, limit_s=0.4)
        freed = Hung(round=ROUND, rank=RANK, limit_s=0.4, is_over=True)
        assert rank.messages()[1:] == [hung, freed]


def test_the_first_rank_that_interrupts_reports_the_restart_to_its_agent(tmp_path: Path) -> None:
    with script_rank(tmp_path) as rank:
        rank.environ |= {
            "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()), "PYTHONPATH": aliases.FOLDER,
        }  # fmt: skip
        with rank.start(str(RESTARTING), "2") as process:
            assert process.wait(WITHIN_S) == 0
        restarts = [told for told in rank.messages() if isinstance(told, Restarted)]
    assert [told.reason for told in restarts] == ["raised RuntimeError: again"] * 2
    assert {told.error_name for told in restarts} == {"RuntimeError"}
    assert all(told.waited_s == 0 < told.took_s for told in restarts)


def test_the_first_interruption_is_the_reason() -> None:
    store = store_of(3)
    store.interrupt(2, "SOFT_TIMEOUT")
    store.interrupt(1, "EXCEPTION")
    assert store.first_to_interrupt() == 2
