"""A process is whole or it is down, and says why in one line."""

import asyncio
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Generator
from pathlib import Path

import pytest

from everstep.errors import EverstepError
from everstep.runtime import DrainTimeoutError, LoopEndedError, one_line, run, serve
from tests.waiting import WITHIN_S, turns, until

Start = Callable[..., "subprocess.Popen[str]"]


async def for_ever() -> None:
    await asyncio.Event().wait()


async def test_stop_cancels_the_loops_and_serve_returns() -> None:
    stop, ended = asyncio.Event(), list[str]()

    async def loop() -> None:
        try:
            stop.set()
            await for_ever()
        finally:
            ended.append("loop")

    async with asyncio.timeout(WITHIN_S):
        await serve(loop, for_ever, stop=stop)
    assert ended == ["loop"]


async def test_a_failing_loop_takes_the_others_with_it() -> None:
    ended = list[str]()

    async def failing() -> None:
        raise EverstepError("the disk is full")

    async def other() -> None:
        try:
            await for_ever()
        finally:
            ended.append("other")

    with pytest.raises(ExceptionGroup) as caught:
        await serve(other, failing, stop=asyncio.Event())
    assert [str(error) for error in caught.value.exceptions] == ["the disk is full"]
    assert ended == ["other"]


async def test_a_loop_that_returns_is_a_failure() -> None:
    async def returning() -> None:
        return

    with pytest.raises(ExceptionGroup) as caught:
        await serve(for_ever, returning, stop=asyncio.Event())
    (error,) = caught.value.exceptions
    assert isinstance(error, LoopEndedError)
    assert "returning returned" in str(error)


async def test_a_drain_that_returns_before_the_stop_is_a_failure() -> None:
    async def drain(stop: asyncio.Event) -> None:
        del stop

    with pytest.raises(ExceptionGroup) as caught:
        await serve(for_ever, stop=asyncio.Event(), drains=[drain])
    assert isinstance(caught.value.exceptions[0], LoopEndedError)


async def test_drains_finish_while_the_loops_still_serve_them() -> None:
    stop, work, said = asyncio.Event(), asyncio.Queue[str](), list[str]()

    async def worker() -> None:
        while True:
            said.append(await work.get())
            work.task_done()

    async def drain(stop: asyncio.Event) -> None:
        await stop.wait()
        await turns(100)
        await work.put("the last piece")
        await work.join()

    stop.set()
    await serve(worker, stop=stop, drains=[drain])
    assert said == ["the last piece"]


async def test_a_drain_is_cut_off_at_its_bound() -> None:
    stop = asyncio.Event()
    stop.set()

    async def endless(stop: asyncio.Event) -> None:
        del stop
        await for_ever()

    with pytest.raises(ExceptionGroup) as caught:
        await serve(for_ever, stop=stop, drains=[endless], drain_within_s=0.01)
    (error,) = caught.value.exceptions
    assert isinstance(error, DrainTimeoutError)
    assert "endless did not finish within 0.01 s of the stop" in str(error)


def test_an_everstep_error_is_one_line_and_2(capsys: pytest.CaptureFixture[str]) -> None:
    async def main(stop: asyncio.Event) -> None:
        del stop
        raise EverstepError("no bus at\n nats://u:hunter22@h:1")

    assert run("health", main) == 2
    assert capsys.readouterr().err == "health: no bus at nats://u:***@h:1\n"


def test_one_error_in_nested_groups_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    async def main(stop: asyncio.Event) -> None:
        del stop
        raise ExceptionGroup("a", [ExceptionGroup("b", [EverstepError("the disk is full")])])

    assert run("health", main) == 2
    assert capsys.readouterr().err == "health: the disk is full\n"


def test_several_errors_are_a_line_each_and_not_twice(capsys: pytest.CaptureFixture[str]) -> None:
    async def main(stop: asyncio.Event) -> None:
        del stop
        raise ExceptionGroup("a", [EverstepError("x"), EverstepError("y"), EverstepError("x")])

    assert run("health", main) == 2
    assert capsys.readouterr().err == "health: x\nhealth: y\n"


