"""Flight recorders and stacks: of real processes, and of servers that do as torch's."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from everstep.clock import SystemClock
from everstep.evidence.archive import unpack
from everstep_services.agent.collectors.collection import (
    EXITED,
    NOT_STARTED,
    EvidenceFound,
    Piece,
    Scene,
    collect,
)
from everstep_services.agent.collectors.flight_recorder import MOST_BYTES, flight_recorders
from everstep_services.agent.collectors.stacks import StacksReader, written_stacks
from everstep_services.agent.ranks.protocol import RankSeen
from everstep_services.attribution.stack_analysis.dumps import read_stacks
from tests.unit.worker_server import Answers, worker_server
from tests.waiting import until
from trainer_sdk import layout
from trainer_sdk.bootstrap.agent_link import map_page
from trainer_sdk.page import make_page

CLOCK = SystemClock()
TRACE = json.dumps(
    {
        "entries": [{"profiling_name": "gloo:all_reduce", "record_id": 4, "retired": False}],
        "pg_status": {"0": {"last_enqueued_collective": 5}},
    }
).encode()
ENOUGH_S = 30.0
NCCL = "dump_nccl_trace_json"


def rank(folder: Path, number: int, pid: int = 0, *, is_gone: bool = False) -> RankSeen:
    own = folder / str(number)
    own.mkdir()
    page = make_page(str(own / "page"))
    return RankSeen(number, pid, page, own, is_gone)


async def recorded(
    scene: Scene, answers: Mapping[int, Answers], name: str = "flight_recorder"
) -> Piece:
    """What comes of the recorders of these ranks, whose servers answer so."""
    collector = flight_recorders if name == "flight_recorder" else StacksReader(program="").stacks
    async with AsyncExitStack() as servers:
        for one in scene.ranks:
            if one.rank in answers:
                await servers.enter_async_context(worker_server(one.folder, answers[one.rank]))
        (piece,) = await collect({name: collector}, scene, CLOCK)
    return piece


@contextmanager
def python(source: str) -> Iterator[int]:
    """A process that runs this, and has begun."""
    command = [sys.executable, "-c", f"print('up', flush=True)\n{source}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield process.pid
        finally:
            process.kill()


def missing(piece: Piece) -> Mapping[int, str]:
    return {} if piece.content is None else piece.content.missing


def test_each_rank_has_a_recording_or_a_reason(tmp_path: Path) -> None:
    """A7.2: a missing dump is evidence."""
    here = os.getpid()
    ranks = [
        rank(tmp_path, 0, here),
        rank(tmp_path, 1, is_gone=True),
        rank(tmp_path, 2),
        rank(tmp_path, 3, here),
        rank(tmp_path, 4, here),
        rank(tmp_path, 5, here),
    ]
    answers: dict[int, Answers] = {
        0: {"fr_trace_json": lambda: TRACE},
        3: {},
        4: {"fr_trace_json": lambda: b"what?"},
    }
    piece = asyncio.run(recorded(Scene(ranks, ENOUGH_S), answers))
    assert missing(piece) == {
        1: EXITED,
        2: NOT_STARTED,
        3: "its recorder: torch's server in it has no flight recorder",
        4: "its recorder: it answered nonsense: b'what?'",
        5: "torch has no server in it: it has not imported torch, is exiting, or is not Python",
    }
    assert piece.content is not None
    assert piece.content.summary.startswith("rank 0: 5 collectives, waits in gloo:all_reduce; none")
    kept = unpack(piece.packed())
    assert [(one.name, one.content) for one in kept.members] == [("rank_0.json", TRACE)]
    assert kept.missing == missing(piece)


def test_a_rank_that_does_not_answer_takes_nothing_from_the_others(tmp_path: Path) -> None:
    ranks = [rank(tmp_path, number, os.getpid()) for number in (0, 1)]
    answers: dict[int, Answers] = {
        0: {"fr_trace_json": lambda: TRACE},
        1: {"fr_trace_json": lambda: None},
    }
    piece = asyncio.run(recorded(Scene(ranks, 3.0), answers))
    assert missing(piece) == {1: "its recorder: no answer within 2.4 s"}
    assert [one.rank for one in unpack(piece.packed()).members] == [0]


def test_when_no_rank_has_anything_only_the_reason_is_on_record(tmp_path: Path) -> None:
    ranks = [rank(tmp_path, number, is_gone=True) for number in range(3)]
    piece = asyncio.run(recorded(Scene(ranks, ENOUGH_S), {}))
    assert (piece.missing, piece.packed()) == ("ranks 0, 1, 2 (the rank had exited)", b"")


@pytest.mark.parametrize("is_users", [False, True])
def test_what_torch_has_dumped_itself_is_taken_of_ranks_that_are_gone(
    tmp_path: Path, is_users: bool
) -> None:
    """A7.4: the user's own place counts, and only dumps of this round."""
    gone = rank(tmp_path, 3, is_gone=True)
    prefix = tmp_path / "nccl_trace_rank_" if is_users else gone.folder / "flight_"
    environ = {"TORCH_NCCL_DEBUG_INFO_TEMP_FILE": str(prefix)} if is_users else {}
    dump = Path(f"{prefix}3")
    scene = Scene([gone], ENOUGH_S, began_s=CLOCK.now(), environs={3: environ})
    assert asyncio.run(recorded(scene, {})).missing == f"rank 3 ({EXITED})"
    dump.write_bytes(b"of an earlier round")
    os.utime(dump, (time.time() - 100, time.time() - 100))
    assert asyncio.run(recorded(scene, {})).missing == f"rank 3 ({EXITED})"
    dump.write_bytes(b"pickled")
    found = unpack(asyncio.run(recorded(scene, {})).packed())
    assert [(one.name, one.content) for one in found.members] == [("rank_3.pickle", b"pickled")]


