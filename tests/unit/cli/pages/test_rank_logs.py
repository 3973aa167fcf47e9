"""Logs from files: by rank, whole lines, safe on a terminal, and followed as they grow."""

import json
import re
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from everstep.units import size
from everstep_services.cli.__main__ import main
from everstep_services.cli.api.client import Api
from everstep_services.cli.cells import aligned, bar, span
from everstep_services.cli.errors import CliError, Exit
from everstep_services.cli.invocation import Invocation
from everstep_services.cli.pages.rank_logs import (
    LogLine,
    LogSelection,
    kept_lines,
    live_lines,
    newest_round,
    past_lines,
    print_lines,
    rank_files,
)


def write(root: Path, number: int, rank: int, stream: str, data: bytes, node: str = "n1") -> Path:
    folder = root / "j" / f"round-{number}" / f"rank-{rank}"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / stream).open("ab") as file:
        file.write(data)
    about = {"job": "j", "round": number, "rank": rank, "node": node, "slot": 0, "pid": 7}
    (folder / "about.json").write_text(json.dumps(about))
    return folder / stream


def texts(root: Path, wanted: LogSelection) -> list[str]:
    found = past_lines(rank_files(root, wanted), wanted.last)
    return [f"{one.node}:{one.rank}:{one.stream}:{one.text}" for one in found]


def test_the_newest_round_is_shown_by_rank(tmp_path: Path) -> None:
    write(tmp_path, 2, 0, "stdout", b"old\n")
    for rank in (10, 9):
        write(tmp_path, 10, rank, "stderr", b"e\n", node=f"n{rank}")
        write(tmp_path, 10, rank, "stdout", b"o\n", node=f"n{rank}")
    assert texts(tmp_path, LogSelection("j")) == [
        "n9:9:stdout:o",
        "n9:9:stderr:e",
        "n10:10:stdout:o",
        "n10:10:stderr:e",
    ]
    assert texts(tmp_path, LogSelection("j", round=2)) == ["n1:0:stdout:old"]
    assert texts(tmp_path, LogSelection("j", ranks=(9,), streams=("stderr",))) == ["n9:9:stderr:e"]
    assert texts(tmp_path, LogSelection("j", node="n10", streams=("stdout",))) == [
        "n10:10:stdout:o"
    ]
    assert (
        texts(tmp_path, LogSelection("j", round=3)) == texts(tmp_path, LogSelection("other")) == []
    )
    assert newest_round(tmp_path / "nothing") is None


def test_every_line_is_shown_also_one_without_an_end(tmp_path: Path) -> None:
    write(tmp_path, 1, 0, "stdout", "a\r\n\nnaïve\nlast".encode() + b"\xff")
    assert [text.rpartition(":")[2] for text in texts(tmp_path, LogSelection("j"))] == [
        "a",
        "",
        "naïve",
        "last\ufffd",
    ]
    assert texts(tmp_path, LogSelection("j", last=1)) == ["n1:0:stdout:last\ufffd"]


def test_files_without_their_description_are_shown_all_the_same(tmp_path: Path) -> None:
    for content in ("", "[]", '{"rank":"x"}'):
        path = write(tmp_path, 1, 3, "stdout", b"a\n")
        path.with_name("about.json").write_text(content)
        assert texts(tmp_path, LogSelection("j", ranks=(3,)))[0] == "-:3:stdout:a"


def test_following_shows_what_is_added_and_rounds_that_begin(tmp_path: Path) -> None:
    write(tmp_path, 1, 0, "stdout", b"one\nhal")
    happens = iter([(1, 0, "stdout", b"f\n"), None, (2, 1, "stderr", b"next\n")])

    def sleep(_: float) -> None:
        written = next(happens)
        if written is not None:
            write(tmp_path, *written)

    lines = live_lines(tmp_path, LogSelection("j"), sleep=sleep)
    found = [(one.round, one.text) for one in islice(lines, 3)]
    assert found == [(1, "one"), (1, "half"), (2, "next")]


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, 1, 0, "stdout", b"a\n")
    files = rank_files(tmp_path, LogSelection("j"))
    path.unlink()
    with pytest.raises(CliError, match=r"stdout cannot be read: No such file"):
        list(past_lines(files, None))


def test_a_terminal_obeys_nothing_but_colours(capsys: pytest.CaptureFixture[str]) -> None:
    said = ["\x1b[31mred\x1b[0m\t|", "\x1b[2J\x07\x00 cleared", "10%\r99%"]
    print_lines(Invocation(), "j", [LogLine(1, "n", 0, "stdout", text) for text in said])
    assert capsys.readouterr().out.splitlines() == [
        "n:0| \x1b[31mred\x1b[0m\t|",
        "n:0| \ufffd[2J\ufffd\ufffd cleared",
        "n:0| 99%",
    ]


def test_usage_errors_say_what_is_wrong(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVERSTEP_STATE_DIR", str(tmp_path))
    monkeypatch.delenv("EVERSTEP_CLIENT__URL", raising=False)
    for arguments, code, said in (
        (["j", "-f", "-n", "3"], Exit.USAGE, "leave out --lines"),
        (["j", "-o", "name"], Exit.USAGE, "lines have no names"),
        (["../up"], Exit.USAGE, "cannot name a job"),
        (["j"], Exit.NOT_FOUND, f"{tmp_path / 'logs'} has no such logs of j"),
        (["j", "-f"], Exit.NOT_FOUND, "--log-dir"),
    ):
        assert main(["logs", *arguments]) == code
        assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (None, "-"),
        (0.0, "0 ms"),
        (0.0123, "12 ms"),
        (0.9996, "1 s"),
        (1.157, "1.16 s"),
        (99.9, "99.9 s"),
        (100, "1 min 40 s"),
        (3600, "1 h 00 min"),
        (9300, "2 h 35 min"),
    ],
)
def test_spans_are_short(seconds: float | None, said: str) -> None:
    assert span(seconds) == said


def test_columns_line_up_and_bars_have_an_end() -> None:
    rows = [("a", 1, "x"), ("long", 22, None)]
    assert list(aligned(rows)) == ["  a     1   x", "  long  22"]
    assert list(aligned([])) == []
    assert (len(bar(1, 1)), bar(0, 1), bar(1, 0)) == (30, "", "")
    assert [size(812), size(4096), size(3 << 20)] == ["812 B", "4.0 KiB", "3.0 MiB"]
    assert [size(12 << 30), size(3 << 50)] == ["12.0 GiB", "3072.0 TiB"]


class _WithoutFailures(Api):
    """A job with this launcher, none of whose ranks has failed."""

    def __init__(self, launcher: str) -> None:
        self._labels = {"launcher": launcher} if launcher else {}

    def get(self, path: str, query: Mapping[str, Any] | None = None) -> Any:
        assert path == "jobs/j"
        return {"labels": self._labels}

    def pages(self, *_: object, **__: object) -> Iterator[dict[str, Any]]:
        return iter(())


@pytest.mark.parametrize(
    ("launcher", "where"),
    [
        ("", "on its nodes: run this there, or name the folder with --log-dir"),
        ("torchrun", "where torchrun, which has started its ranks, has put them"),
    ],
)
def test_where_the_logs_of_a_job_without_failures_are(launcher: str, where: str) -> None:
    """The output of a job that is only watched was never on its nodes' log folders."""
    with pytest.raises(CliError, match=re.escape(f"the whole of them is {where}")):
        next(kept_lines(_WithoutFailures(launcher), LogSelection("j")))
