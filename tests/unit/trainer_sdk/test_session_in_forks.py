"""Real threads, forks and spawned processes of a rank."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.trainer_sdk.script_ranks import RANK, ROUND, ScriptRank, script_rank
from trainer_sdk.page_content import CountedBy
from trainer_sdk.wire import Stepped, Up

BEGIN = "import os, sys, threading, trainer_sdk\nrun = trainer_sdk.session()\n"


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[ScriptRank]:
    with script_rank(tmp_path) as rank:
        yield rank


def test_a_script_finds_its_agent(rank: ScriptRank) -> None:
    pid = int(rank.run(BEGIN + "assert run.is_watched\nrun.step()\nprint(os.getpid())"))
    assert rank.messages() == [
        Up(round=ROUND, rank=RANK, pid=pid),
        Stepped(round=ROUND, rank=RANK, step=1),
    ]
    assert (rank.reading.pid, rank.reading.step) == (pid, 1)
    assert rank.reading.counted_by is CountedBy.SDK


def test_threads_that_ask_at_once_get_the_same_session(rank: ScriptRank) -> None:
    rank.run("""
import sys, threading
sys.setswitchinterval(1e-6)
import trainer_sdk
found, gate = [], threading.Barrier(16)
def ask():
    gate.wait()
    found.append(trainer_sdk.session())