@pytest.mark.parametrize(
    ("entered_ago_s", "is_silent", "name"),
    [(50, False, "rank_0.pickle"), (-50, False, "rank_0.json"), (50, True, "rank_0.pickle")],
)
def test_the_dump_of_a_living_rank_counts_until_it_enters_another_collective(
    tmp_path: Path, entered_ago_s: float, is_silent: bool, name: str
) -> None:
    """Torch dumps a hang of NCCL and gives it up: then its recorder lists nothing that waits."""
    entered_ns = round((time.time() - entered_ago_s) * 1e9)
    over = {"profiling_name": "nccl:all_reduce", "state": "completed", "record_id": 4,
            "time_created_ns": entered_ns}  # fmt: skip
    trace = json.dumps({"entries": [over]}).encode()
    living = rank(tmp_path, 0, os.getpid())
    (living.folder / "flight_0").write_bytes(b"pickled")
    scene = Scene([living], 3.0 if is_silent else ENOUGH_S, began_s=CLOCK.now() - 100)
    answer = (lambda: None) if is_silent else (lambda: trace)
    answers: dict[int, Answers] = {0: {"fr_trace_json": lambda: b"{}", NCCL: answer}}
    (member,) = unpack(asyncio.run(recorded(scene, answers)).packed()).members
    assert member.name == name


def test_a_dump_that_is_a_link_a_pipe_or_huge_is_left_alone(tmp_path: Path) -> None:
    """A13.3: nobody has the agent read another file, or wait for one."""
    ranks = [rank(tmp_path, number, is_gone=True) for number in range(3)]
    (ranks[0].folder / "flight_0").symlink_to("/etc/passwd")
    os.mkfifo(ranks[1].folder / "flight_1")
    with (ranks[2].folder / "flight_2").open("wb") as file:
        file.truncate(MOST_BYTES + 1)
    piece = asyncio.run(recorded(Scene(ranks, ENOUGH_S), {}))
    assert piece.missing == "ranks 0, 1, 2 (the rank had exited)"


def test_what_ranks_wrote_as_they_ended_is_read_and_nothing_else(tmp_path: Path) -> None:
    """A13.3: a rank that still lives, a link, a pipe and an empty file each have a reason."""
    ranks = [rank(tmp_path, number, is_gone=True) for number in range(4)]
    ranks.append(rank(tmp_path, 4, os.getpid()))
    written = b'Current thread 0x7f (most recent call first):\n  File "/a/b.py", line 3 in f\n'
    (ranks[0].folder / "stacks").write_bytes(written)
    (ranks[1].folder / "stacks").symlink_to(ranks[0].folder / "stacks")
    os.mkfifo(ranks[2].folder / "stacks")
    (ranks[3].folder / "stacks").touch()
    found = asyncio.run(written_stacks(Scene(ranks, ENOUGH_S), CLOCK))
    assert found is not None
    assert [(one.rank, one.content) for one in found.members] == [(0, written)]
    assert found.summary.startswith("rank 0: f (b.py:3); ")
    assert found.missing == {
        **dict.fromkeys((1, 2, 3), "the rank had exited"),
        4: "it has not ended",
    }


