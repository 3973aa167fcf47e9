"""What py-spy and faulthandler print is read, and so is what is left of it."""

import faulthandler
import random
import tarfile
import tempfile
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.evidence.archive import ArchiveMember, pack
from everstep_services.attribution.stack_analysis import dumps
from everstep_services.attribution.stack_analysis.dumps import BadStacksError, read_stacks
from everstep_services.attribution.stack_analysis.files import NoStacksError, read_paths
from everstep_services.attribution.stack_analysis.stacks import RankStacks, Unreadable
from everstep_services.cli.__main__ import main
from tests.fakes import stack_dumps as fake

_SPY = """\
Process 4711: python train.py --steps 9
Python v3.11.7 (/usr/bin/python3.11)

Thread 4711 (idle): "MainThread"
    all_reduce (torch/distributed/distributed_c10d.py:3252)
    main (train.py:61)
    <module> (train.py:80)
Thread 4720 (active+gil): "prefetch"
    <lambda> (train.py:12)
Process 4730: python train.py --steps 9
Python v3.11.7 (/usr/bin/python3.11)

Thread 4730 (idle): "MainThread"
    pthread_cond_wait (libc.so.6)
    _worker_loop (torch/utils/data/_utils/worker.py:349)
"""
_FAULT = """\
Fatal Python error: Aborted

Thread 0x00007f3b8a7fc700 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 324 in wait
  File "/usr/lib/python3.11/queue.py", line 180 in get
  File "/home/u/train.py", line 12 in ahead

Current thread 0x00007f3b9a7fc700 [train] (most recent call first):
  File "/home/u/train.py", line 61 in main
  File "/home/u/train.py", line ??? in <module>
  ...
"""


def test_what_py_spy_prints_for_people_is_read() -> None:
    main_thread, other, child = read_stacks(_SPY.encode(), 3).threads
    assert (main_thread.is_main, main_thread.is_idle) == (True, True)
    assert [one.name for one in main_thread.frames] == ["all_reduce", "main", "<module>"]
    assert main_thread.frames[1].line == 61
    assert (other.name, other.has_interpreter, other.is_idle) == ("prefetch", True, False)
    assert (child.child, child.is_main, child.frames[0].is_native) == (4730, False, True)


def test_what_faulthandler_writes_is_read() -> None:
    other, main_thread = read_stacks(_FAULT.encode(), 0).threads
    assert (main_thread.is_main, main_thread.name) == (True, "train")
    assert [one.line for one in main_thread.frames] == [61, 0]
    assert other.frames[0].function == "wait"


def test_who_writes_a_dump_does_not_hold_up_the_rank() -> None:
    """torch's worker server asks for it, from a thread without Python."""
    text = _FAULT.replace("[train] ", "")
    asked = "Current thread 0x01 (most recent call first):\n  <no Python frame>\n\n"
    stacks = read_stacks((asked + text.replace("Current thread", "Thread")).encode(), 0)
    assert [one.has_interpreter for one in stacks.threads] == [False] * 3
    assert stacks.main is not None
    assert stacks.main.frames[0].name == "main"


def test_a_real_dump_of_faulthandler_is_read() -> None:
    go = threading.Event()
    thread = threading.Thread(target=go.wait)
    thread.start()
    with tempfile.TemporaryFile("w+b") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        stacks = read_stacks(file.read(), 0)
    go.set()
    thread.join()
    assert len(stacks.threads) >= 2
    assert stacks.main is not None
    assert any("test_a_real_dump" in one.name for one in stacks.main.frames)


def test_what_is_whole_of_a_cut_dump_is_used() -> None:
    whole = fake.dump(fake.thread(fake.REDUCE), fake.thread(fake.POOL, name="pool"))
    at = whole.index(b'"pool"')
    stacks = read_stacks(whole[:at], 5)
    assert len(stacks.threads) == 1
    assert stacks.main is not None
    assert stacks.problems == ("its dump is cut or damaged after 1 threads",)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "it is empty"),
        (b" \n", "it is empty"),
        (b"[]", "lists no thread"),
        (b"[" * 200_000, "not what py-spy"),
        (b'[{"frames": ' + b"[" * 100_000, "not what py-spy"),
        (b'[{"frames": [{"name": 3}]}]', "not what py-spy"),
        (b"\x80\x04\x95 pickle", "it has no stack"),
        (b"Error: Permission Denied: Try running again with elevated permissions", "has no stack"),
    ],
)
def test_what_is_no_dump_is_one_reason(content: bytes, reason: str) -> None:
    """A13.3: bytes of strangers never do harm."""
    with pytest.raises(BadStacksError, match=reason):
        read_stacks(content, 0)