threads = [threading.Thread(target=ask) for _ in range(16)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
assert len({id(one) for one in found}) == 1
""")
    (up,) = rank.messages()
    assert isinstance(up, Up)


def test_each_thread_has_its_own_sections(rank: ScriptRank) -> None:
    rank.run(
        BEGIN
        + """
run.begin("main")
inside, go_on = threading.Barrier(4), threading.Event()
def work(name):
    with run.section("shared"), run.section(name):
        inside.wait()
        go_on.wait()
threads = [threading.Thread(target=work, args=(f"t{n}",)) for n in range(3)]
[thread.start() for thread in threads]
inside.wait()
sys.stdout.flush()
from trainer_sdk.page import PageView
import mmap
view = PageView(mmap.mmap(os.open(os.environ["EVERSTEP_PAGE"], os.O_RDWR), 65536))
lanes = view.lanes()
names = [tuple(view.section(f.section).name for f in lane.frames) for lane in lanes]
assert names[0] == ("main",), names
assert sorted(names[1:]) == [("shared", "t0"), ("shared", "t1"), ("shared", "t2")], names
assert [lane.thread for lane in lanes[:1]] == [threading.get_native_id()]
assert {lane.thread for lane in lanes[1:]} == {thread.native_id for thread in threads}
go_on.set()
[thread.join() for thread in threads]
"""
    )
    assert rank.counts() == {"main": 0, "shared": 3, "t0": 1, "t1": 1, "t2": 1}


def test_lanes_of_threads_that_ended_are_used_again(rank: ScriptRank) -> None:
    rank.run(
        BEGIN
        + """
def work(name):
    run.begin("never ended")
    with run.section("short"):
        pass
for number in range(50):
    thread = threading.Thread(target=work, args=(number,))
    thread.start()
    thread.join()
"""
    )
    assert rank.counts()["short"] == 50
    lanes = rank.page.lanes()
    assert len(lanes) == 2
    assert len(lanes[1].frames) == 1, "nothing of the thread before is left in it"


def test_more_threads_than_lanes_are_timed_but_not_shown(rank: ScriptRank) -> None:
    rank.run(
        BEGIN
        + """
inside = threading.Barrier(20)
def work():
    with run.section("shared"):
        inside.wait()
threads = [threading.Thread(target=work) for _ in range(20)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
"""
    )
    assert rank.counts() == {"shared": 20}
    assert len(rank.page.lanes()) == 8


def test_the_thread_that_makes_the_steps_comes_first(rank: ScriptRank) -> None:
    out = rank.run(
        BEGIN
        + """
def train():
    run.begin("evaluation")
    run.step()
    print(threading.get_native_id())
    run.step()
run.begin("waiting")
thread = threading.Thread(target=train)
thread.start()
thread.join()
"""
    )
    first, second = rank.page.lanes()
    assert first.thread == int(out)
    names = [rank.page.section(lane.frames[0].section).name for lane in (first, second)]
    assert names == ["evaluation", "waiting"]
    assert rank.reading.steps == 2


CHILD = """
def child():
    run = trainer_sdk.session()
    assert not run.is_watched
    with run.section("child"), run.pause():
        run.step(1000)
        run.heartbeat()
        run.report("loss", 5)
    run.request("stop", "no")
    run.end_all()
    worker = threading.Thread(target=run.step)
    worker.start()
    worker.join()
"""


def test_a_forked_child_never_speaks_for_the_rank(rank: ScriptRank) -> None:
    rank.run(
        BEGIN
        + CHILD
        + """
run.begin("outer")
run.step()
holding, go_on = threading.Event(), threading.Event()
def hold():
    with run.section("held"), run._table._lock:
        holding.set()
        go_on.wait()
other = threading.Thread(target=hold)
other.start()
holding.wait()
pid = os.fork()
if not pid:
    code = 1
    try:
        child()
        code = 0
    finally:
        os._exit(code)
assert os.waitpid(pid, 0)[1] == 0
go_on.set()
other.join()
run.step()
"""
    )
    assert_untouched(rank)


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_workers_never_speak_for_the_rank(rank: ScriptRank, method: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        f"import os, threading, multiprocessing, trainer_sdk\n{CHILD}\n"
        "if __name__ == '__main__':\n"
        "    run = trainer_sdk.session()\n"
        "    run.begin('outer')\n"
        "    run.step()\n"
        f"    worker = multiprocessing.get_context('{method}').Process(target=child)\n"
        "    worker.start()\n"
        "    worker.join()\n"
        "    assert worker.exitcode == 0\n"
        "    run.step()\n"
    )
    rank.finish(str(script))
    assert_untouched(rank)


def assert_untouched(rank: ScriptRank) -> None:
    reading = rank.reading
    assert (reading.step, reading.steps, reading.pauses, reading.dropped) == (2, 2, 0, 0)
    assert not reading.misuses
    assert "child" not in rank.counts()
    assert not rank.page.values()
    (name,) = {rank.page.section(f.section).name for f in rank.page.lanes()[0].frames}
    assert name == "outer"
    up, stepped = rank.messages()
    assert isinstance(up, Up)
    assert isinstance(stepped, Stepped)


def test_a_signal_handler_may_use_the_session_at_any_moment(rank: ScriptRank) -> None:
    rank.run(
        BEGIN
        + """
import signal
handled = 0
def handler(*_):
    global handled
    handled += 1
    with run.section(f"signal {handled % 30}"), run.pause():
        run.report(f"value {handled % 20}", handled)
        run.heartbeat()
signal.signal(signal.SIGALRM, handler)
signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
number = 0
while handled < 200:
    number += 1
    with run.section(f"section {number % 20}"), run.section("inner"):
        run.report(f"other {number % 3}", number)
    run.step()
signal.setitimer(signal.ITIMER_REAL, 0)
"""
    )
    assert rank.reading.pauses == 0
    assert not rank.reading.misuses
    assert not any(lane.frames for lane in rank.page.lanes())


def test_an_agent_that_is_gone_does_not_affect_the_script(rank: ScriptRank) -> None:
    rank._wire.close()
    out = rank.run(BEGIN + "run.step()\nprint(run.is_watched)")
    assert out == "False\n"


def test_a_notice_to_all_processes_does_not_end_a_rank_that_has_a_session(
    rank: ScriptRank,
) -> None:
    """SIGUSR1 and SIGUSR2 reach a rank without a handler (A12.1)."""
    notices = "os.kill(os.getpid(), signal.SIGUSR1); os.kill(os.getpid(), signal.SIGUSR2)"
    out = rank.run(f"{BEGIN}import os, signal\n{notices}\nprint(run.is_watched)")
    assert out == "True\n"


def test_a_handler_of_the_script_stays(rank: ScriptRank) -> None:
    own = "import os, signal\nsignal.signal(signal.SIGUSR1, lambda *_: print('heard'))\n"
    out = rank.run(f"{own}{BEGIN}os.kill(os.getpid(), signal.SIGUSR1)")
    assert out == "heard\n"


def test_a_session_imports_few_modules(rank: ScriptRank) -> None:
    program = "import sys\nbefore = set(sys.modules)\n{}\nprint(*set(sys.modules) - before)"
    rank.environ["PYTHONPATH"] = ":".join(path for path in sys.path if path)
    ours = set(
        rank.run(
            program.format(
                "import trainer_sdk\nrun = trainer_sdk.session()\n"
                "with run.section('a'): run.step()\nrun.heartbeat(); run.report('loss', 1.0)\n"
                "run.should_stop"
            )
        ).split()
    )
    assert not ours & {
        *("typing", "dataclasses", "json", "msgspec", "socket", "enum", "functools", "re"),
        *("threading", "logging", "inspect", "contextlib", "collections", "asyncio"),
    }
    # A count, not a time: the same on every machine.
    assert len(ours) < 23, sorted(ours)