@pytest.mark.parametrize(
    "error",
    [
        KeyError("bug"),
        ExceptionGroup("g", [KeyError("bug"), EverstepError("x")]),
        BaseExceptionGroup("g", [KeyError("bug"), SystemExit(0)]),
    ],
    ids=["plain", "group", "base group"],
)
def test_a_bug_keeps_its_traceback_and_is_1(
    error: BaseException, capsys: pytest.CaptureFixture[str]
) -> None:
    async def main(stop: asyncio.Event) -> None:
        del stop
        raise error

    assert run("health", main) == 1
    said = capsys.readouterr().err
    assert "Traceback" in said
    assert "KeyError: 'bug'" in said


def test_run_gives_the_signals_back() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]

    async def main(stop: asyncio.Event) -> None:
        assert not stop.is_set()
        assert signal.getsignal(signal.SIGTERM) != before[1]

    assert run("health", main) == 0
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_an_error_without_text_is_named() -> None:
    assert one_line(EverstepError()) == "EverstepError"


PROGRAM = """
import asyncio, signal, sys, threading
from everstep.runtime import run, serve

def say(word):
    print(word, flush=True)

async def main(stop):
{body}

sys.exit(run("demo", main, stop_within_s={stop_within_s}))
"""


@pytest.fixture
def start(tmp_path: Path) -> Generator[Start, None, None]:
    """Start a process that says `ready` when its main runs; none outlives the test."""
    started: list[subprocess.Popen[str]] = []

    def begin(body: str, stop_within_s: float = 60) -> "subprocess.Popen[str]":
        file = tmp_path / f"{len(started)}.py"
        indented = textwrap.indent(textwrap.dedent(body), "    ")
        file.write_text(PROGRAM.format(body=indented, stop_within_s=stop_within_s))
        process = subprocess.Popen(
            [sys.executable, str(file)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_drains_the_process_and_it_ends_with_0(start: Start, number: int) -> None:
    process = start(
        """
        async def drain(stop):
            say("ready")
            await stop.wait()
            say("drained")
        async def loop():
            await asyncio.Event().wait()
        await serve(loop, stop=stop, drains=[drain])
        """
    )
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert (out, err, process.returncode) == ("drained\n", "", 0)


def test_a_signal_wakes_a_loop_that_waits_already(start: Start) -> None:
    """Another thread takes it, as if it came right before the wait: no call is interrupted."""
    process = start(
        """
        threading.Thread(target=threading.Event().wait, daemon=True).start()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        say("ready")
        await stop.wait()
        say("woken")
        """
    )
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=30)
    assert (out, err, process.returncode) == ("woken\n", "", 0)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_it_at_once(start: Start, number: int) -> None:
    process = start(
        """
        say("ready")
        await stop.wait()
        say("stopping")
        await asyncio.Event().wait()
        """
    )
    process.send_signal(number)
    assert process.stdout is not None
    assert process.stdout.readline() == "stopping\n"
    process.send_signal(number)
    process.communicate(timeout=30)
    assert process.returncode == 128 + number


def test_two_signals_end_even_a_blocked_loop(start: Start) -> None:
    process = start(
        """
        say("ready")
        while True:
            try:
                signal.pause()
            except Exception:
                pass
        """
    )
    process.send_signal(signal.SIGTERM)
    # Two equal signals that are pending are one: send another until it has ended.

    def insist() -> int | None:
        process.send_signal(signal.SIGINT)
        return process.poll()

    until(insist, "it has ended", holds=lambda _: True)
    assert process.returncode in {128 + signal.SIGINT, 128 + signal.SIGTERM}


def test_a_process_that_does_not_stop_says_where_it_hangs(start: Start) -> None:
    process = start(
        """
        async def hangs_here():
            await stop.wait()
            threading.Event().wait()
        say("ready")
        await hangs_here()
        """,
        stop_within_s=0.1,
    )
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "in hangs_here" in err


def test_half_a_service_is_no_service(start: Start) -> None:
    process = start(
        """
        async def healthy():
            await asyncio.Event().wait()
        async def broken():
            say("ready")
            raise KeyError("bug")
        await serve(healthy, broken, stop=stop)
        """
    )
    _, err = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "KeyError: 'bug'" in err
