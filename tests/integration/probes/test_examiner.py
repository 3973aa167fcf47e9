"""A real process examines a node: hangs, crashes, garbage, notes, and what it leaves behind."""

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from everstep.messages import CheckResult
from everstep_services.agent.probes.runner import child, process
from everstep_services.agent.probes.runner.examiner import NodeExaminer
from everstep_services.agent.probes.runner.protocol import Request, encode
from everstep_services.agent.probes.settings import ChecksSettings
from everstep_services.agent.probes.verdicts import NodeExamination
from tests.waiting import turns, until_async

HANGS_AFTER_S = 4.0
ENOUGH_S = 30.0


def script(folder: Path, name: str, body: str) -> Path:
    """An executable of the site that appends its process to `pids`, then follows its arguments."""
    path = folder / name
    path.write_text(f"#!/bin/sh\necho $$ >> {folder / 'pids'}\n{body}\n")
    path.chmod(0o755)
    return path


def of(found: NodeExamination) -> dict[str, CheckResult]:
    return {one.check: one for one in found.results}


async def all_gone(folder: Path, count: int) -> None:
    """Whatever scripts have started is dead and buried, or somebody else's to bury."""

    def is_alive(pid: int) -> bool:
        try:
            return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
        except psutil.NoSuchProcess:
            return False

    async def left() -> list[int] | None:
        pids = [int(line) for line in (folder / "pids").read_text().split()]
        assert len(pids) == count
        return [pid for pid in pids if is_alive(pid)]

    await until_async(left, "nothing of a check is left", holds=lambda pids: not pids)


def own_children() -> set[psutil.Process]:
    """A child of an earlier test may still be among them, and end meanwhile."""
    return set(psutil.Process().children())


async def test_it_examines_this_node_and_leaves_nothing(tmp_path: Path) -> None:
    before = own_children()
    examiner = NodeExaminer(ChecksSettings(within_s=ENOUGH_S), tmp_path / "notes" / "n1.json")
    found = await examiner.examine(["host", "ptrace", "recorder"], "join")
    assert found.checks == ("host", "ptrace", "recorder")
    assert (found.occasion, found.is_healthy) == ("join", True)
    assert {"host", "ptrace", "recorder"} == set(of(found))
    assert all(one.state != "unknown" for one in found.results)
    assert "clock" in json.loads((tmp_path / "notes" / "n1.json").read_text())["host"]
    assert (tmp_path / "notes" / "n1.json").stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path / "notes") == ["n1.json"]
    assert own_children() <= before


async def test_a_check_that_hangs_is_unknown_and_hides_no_other(tmp_path: Path) -> None:
    """A hanging check is unknown, and its node healthy (A10.4)."""
    (tmp_path / "proc").mkdir()
    os.mkfifo(tmp_path / "proc" / "loadavg")  # nobody ever writes to it
    settings = ChecksSettings(within_s=HANGS_AFTER_S, site={"ok": "/bin/echo fine"})
    before = own_children()
    found = await NodeExaminer(settings, root=tmp_path).examine(["host", "site:ok"], "periodic")
    assert of(found)["site:ok"].reason == "fine"
    hung = [one for one in found.results if one.state == "unknown" and one.check == "host"]
    assert [one.reason for one in hung] == [f"it did not answer within {HANGS_AFTER_S:g} s"]
    assert "limits" in {one.subject for one in found.results}  # what it had found before
    assert found.is_healthy
    assert own_children() <= before


async def test_the_bound_for_all_is_kept_also_when_the_process_never_starts_to_speak(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "python").write_text("#!/bin/sh\nexec sleep 600\n")
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    before = own_children()
    found = await NodeExaminer(ChecksSettings()).examine(["host", "nic"], "prolog", within_s=0.2)
    assert {one.reason for one in found.results} == {"it did not answer within 0.2 s"}
    assert {one.state for one in found.results} == {"unknown"}
    assert own_children() <= before


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("echo 'no memory' >&2; exit 7", "its process ended early: exit code 7. no memory"),
        ("kill -SEGV $$", "its process ended early: killed by SIGSEGV"),
        ("echo nonsense; printf '\\377\\n{}\\n'", "its process ended early: exit code 0"),
        ('echo \'{"type":"done"}\'', "it did not answer within 10 s"),
    ],
)
async def test_a_process_that_ends_or_talks_nonsense_makes_checks_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, said: str
) -> None:
    """A crash, garbage and silence (A10.4)."""
    monkeypatch.setattr("sys.executable", str(script(tmp_path, "python", body)))
    found = await NodeExaminer(ChecksSettings()).examine(["host"], "join")
    (one,) = found.results
    assert (one.check, one.state, one.reason) == ("host", "unknown", said)