def stacks(seen: list[RankSeen], *, may_pause: bool = False, native: bool = False) -> EvidenceFound:
    scene = Scene(seen, ENOUGH_S, may_pause=may_pause)
    found = asyncio.run(StacksReader(native=native).stacks(scene, CLOCK))
    assert found is not None
    return found


def threads(found: EvidenceFound) -> list[dict[str, Any]]:
    (member,) = found.members
    decoded: list[dict[str, Any]] = json.loads(member.content)
    return decoded


SLEEPS = "import time\ndef waits_for_data():\n    time.sleep(1000)\nwaits_for_data()"
HOLDS = "import ctypes\ndef holds():\n    ctypes.PyDLL(None).sleep(1000)\nholds()"


@pytest.mark.parametrize(("source", "name"), [(SLEEPS, "waits_for_data"), (HOLDS, "holds")])
def test_stacks_are_read_from_outside(tmp_path: Path, source: str, name: str) -> None:
    """Also of a rank that holds the interpreter's lock (A7.5)."""
    with python(source) as pid:
        seen = [rank(tmp_path, 0, pid)]
        found = until(
            lambda: stacks(seen),
            f"it is in {name}",
            holds=lambda found: found.summary.startswith(f"rank 0: {name} (<string>:"),
        )
    (main,) = threads(found)
    assert [frame["name"] for frame in main["frames"]] == [name, "<module>"]
    assert main["owns_gil"] == (source == HOLDS)
    assert ("holds the interpreter's lock" in found.summary) == (source == HOLDS)


SENDS = """
import signal
source = '''
def send(tensor, dst, group_dst, secret):
    signal.pause()
'''
exec(compile(source, "/v/torch/distributed/distributed_c10d.py", "exec"))
def train(password):
    send([1.0], 5, None, "s3cret")
train("pa55word")
"""


def test_the_peer_of_a_transfer_is_read_and_no_other_value(tmp_path: Path) -> None:
    with python(SENDS) as pid:
        seen = [rank(tmp_path, 0, pid)]
        # Without values where the process had changed while it was read.
        found = until(
            lambda: stacks(seen),
            "it sends, and its values are read",
            holds=lambda it: (
                it.summary.startswith("rank 0: send") and b'"locals"' in it.members[0].content
            ),
        )
    (main,) = threads(found)
    (own,) = (frame for frame in main["frames"] if frame["name"] == "send")
    assert own["locals"] == [{"name": "dst", "repr": "5"}]
    assert sum("locals" in frame for frame in main["frames"]) == 1
    text = found.members[0].content
    assert b"s3cret" not in text
    assert b"pa55word" not in text
    read = read_stacks(text, 0).main
    assert read is not None
    assert (read.call, read.arguments) == ("send", {"dst": 5})


@pytest.mark.parametrize("native", [False, True])
def test_a_rank_that_is_stopped_has_stacks_and_stays_stopped(tmp_path: Path, native: bool) -> None:
    with python(SLEEPS) as pid:
        os.kill(pid, signal.SIGSTOP)
        until(lambda: _state(pid) == "T", "it is stopped")
        found = stacks([rank(tmp_path, 0, pid)], may_pause=True, native=native)
        assert _state(pid) == "T"
    assert "rank 0: " in found.summary
    assert found.missing == {}


def test_native_frames_are_read_only_where_ranks_may_pause(tmp_path: Path) -> None:
    with python(HOLDS) as pid:
        until(lambda: "nanosleep" in Path(f"/proc/{pid}/wchan").read_text(), "it sleeps")
        seen = rank(tmp_path, 0, pid)
        (paused,) = threads(stacks([seen], may_pause=True, native=True))
        (running,) = threads(stacks([seen], native=True))
        assert _state(pid) == "S"
    assert len(paused["frames"]) > len(running["frames"])
    assert all(len(frame["name"]) <= 300 for frame in paused["frames"])


