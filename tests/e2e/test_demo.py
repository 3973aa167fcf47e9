"""`everstep demo`, ended in the middle."""

import signal
from operator import not_
from pathlib import Path

import pytest

from tests.e2e.processes import Process, environment, kill_all, python, tagged
from tests.waiting import until


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_whoever_ends_it_finds_nothing_left(tmp_path: Path, job: str, number: int) -> None:
    environ = environment(tmp_path, job, TMPDIR=str(tmp_path))
    demo = Process(python("-m", "everstep_services.cli", "demo"), environ, tmp_path / "log")
    try:
        until(lambda: "three agents" in demo.said, "its agents are started")
        demo.send(number)
        assert demo.wait() == 128 + number
        until(lambda: tagged(job), "nothing is left", holds=not_)
    finally:
        demo.kill()
        kill_all(tagged(job))
