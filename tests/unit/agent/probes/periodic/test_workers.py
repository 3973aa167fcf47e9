"""Runs of probes in processes of their own, whatever a probe does there."""

import asyncio
import os
import signal
import stat
from collections.abc import AsyncGenerator
from operator import not_
from pathlib import Path

import pytest

from everstep_services.agent.probes.periodic.workers import ProbeWorkers
from everstep_services.agent.probes.runner import process as module
from everstep_services.agent.probes.runner.process import ProbeRun
from everstep_services.agent.probes.settings import ChecksSettings
from everstep_services.agent.ranks import process_tree
from tests.unit.agent.probes.periodic import late_limit_worker
from tests.waiting import until_async

ROOT = Path(__file__).parents[5]
WITHIN_S = 60.0
"""Only ends a run that hangs by mistake."""


class Site:
    """A folder of checks of the site, and the workers that run them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "checks"
        self.folder.mkdir()
        settings = ChecksSettings(site_dir=self.folder, within_s=WITHIN_S)
        self.workers = ProbeWorkers(settings, folder / "notes.json", Path("/"), most=2)

    def check(self, name: str, script: str) -> str:
        path = self.folder / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return f"site:{name}"

    async def run(self, name: str, within_s: float = WITHIN_S) -> ProbeRun:
        return await self.workers.run(name, within_s)


@pytest.fixture
async def site(tmp_path: Path) -> AsyncGenerator[Site]:
    site = await asyncio.to_thread(Site, tmp_path)
    yield site
    await site.workers.end()


def state(run: ProbeRun) -> str:
    return run.results[0].state


def read_pids(path: Path) -> list[int]:
    """The processes that a probe has noted so far."""
    return [int(line) for line in path.read_text().split()] if path.exists() else []


async def until_gone(pids: list[int]) -> None:
    """Killed processes end when the kernel gives them a turn; nobody waits long for that."""

    def living() -> list[int]:
        return [pid for pid in pids if process_tree.stat(pid)[:1] not in ([], ["Z"])]

    await until_async(lambda: asyncio.to_thread(living), f"{pids} are gone", holds=not_)


async def workers() -> set[int]:
    """The processes of this test's workers."""
    return await asyncio.to_thread(_workers)


def _workers() -> set[int]:
    return {
        pid
        for pid in process_tree.children(os.getpid())
        if "runner.child" in process_tree.command(pid)
    }


async def test_probes_share_a_process_that_stays(site: Site) -> None:
    fine = await asyncio.to_thread(site.check, "fine", "echo all is well")
    first = await site.run(fine)
    before = await workers()
    second = await site.run(fine)
    assert (state(first), state(second)) == ("ok", "ok")
    assert await workers() == before
    assert first.start_cpu_s > 0
    assert second.start_cpu_s == 0


async def test_a_check_of_the_host_runs_as_a_probe(site: Site) -> None:
    run = await site.run("host")
    assert {result.check for result in run.results} == {"host"}


async def test_the_processor_time_of_what_a_probe_starts_is_counted(site: Site) -> None:
    busy = await asyncio.to_thread(
        site.check, "busy", "i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done"
    )
    idle = await asyncio.to_thread(site.check, "idle", "exit 0")
    await site.run(idle)
    assert (await site.run(busy)).cpu_s > 5 * (await site.run(idle)).cpu_s


