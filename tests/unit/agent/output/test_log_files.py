"""The files of ranks: where they lie, what their end says, and what is refused."""

import os
import time
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest

from everstep.ids import BadNameError
from everstep.settings import read_secret
from everstep_services.agent.output.log_files import (
    LogFiles,
    LogFolderError,
    LogOwner,
    first_error,
    tail,
)


@pytest.fixture
def logs(tmp_path: Path) -> LogFiles:
    return LogFiles(tmp_path / "logs", "llama")


def test_the_layout(logs: LogFiles, tmp_path: Path) -> None:
    folder = logs.make(3, 17)
    assert folder == tmp_path / "logs" / "llama" / "round-3" / "rank-17"
    assert sorted(os.listdir(folder)) == ["stderr", "stdout"]
    assert logs.file(3, 17, "stderr") == folder / "stderr"
    for path in (folder, folder.parent, folder.parent.parent):
        assert path.stat().st_mode & 0o777 == 0o700
    assert (folder / "stdout").stat().st_mode & 0o777 == 0o600


def test_a_second_run_appends_and_knows_where_it_begins(logs: LogFiles) -> None:
    logs.make(1, 0)
    assert logs.start(1, 0, "stdout") == 0
    logs.file(1, 0, "stdout").write_bytes(b"first run\n")
    again = LogFiles(logs.folder(1, 0).parents[2], "llama")
    again.make(1, 0)
    assert again.file(1, 0, "stdout").read_bytes() == b"first run\n"
    assert again.start(1, 0, "stdout") == 10
    with again.file(1, 0, "stdout").open("ab") as file:
        file.write(b"second run\n")
    start = again.start(1, 0, "stdout")
    assert tail(again.file(1, 0, "stdout"), start=start) == "second run\n"


def test_whose_output_it_is(logs: LogFiles) -> None:
    folder = logs.make(1, 2)
    about = LogOwner(
        job="llama", round=1, rank=2, node="n1", slot=0, local_rank=2, pid=77,
        started_at=datetime(2026, 1, 2, tzinfo=UTC),
    )  # fmt: skip
    logs.say(about)
    logs.say(msgspec.structs.replace(about, pid=78))
    found = msgspec.json.decode((folder / "about.json").read_bytes())
    assert found == {
        "job": "llama", "round": 1, "rank": 2, "node": "n1", "slot": 0, "local_rank": 2,
        "pid": 78, "started_at": "2026-01-02T00:00:00Z",
    }  # fmt: skip
    assert sorted(os.listdir(folder)) == ["about.json", "stderr", "stdout"]


@pytest.mark.parametrize("level", ["llama", "llama/round-1", "llama/round-1/rank-0"])
def test_a_link_on_the_way_is_refused(logs: LogFiles, tmp_path: Path, level: str) -> None:
    """A folder that is a link is not followed (A13.3)."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    link = tmp_path / "logs" / level
    link.parent.mkdir(parents=True)
    link.symlink_to(elsewhere)
    with pytest.raises(LogFolderError, match="choose another with --log-dir"):
        logs.make(1, 0)
    assert list(elsewhere.iterdir()) == []


def test_a_link_in_place_of_a_file_is_refused(logs: LogFiles, tmp_path: Path) -> None:
    """What the link names is not touched (A13.3)."""
    victim = tmp_path / "victim"
    victim.write_text("precious")
    folder = logs.make(1, 0)
    (folder / "stdout").unlink()
    (folder / "stdout").symlink_to(victim)
    with pytest.raises(LogFolderError):
        logs.make(1, 0)
    assert victim.read_text() == "precious"
    assert tail(folder / "stdout") == ""


def test_a_pipe_in_place_of_a_file_is_refused_at_once(logs: LogFiles) -> None:
    folder = logs.make(1, 0)
    (folder / "stderr").unlink()
    os.mkfifo(folder / "stderr")
    with pytest.raises(LogFolderError):
        logs.make(1, 0)


def test_a_file_in_place_of_the_folder_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("")
    with pytest.raises(LogFolderError, match="cannot be kept in .*: .*"):
        LogFiles(tmp_path / "x", "j").make(1, 0)


@pytest.mark.parametrize("job", ["../x", "", "a/b", "."])
def test_a_job_cannot_lead_elsewhere(tmp_path: Path, job: str) -> None:
    """A job's name with a path is refused (A13.3)."""
    with pytest.raises(BadNameError):
        LogFiles(tmp_path, job)


# -- the tail ------------------------------------------------------------------------------


def written(tmp_path: Path, data: bytes) -> Path:
    path = tmp_path / "stderr"
    path.write_bytes(data)
    return path


@pytest.mark.parametrize(
    ("data", "most", "end"),
    [
        (b"", 10, ""),
        (b"one\ntwo\n", 100, "one\ntwo\n"),
        (b"one\ntwo\n", 5, "two\n"),
        (b"one\ntwo\n", 4, "two\n"),
        (b"one\ntwo\n", 3, "wo\n"),
        (b"one\ntwo", 4, "two"),
        ("äöü".encode(), 3, "ü"),
        (b"a\xff\xfeb\n", 100, "a��b\n"),
        (b"no newline at all", 7, "at all"[-7:].rjust(7)),
    ],
)
def test_the_end_from_a_lines_beginning(tmp_path: Path, data: bytes, most: int, end: str) -> None:
    assert tail(written(tmp_path, data), most) == end