async def test_a_process_that_cannot_be_started_makes_checks_unknown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.executable", "/nonexistent/python")
    (one,) = (await NodeExaminer(ChecksSettings()).examine(["host"], "join")).results
    assert one.reason == "its process cannot be started: No such file or directory"


async def test_a_check_that_does_not_exist_is_unknown_with_its_error() -> None:
    found = await NodeExaminer(ChecksSettings(within_s=ENOUGH_S)).examine(
        ["nosuch", "site:x"], "join"
    )
    assert {one.state for one in found.results} == {"unknown"}
    assert "'nosuch' is not a check" in of(found)["nosuch"].reason


async def test_site_checks_run_side_by_side_and_those_that_hang_are_killed(tmp_path: Path) -> None:
    folder = tmp_path / "checks"
    folder.mkdir()
    script(folder, "good", "echo fine")
    script(folder, "bad", "echo broken; exit 2")
    script(folder, "hung-1", f"sleep 600 & echo $! >> {folder / 'pids'}; wait")
    script(folder, "hung-2", "exec sleep 600")
    (folder / "pids").write_text("")
    settings = ChecksSettings(within_s=HANGS_AFTER_S, site_dir=folder)
    found = await NodeExaminer(settings).examine(["site"], "operator")
    assert {name: one.state for name, one in of(found).items()} == {
        "site:bad": "failed",
        "site:good": "ok",
        "site:hung-1": "unknown",
        "site:hung-2": "unknown",
        "site:pids": "unknown",
    }
    assert set(found.checks) == set(of(found))
    assert not found.is_healthy
    await all_gone(folder, 5)


@pytest.mark.parametrize("then", ["echo fine", "exec sleep 600"], ids=["ends", "hangs"])
async def test_daemons_that_a_check_leaves_in_sessions_of_their_own_end_with_it(
    tmp_path: Path, then: str
) -> None:
    """A program of the site must not fill the process table, run after run (A10.4)."""
    pids = tmp_path / "pids"
    daemon = f"setsid sh -c 'echo $$ >> {pids}; exec sleep 600' &"
    wait = f"while [ $(wc -l < {pids}) -lt 3 ]; do sleep 0.01; done"
    check = script(tmp_path, "forks", f"{daemon}\n{daemon}\n{wait}\n{then}")
    settings = ChecksSettings(within_s=HANGS_AFTER_S, site={"forks": str(check)})
    before = own_children()
    found = await NodeExaminer(settings).examine(["site:forks"], "join")
    assert of(found)["site:forks"].state == ("ok" if then == "echo fine" else "unknown")
    await all_gone(tmp_path, 3)
    assert own_children() <= before


async def test_cancelled_it_leaves_no_process_behind(tmp_path: Path) -> None:
    hung = script(tmp_path, "hung", f"sleep 600 & echo $! >> {tmp_path / 'pids'}; wait")
    settings = ChecksSettings(within_s=ENOUGH_S, site={"hung": str(hung)})
    before = own_children()

    async def running() -> bool:
        return len((tmp_path / "pids").read_text().split()) == 2

    async with asyncio.TaskGroup() as tasks:
        examining = tasks.create_task(NodeExaminer(settings).examine(["site:hung"], "join"))
        await until_async(running, "it hangs", despite=FileNotFoundError)
        examining.cancel()
    await all_gone(tmp_path, 2)
    assert own_children() <= before