async def test_a_probe_that_hangs_is_unknown_and_its_processes_are_gone(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its time is over once it has started its process, however long that took."""
    pids, started = tmp_path / "pids", tmp_path / "started"
    os.mkfifo(started)
    hangs = await asyncio.to_thread(
        site.check, "hangs",
        f"setsid sleep 1000 & echo $! > {pids}; : > {started}; exec sleep 1000",
    )  # fmt: skip
    with monkeypatch.context() as patched:
        patched.setattr(module, "_PROGRAM", late_limit_worker.__name__)
        patched.setenv("PYTHONPATH", str(ROOT))
        patched.setenv(late_limit_worker.STARTED, str(started))
        run = await site.run(hangs)
    assert state(run) == "unknown"
    assert "within" in run.results[0].reason
    assert run.took_s < WITHIN_S  # its own process has ended it, not the agent
    left = await asyncio.to_thread(read_pids, pids)
    assert len(left) == 1
    await until_gone(left)

    fine = await asyncio.to_thread(site.check, "fine", "exit 0")
    assert state(await site.run(fine)) == "ok"


async def test_what_a_probe_leaves_in_another_session_is_killed(site: Site, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    forks = await asyncio.to_thread(
        site.check, "forks",
        f"for i in 1 2 3 4 5 6 7 8; do (setsid sleep 1000 & echo $! >> {pids}) & done; wait",
    )  # fmt: skip
    run = await site.run(forks)
    assert state(run) == "ok"
    left = await asyncio.to_thread(read_pids, pids)
    assert len(left) == 8
    await until_gone(left)


async def test_100_mb_of_output_are_read_and_dropped(site: Site) -> None:
    loud = await asyncio.to_thread(
        site.check, "loud", "echo too loud; head -c 100000000 /dev/zero; exit 2"
    )
    run = await site.run(loud)
    assert (state(run), run.results[0].reason) == ("failed", "too loud")


async def test_a_probe_that_ends_with_another_code_or_garbage_is_unknown(site: Site) -> None:
    garbage = await asyncio.to_thread(
        site.check, "garbage", "head -c 5000 /dev/urandom; kill -SEGV $$"
    )
    assert state(await site.run(garbage)) == "unknown"


async def test_a_worker_that_is_killed_is_replaced(site: Site) -> None:
    kills = await asyncio.to_thread(site.check, "kills", "kill -KILL $PPID; sleep 1000")
    run = await site.run(kills)
    assert state(run) == "unknown"
    assert "killed by SIGKILL" in run.results[0].reason
    fine = await asyncio.to_thread(site.check, "fine", "exit 0")
    assert state(await site.run(fine)) == "ok"


async def test_a_check_that_does_not_exist_is_unknown(site: Site) -> None:
    run = await site.run("site:nowhere")
    assert state(run) == "unknown"
    assert "is not a check" in run.results[0].reason


async def test_a_stopped_worker_delays_only_its_own_probe(site: Site) -> None:
    fine = await asyncio.to_thread(site.check, "fine", "exit 0")
    await site.run(fine)
    (pid,) = await workers()
    os.kill(pid, signal.SIGSTOP)
    stopped, other = await asyncio.gather(site.run(fine, within_s=0.5), site.run(fine))
    assert {state(stopped), state(other)} == {"unknown", "ok"}
    await until_async(workers, "it is gone", holds=lambda found: pid not in found)


async def test_nothing_is_left_at_the_end(site: Site) -> None:
    fine = await asyncio.to_thread(site.check, "fine", "exit 0")
    await asyncio.gather(site.run(fine), site.run(fine), site.run(fine))
    assert len(await workers()) == 2
    await site.workers.end()
    await until_async(workers, "nothing is left", holds=not_)


BROADCAST = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


async def test_signals_to_every_process_of_a_step_leave_an_idle_worker_as_it_is(site: Site) -> None:
    """A12.1: they are for the agent."""
    fine = await asyncio.to_thread(site.check, "fine", "exit 0")
    await site.run(fine)
    (pid,) = await workers()
    for number in BROADCAST:
        os.kill(pid, number)
    run = await site.run(fine)
    assert (state(run), run.start_cpu_s) == ("ok", 0)
    assert await workers() == {pid}


@pytest.mark.parametrize("number", BROADCAST)
async def test_a_signal_to_every_process_costs_a_running_probe_one_unknown_result(
    site: Site, tmp_path: Path, number: signal.Signals
) -> None:
    """The program that the probe runs ends by the signal; its worker stays for the next run."""
    begun, once = tmp_path / "begun", tmp_path / "once"
    probe = await asyncio.to_thread(
        site.check, "slow", f"test -e {once} && exit 0\ntouch {once} {begun}\nsleep 1000 & wait"
    )
    running = asyncio.create_task(site.run(probe))
    await until_async(lambda: asyncio.to_thread(begun.exists), "the probe runs")
    (pid,) = await workers()
    below = await asyncio.to_thread(process_tree.descendants, pid)
    for process in (*below, pid):
        os.kill(process, number)
    run = await running
    assert {result.state for result in run.results} == {"unknown"}
    assert state(await site.run(probe)) == "ok"
    assert await workers() == {pid}