def test_what_is_not_python_has_a_reason(tmp_path: Path) -> None:
    with subprocess.Popen(["/bin/sleep", "1000"]) as process:
        until(lambda: _state(process.pid) == "S", "it sleeps")
        found = stacks([rank(tmp_path, 0, process.pid)])
        process.kill()
    assert found.missing[0].startswith("py-spy: Failed to find python version")


def test_without_py_spy_the_rank_s_own_traceback_is_taken(tmp_path: Path) -> None:
    ranks = [rank(tmp_path, 0, os.getpid()), rank(tmp_path, 1, os.getpid())]
    answers: dict[int, Answers] = {0: {"dump_traceback": lambda: b'  File "a.py", line 1 in f'}}
    piece = asyncio.run(recorded(Scene(ranks, ENOUGH_S), answers, "stacks"))
    kept = unpack(piece.packed())
    assert [(one.name, one.content[:12]) for one in kept.members] == [
        ("rank_0.txt", b'  File "a.py')
    ]
    assert kept.missing == {1: "py-spy is not installed: pip install 'everstep[agent]'"}


def test_a_rank_that_leaves_is_not_asked_for_its_traceback(tmp_path: Path) -> None:
    """A request for the lock of an interpreter that shuts down would end the rank by SIGABRT."""
    leaving = rank(tmp_path, 0, os.getpid())
    words = map_page(str(leaving.folder / "page"))
    words[layout.MAGIC_AT] = layout.MAGIC
    words[layout.PHASE] = layout.PHASE_ENDED

    async def collected() -> tuple[Piece, list[str]]:
        async with worker_server(leaving.folder, {"dump_traceback": lambda: b"main"}) as asked:
            reader = StacksReader(program="").stacks
            (piece,) = await collect({"stacks": reader}, Scene([leaving], ENOUGH_S), CLOCK)
        return piece, asked

    piece, asked = asyncio.run(collected())
    assert asked == []
    assert "; and its script has ended" in piece.missing


def test_where_ptrace_is_forbidden_the_reason_says_so(tmp_path: Path) -> None:
    reader = tmp_path / "py-spy"
    reader.write_text("#!/bin/sh\necho 'Permission Denied: Try running again' >&2\nexit 1\n")
    reader.chmod(0o755)
    scene = Scene([rank(tmp_path, 0, os.getpid())], ENOUGH_S)
    found = asyncio.run(StacksReader(program=str(reader)).stacks(scene, CLOCK))
    assert found is not None
    assert found.missing[0] == (
        "py-spy may not read it (ptrace is forbidden): see `everstep check ptrace`"
    )


def test_a_rank_on_its_way_to_where_it_waits_is_read_there(tmp_path: Path) -> None:
    """It is no suspect for code in which nobody can see it a moment later."""
    reader, said = tmp_path / "py-spy", tmp_path / "looks"
    thread = {
        "pid": 7, "thread_id": 1, "thread_name": "MainThread", "os_thread_id": 7, "active": True,
    }  # fmt: skip
    for number, (name, owns) in enumerate({"get_rank": True, "all_reduce": False}.items(), 1):
        frames = [{"name": name, "filename": "distributed_c10d.py", "line": number}]
        dump = json.dumps([thread | {"owns_gil": owns, "frames": frames}])
        (tmp_path / f"dump{number}").write_text(dump)
    reader.write_text(f"#!/bin/sh\necho >> {said}\nexec cat {tmp_path}/dump$(wc -l < {said})\n")
    reader.chmod(0o755)
    scene = Scene([rank(tmp_path, 0, os.getpid())], ENOUGH_S)
    found = asyncio.run(StacksReader(program=str(reader)).stacks(scene, CLOCK))
    assert found is not None
    assert found.summary == "rank 0: all_reduce (distributed_c10d.py:2)"


def test_a_reader_that_hangs_is_killed(tmp_path: Path) -> None:
    reader, said = tmp_path / "py-spy", tmp_path / "pid"
    reader.write_text(f"#!/bin/sh\necho $$ > {said}\nexec sleep 1000\n")
    reader.chmod(0o755)
    scene = Scene([rank(tmp_path, 0, os.getpid())], 4.0)
    found = asyncio.run(StacksReader(program=str(reader)).stacks(scene, CLOCK))
    assert found is not None
    assert found.missing == {0: "py-spy has not ended in time"}
    assert not Path(f"/proc/{said.read_text().strip()}").exists()


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