def test_a_dump_that_is_too_large_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A13.3"""
    monkeypatch.setattr(dumps, "_MOST_BYTES", 100)
    with pytest.raises(BadStacksError, match="it has 101 bytes; at most 100 are read"):
        read_stacks(b"[" * 101, 0)


def test_endless_stacks_are_cut() -> None:
    deep = fake.dump(fake.thread([f"f{number} /x.py:1" for number in range(5000)]))
    assert len(read_stacks(deep, 0).threads[0].frames) == 512
    many = fake.dump(*[fake.thread(["f /x.py:1"], name=str(one)) for one in range(5000)])
    stacks = read_stacks(many, 0)
    assert len(stacks.threads) == 4096
    assert any("first 4096 threads" in one for one in stacks.problems)


def test_damage_anywhere_is_survived() -> None:
    """A13.3"""
    whole = fake.dump(fake.thread(fake.SAVE), fake.thread(fake.WORKER, pid=7))
    for seed in range(300):
        dice = random.Random(seed)
        content = bytearray(dice.choice((whole, _SPY.encode(), _FAULT.encode())))
        for _ in range(dice.randrange(1, 9)):
            content[dice.randrange(len(content))] = dice.randrange(256)
        _read_or_refuse(bytes(content[: dice.randrange(len(content))]))


@given(st.binary(max_size=200))
def test_any_bytes_are_survived(content: bytes) -> None:
    _read_or_refuse(content)
    _read_or_refuse(b"[" + content)


def _read_or_refuse(content: bytes) -> None:
    try:
        assert read_stacks(content, 0).threads
    except BadStacksError as error:
        assert str(error)


def test_a_folder_is_read_by_the_ranks_in_its_names(tmp_path: Path) -> None:
    (tmp_path / "rank_10.json").write_bytes(fake.dump(fake.thread(fake.REDUCE)))
    (tmp_path / "py-spy.2.txt").write_text(_SPY)
    (tmp_path / "train.py").write_text("print()")
    (tmp_path / "missing.json").write_text('{"4": "it is gone"}')
    found = list(read_paths([tmp_path]))
    assert {one.rank for one in found} == {2, 4, 10}
    assert [one.reason for one in found if isinstance(one, Unreadable)] == ["it is gone"]


def test_archives_of_nodes_are_read(tmp_path: Path) -> None:
    """A7.2: also why a rank has none."""
    stacks = fake.dump(fake.thread(fake.REDUCE))
    packed = pack(
        [ArchiveMember(3, "json", stacks), ArchiveMember(4, "txt", b"")], {5: "it does not answer"}
    )
    (tmp_path / "node-1.tar.gz").write_bytes(packed)
    (tmp_path / "node-2.tar.gz").write_bytes(packed[:50])
    found = list(read_paths([tmp_path]))
    assert [one.rank for one in found if isinstance(one, RankStacks)] == [3]
    reasons = {one.rank: one.reason for one in found if isinstance(one, Unreadable)}
    assert reasons[4] == "it is empty"
    assert reasons[5] == "it does not answer"
    assert reasons[None]


def test_foreign_archives_are_one_reason(tmp_path: Path) -> None:
    """A13.3: a path that leads out is refused, and nothing is written."""
    with tarfile.open(tmp_path / "all.tar.gz", "w:gz") as tar:
        tar.addfile(tarfile.TarInfo("../rank_1.json"))
    (found,) = read_paths([tmp_path / "all.tar.gz"])
    assert isinstance(found, Unreadable)


def test_files_without_a_rank_are_numbered(tmp_path: Path) -> None:
    for name in ("first", "second"):
        (tmp_path / name).write_text(_SPY)
    assert [one.rank for one in read_paths([tmp_path / "first", tmp_path / "second"])] == [0, 1]


def test_a_folder_without_stacks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NoStacksError, match=r"rank_7\.json"):
        list(read_paths([tmp_path]))


def test_the_command_says_what_is_wrong_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["stacks", "analyze", str(tmp_path / "nowhere")]) == 2
    assert "does not exist" in capsys.readouterr().err
    (tmp_path / "rank_1.json").write_bytes(b"{}")
    assert main(["stacks", "analyze", str(tmp_path)]) == 2
    assert "rank_1.json was left out" in capsys.readouterr().err


def test_the_command_prints_text_json_and_folded_stacks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank, frames in enumerate((fake.REDUCE, fake.SAVE, fake.REDUCE)):
        (tmp_path / f"rank_{rank}.json").write_bytes(fake.dump(fake.thread(frames)))
    assert main(["stacks", "analyze", str(tmp_path)]) == 3
    assert capsys.readouterr().out.startswith("rank 1 saves a checkpoint")
    assert main(["stacks", "analyze", str(tmp_path), "-o", "json"]) == 3
    assert '"odd_ranks"' in capsys.readouterr().out
    assert main(["stacks", "analyze", str(tmp_path), "--folded"]) == 3
    assert capsys.readouterr().out.splitlines()[0].endswith(" 2")
