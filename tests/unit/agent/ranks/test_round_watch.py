"""Events come once, and in an order that makes sense, however what they tell of arrives."""

import asyncio
from pathlib import Path

import pytest
from msgspec.structs import replace

from everstep_services.agent.ranks.protocol import RankGone, RankRuns, ScriptEnded, WardenEvent
from everstep_services.agent.ranks.round_watch import RoundWatch
from trainer_sdk import layout
from trainer_sdk.bootstrap.agent_link import map_page
from trainer_sdk.page import make_page
from trainer_sdk.wire import Gone, Resumed, ScriptFinished, Spawned, Stepped, Up, WireLine, encode


@pytest.fixture
def watch(tmp_path: Path) -> RoundWatch:
    watched = RoundWatch(asyncio.Queue())
    watched.begin(4, now=100.0)
    watched.add(0, tmp_path, make_page(str(tmp_path / "page")))
    return watched


def say(watch: RoundWatch, line: WireLine, now: float) -> None:
    watch.on_datagram(encode(line), now)


def events(watch: RoundWatch) -> list[WardenEvent]:
    queue = watch._events
    return [queue.get_nowait() for _ in range(queue.qsize())]


SPAWNED = Spawned(round=4, rank=0, pid=9, start="warm")
GONE = Gone(round=4, rank=0, pid=9, code=None, signal=64, core_dumped=False, lasted_s=1.0)


def test_a_rank_that_speaks_before_its_warden_did_is_told_afterwards(watch: RoundWatch) -> None:
    say(watch, Up(round=4, rank=0, pid=9), now=101.0)
    say(watch, Stepped(round=4, rank=0, step=1), now=102.0)
    say(watch, ScriptFinished(round=4, rank=0, code=0), now=103.0)
    assert events(watch) == []
    watch.spawned(SPAWNED, now=100.5)
    assert events(watch) == [
        RankRuns(4, 0, 9, "warm", 1.0),
        Stepped(round=4, rank=0, step=1),
        ScriptEnded(4, 0, 0),
    ]


def test_a_rank_that_speaks_without_end_before_that_fills_no_memory(watch: RoundWatch) -> None:
    for number in range(10_000):
        say(watch, Resumed(round=4, rank=0, step=number), now=1.0)
    watch.spawned(SPAWNED, now=100.5)
    assert 0 < len(events(watch)) < 100


def test_a_script_that_is_over_before_the_ranks_are_told_to_end_was_not_told(
    watch: RoundWatch, tmp_path: Path
) -> None:
    watch.spawned(SPAWNED, now=100.5)
    failed = ScriptFinished(round=4, rank=0, code=1, error=True)
    say(watch, failed, now=101.0)
    watch.ordered_to_end()
    say(watch, failed, now=102.0)
    ends = [event for event in events(watch) if isinstance(event, ScriptEnded)]
    assert [event.was_told for event in ends] == [False, True]
    watch.begin(5, now=103.0)
    watch.add(0, tmp_path, make_page(str(tmp_path / "next page")))
    watch.spawned(replace(SPAWNED, round=5), now=103.5)
    say(watch, replace(failed, round=5), now=104.0)
    (end,) = [event for event in events(watch) if isinstance(event, ScriptEnded)]
    assert not end.was_told


@pytest.mark.parametrize("last", [ScriptFinished(round=4, rank=0, code=1, error=True), GONE])
def test_a_rank_is_at_work_from_its_start_until_its_script_or_its_process_has_ended(
    watch: RoundWatch, last: ScriptFinished | Gone
) -> None:
    before = watch.are_at_work
    watch.spawned(SPAWNED, now=100.5)
    meanwhile = watch.are_at_work
    if isinstance(last, Gone):
        watch.gone(last, now=101.0)
    else:
        say(watch, last, now=101.0)
    assert (before, meanwhile, watch.are_at_work) == (True, True, False)


def test_nothing_is_told_twice(watch: RoundWatch) -> None:
    watch.spawned(SPAWNED, now=100.5)
    for now in (101.0, 102.0):
        say(watch, Up(round=4, rank=0, pid=9), now=now)
        watch.look(now)
    assert events(watch) == [RankRuns(4, 0, 9, "warm", 1.0)]