def test_the_end_is_never_longer_than_asked(tmp_path: Path) -> None:
    text = tail(written(tmp_path, b"\xff" * 300_000), 64 * 1024)
    assert 0 < len(text.encode()) <= 64 * 1024


def test_secrets_are_not_in_it(tmp_path: Path) -> None:
    """The end of a log is masked before it is sent (A13.5)."""
    (tmp_path / "password").write_text("hunter22-of-tail\n")
    read_secret(tmp_path / "password")
    path = written(tmp_path, b"ValueError: hunter22-of-tail evs_abcdef\n")
    assert tail(path) == "ValueError: *** evs_***\n"
    assert first_error(path) == "ValueError: *** evs_***"


def test_no_file_no_end(tmp_path: Path) -> None:
    assert tail(tmp_path / "none") == ""
    assert first_error(tmp_path / "none") == ""


# -- the first error -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "line",
    [
        "ValueError: bad batch",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB",
        "AssertionError",
        "[rank3]: RuntimeError: NCCL communicator was aborted",
        "[rank3]:[E1121 10:00:00.123 ProcessGroupNCCL.cpp:616] Watchdog caught collective",
        "2026-11-21 10:00:00 ERROR trainer: loss is NaN",
        "node7:811:911 [3] misc/socket.cc NCCL WARN socketProgress: connection closed",
        "terminate called after throwing an instance of 'c10::Error'",
        "Fatal Python error: Segmentation fault",
        "CUDA error: device-side assert triggered",
        "SystemExit: 3",
    ],
)
def test_a_line_that_reports_an_error(tmp_path: Path, line: str) -> None:
    data = f"step 1 loss 2.5\n0 errors so far\n{line}\nOther: ValueError later\nKeyError: 'x'\n"
    assert first_error(written(tmp_path, data.encode())) == line


@pytest.mark.parametrize(
    "line",
    [
        "step 7 loss 0.1 error_rate 0.5",
        "no errors",
        "ERROR: 0",
        "  raise ValueError(x)",
        "Traceback (most recent call last):",
        "training with ErrorFeedback: on",
        "exit",
    ],
)
def test_a_line_that_does_not(tmp_path: Path, line: str) -> None:
    assert first_error(written(tmp_path, f"{line}\n".encode())) == ""


def test_the_exception_is_found_below_its_traceback(tmp_path: Path) -> None:
    data = b"""Traceback (most recent call last):
  File "train.py", line 8, in <module>
    raise KeyError("Error: x")
KeyError: 'Error: x'
"""
    assert first_error(written(tmp_path, data)) == "KeyError: 'Error: x'"


@pytest.mark.parametrize("ends_a_block", [False, True])
def test_an_uncaught_error_of_native_code_has_its_text(tmp_path: Path, ends_a_block: bool) -> None:
    """The type alone does not tell sizes that differ from a socket that failed (A7.2)."""
    head = b"terminate called after throwing an instance of 'gloo::EnforceNotMet'\n"
    before = b"y" * (64 * 1024 - len(head) - 1) + b"\n" if ends_a_block else b""
    data = before + head + b"  what():  op.preamble.length <= op.nbytes. 40 vs 4\nAborted\n"
    assert first_error(written(tmp_path, data)) == (
        "terminate called after throwing an instance of 'gloo::EnforceNotMet'; "
        "what(): op.preamble.length <= op.nbytes. 40 vs 4"
    )


def test_it_is_short_and_plain(tmp_path: Path) -> None:
    data = b"ValueError: \x1b[31m\0" + "ü".encode() * 5000 + b"\n"
    found = first_error(written(tmp_path, data))
    assert len(found.encode()) <= 1024
    assert found.isprintable()


def test_a_line_across_two_blocks(tmp_path: Path) -> None:
    filler = b"x" * 63 + b"\n"
    for shift in (0, 1, 7, 40):
        data = filler * 1023 + b"y" * shift + b"\nValueError: across blocks\n" + filler
        assert first_error(written(tmp_path, data)) == "ValueError: across blocks"


@pytest.mark.parametrize(
    "data",
    [b"step 1 loss 2.5 and some more words to read\n" * 200_000, b"E" * (9 << 20), b"\n" * 2**22],
    ids=["lines", "one line", "empty lines"],
)
def test_a_large_file_takes_a_bounded_time(tmp_path: Path, data: bytes) -> None:
    path = written(tmp_path, data)
    began = time.thread_time()
    assert first_error(path) == ""
    assert time.thread_time() - began < 3


def test_nothing_of_an_earlier_run(tmp_path: Path) -> None:
    path = written(tmp_path, b"ValueError: old\nfine\n")
    assert first_error(path, start=16) == ""