async def test_cancelled_while_its_process_starts_it_leaves_no_process_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The agent ends while a thread starts the process."""
    loop, begin = asyncio.get_running_loop(), process._begin
    begun, cancelled = asyncio.Event(), threading.Event()
    started: list[subprocess.Popen[bytes]] = []

    def begin_late(environ: Mapping[str, str] | None) -> tuple[Any, Any]:
        loop.call_soon_threadsafe(begun.set)
        cancelled.wait(ENOUGH_S)
        begins = begin(environ)
        started.append(begins[0])
        return begins

    monkeypatch.setattr(process, "_begin", begin_late)
    async with asyncio.TaskGroup() as tasks:
        examining = tasks.create_task(NodeExaminer(ChecksSettings()).examine(["host"], "join"))
        await begun.wait()
        examining.cancel()
        await turns(3)
        cancelled.set()
    assert [it.poll() for it in started] == [-signal.SIGKILL]


async def test_when_the_asking_process_is_killed_the_checks_end(tmp_path: Path) -> None:
    hung = script(tmp_path, "hung", f"sleep 600 & echo $! >> {tmp_path / 'pids'}; wait")
    code = (
        "import asyncio\n"
        "from everstep_services.agent.probes.runner.examiner import NodeExaminer\n"
        "from everstep_services.agent.probes.settings import ChecksSettings\n"
        f"settings = ChecksSettings(within_s=30, site={{'hung': {str(hung)!r}}})\n"
        "asyncio.run(NodeExaminer(settings).examine(['site:hung'], 'join'))\n"
    )
    asking = await asyncio.create_subprocess_exec(sys.executable, "-c", code)

    async def running() -> bool:
        return len((tmp_path / "pids").read_text().split()) == 2

    await until_async(running, "it hangs", despite=FileNotFoundError)
    asking.kill()
    await asking.wait()
    await all_gone(tmp_path, 2)


async def test_a_process_that_nobody_hears_leaves_no_check_behind(tmp_path: Path) -> None:
    """Its parent has been killed: it may want to write before it sees the end of its stdin."""
    hung = script(tmp_path, "hung", f"sleep 600 & echo $! >> {tmp_path / 'pids'}; wait")
    os.mkfifo(gate := tmp_path / "gate")
    gated = script(tmp_path, "gated", f"read line < {gate}")
    settings = ChecksSettings(within_s=600, site={"hung": str(hung), "gated": str(gated)})
    request = Request(
        names=("site:hung", "site:gated"), settings=settings, notes=None,
        until=time.monotonic() + 600, root=tmp_path, own_pids=(),
    )  # fmt: skip
    checks = await asyncio.create_subprocess_exec(
        sys.executable, "-m", child.__name__,
        stdin=subprocess.PIPE, stdout=(ends := os.pipe())[1], process_group=0,
    )  # fmt: skip
    assert checks.stdin is not None
    checks.stdin.write(encode(request))

    async def running() -> bool:
        return len((tmp_path / "pids").read_text().split()) == 3

    await until_async(running, "both run", despite=FileNotFoundError)
    for end in ends:
        os.close(end)
    await asyncio.to_thread(gate.write_text, "go\n")  # its result finds no reader
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(checks.wait(), 2.0)
    checks.stdin.close()
    assert await checks.wait() == -signal.SIGKILL
    await all_gone(tmp_path, 3)


async def test_notes_are_found_at_the_next_look_and_kept_for_checks_that_did_not_run(
    tmp_path: Path,
) -> None:
    notes, settings = tmp_path / "n1.json", ChecksSettings(within_s=ENOUGH_S)
    notes.write_text('{"other": {"kept": 1}, "host": {"clock": {"boot": "b", "booted_at": 1}}}')
    for name, text in {
        "proc/sys/kernel/random/boot_id": "b\n",
        "proc/vmstat": "oom_kill 3\n",
    }.items():
        (tmp_path / "root" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "root" / name).write_text(text)
    examiner = NodeExaminer(settings, notes, tmp_path / "root")
    first = {one.subject: one.state for one in (await examiner.examine(["host"], "join")).results}
    (tmp_path / "root/proc/vmstat").write_text("oom_kill 5\n")
    second = {one.subject: one.state for one in (await examiner.examine(["host"], "join")).results}
    assert (first["clock jumps"], second["clock jumps"]) == ("warning", "ok")
    assert (first["memory kills"], second["memory kills"]) == ("ok", "warning")
    kept = json.loads(notes.read_text())
    assert kept["other"] == {"kept": 1}
    assert kept["host"]["oom_kill on this host"]["count"] == 5


@pytest.mark.parametrize("text", [b"", b"{", b'{"host": 5}', b"\xff\xfe", b"[]"])
async def test_notes_that_are_garbage_begin_anew_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: bytes
) -> None:
    notes = tmp_path / "n1.json"
    notes.write_bytes(text)
    with caplog.at_level(logging.WARNING):
        found = await NodeExaminer(ChecksSettings(within_s=ENOUGH_S), notes).examine(
            ["host"], "join"
        )
    assert found.is_healthy
    assert "check_notes_lost" in caplog.text
    assert "they begin anew" in caplog.text
    assert "clock" in json.loads(notes.read_text())["host"]


async def test_notes_that_cannot_be_kept_cost_nothing_but_themselves(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    examiner = NodeExaminer(ChecksSettings(within_s=ENOUGH_S), tmp_path / "file" / "n1.json")
    assert (await examiner.examine(["host"], "join")).is_healthy
    assert "check_notes_lost" in caplog.text