def test_a_first_step_is_known_from_a_page_that_is_steps_further(
    watch: RoundWatch, tmp_path: Path
) -> None:
    """Its datagram is on its way, or was dropped: what the rank counts tells where it began."""
    page = tmp_path / "far"
    view = make_page(str(page))
    watch.begin(5, now=103.0)
    watch.add(0, tmp_path, view)
    words = map_page(str(page))
    for word, value in ((layout.PHASE, layout.PHASE_SCRIPT), (layout.PID, 9), (layout.STEP, 12),
                        (layout.STEPS, 12), (layout.FIRST_STEP_NS, 1)):  # fmt: skip
        words[word] = value
    words[layout.MAGIC_AT] = layout.MAGIC
    watch.spawned(replace(SPAWNED, round=5), now=103.5)
    watch.look(104.0)
    assert [event.step for event in events(watch) if isinstance(event, Stepped)] == [1]


def test_other_rounds_other_ranks_and_noise_are_not_heard(watch: RoundWatch) -> None:
    watch.spawned(SPAWNED, now=100.5)
    say(watch, Up(round=3, rank=0, pid=9), now=101.0)
    say(watch, Up(round=4, rank=1, pid=9), now=101.0)
    for noise in (b"", b"{}", b'{"type":"up"}', b"\xff"):
        watch.on_datagram(noise, 101.0)
    assert events(watch) == []
    assert watch.bad_datagrams == 4


@pytest.mark.parametrize(
    "fields",
    [
        '"type":"deferred","number":0',
        '"type":"deferred","number":1000',
        f'"type":"deferred","number":{2**70}',
        '"type":"up","pid":-1',
        f'"type":"up","pid":{2**70}',
        f'"type":"stepped","step":{2**63}',
        '"type":"ended","code":1e300',
        '"type":"hung","limit_s":0',
        '"type":"hung","limit_s":1e308',
        '"type":"paused","for_s":1e308',
        '"type":"restarted","reason":"","waited_s":-1e308,"took_s":0',
        '"type":"restarted","reason":"","waited_s":0,"took_s":0,"lost":[-1]',
    ],
)
def test_numbers_that_no_rank_has_go_no_further(watch: RoundWatch, fields: str) -> None:
    """A process of the job, or a rank in another's name, may send any: the warden died of one."""
    told: list[tuple[int, int]] = []
    watch._deferred = lambda rank, number: told.append((rank, number))
    watch.spawned(SPAWNED, now=100.5)
    watch.on_datagram(f'{{{fields},"round":4,"rank":0}}'.encode(), 101.0)
    assert (events(watch), told, watch.bad_datagrams) == ([], [], 1)


def test_a_signal_without_a_name_has_its_number(watch: RoundWatch) -> None:
    watch.spawned(SPAWNED, now=100.5)
    watch.gone(GONE, now=102.0)
    assert events(watch) == [RankGone(4, 0, 9, None, "SIGRTMAX", False, 1.0)]


async def test_a_program_without_a_bootstrap_runs_as_soon_as_it_exists(tmp_path: Path) -> None:
    watched = RoundWatch(asyncio.Queue(), is_silent=True)
    watched.begin(4, now=100.0)
    watched.add(0, tmp_path, make_page(str(tmp_path / "page")))
    watched.spawned(SPAWNED, now=100.5)
    assert events(watched) == [RankRuns(4, 0, 9, "warm", 0.5)]


def test_a_parked_rank_is_of_no_round_until_it_goes_on(watch: RoundWatch, tmp_path: Path) -> None:
    """Its old page stands still, which is not a stall of the round that is about to begin."""
    watch.spawned(SPAWNED, now=100.5)
    watch.parked((0,))
    before = watch.rank(0)
    assert before is not None
    assert before.gone
    watch.begin(5, now=110.0)
    watch.add(0, tmp_path, make_page(str(tmp_path / "page")))
    watch.spawned(replace(SPAWNED, round=5, start="kept"), now=110.5)
    after = watch.rank(0)
    assert after is not None
    assert not after.gone
