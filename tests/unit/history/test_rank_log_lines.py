"""Lines of pieces: their times, their numbers, their order, and what is replaced in them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from everstep.messages.rank_logs import LogHeader, LogPiece
from everstep_services.history.rank_logs.lines import (
    LONGEST_LINE,
    RankLine,
    SentOnce,
    cycle_text,
    lines_of,
    merged,
)


def piece(data: bytes, **changes: object) -> LogPiece:
    header = replace(LogHeader(file="f", offset=0, size=len(data), line=0), **changes)
    return LogPiece(job="j", round=1, node="n0", rank=0, stream="stdout", header=header, data=data)


def line(at_us: int | None, text: str, rank: int = 0) -> RankLine:
    return RankLine(1, "n0", rank, "stdout", 0, at_us, text)


def test_lines_have_numbers_and_times() -> None:
    lines = list(lines_of(piece(b"a\nb\r\nc\n", line=7, times=((2, 10), (4, 20)))))
    assert [(one.number, one.at_us, one.text) for one in lines] == [
        (7, 10, "a"),
        (8, 10, "b"),
        (9, 20, "c"),
    ]
    assert not any(one.is_partial for one in lines)


def test_a_piece_without_times_has_lines_all_the_same() -> None:
    assert [one.at_us for one in lines_of(piece(b"a\nb\n"))] == [None, None]


def test_bytes_that_are_not_text_are_replaced() -> None:
    assert [one.text for one in lines_of(piece(b"\xff ok \x00\n\n"))] == ["� ok \0", ""]


def test_a_very_long_line_comes_in_parts() -> None:
    lines = list(lines_of(piece(b"x" * (2 * LONGEST_LINE + 1) + b"\nend\n")))
    assert [(len(one.text), one.number, one.is_partial) for one in lines] == [
        (LONGEST_LINE, 0, True),
        (LONGEST_LINE, 0, True),
        (1, 0, False),
        (3, 1, False),
    ]


def test_a_line_that_goes_on_says_so() -> None:
    assert [one.is_partial for one in lines_of(piece(b"a\nhalf", is_open=True))] == [False, True]


def test_what_was_sent_twice_is_given_once() -> None:
    """An agent that was killed before it could note what it had sent."""
    once = SentOnce()
    sent = [
        piece(b"a\nb\n"),
        piece(b"a\nb\n"),
        piece(b"b\nc\n", offset=2, line=1),
        piece(b"d\n", offset=6, line=3),
        piece(b"new\n", file="g"),
    ]
    texts = [one.text for one_piece in sent for one in once.fresh(one_piece)]
    assert texts == ["a", "b", "c", "d", "new"]


def test_lines_are_merged_by_time_and_each_stream_stays_in_order() -> None:
    """A11.3: a clock that is set back reorders no stream of one rank."""
    given = [line(10, "a0"), line(30, "a1"), line(5, "a2"), line(20, "b0", 1), line(None, "b1", 1)]
    assert [one.text for one in merged(given)] == ["a0", "b0", "b1", "a1", "a2"]


def test_the_file_of_a_cycle_is_as_nvrx_writes_it() -> None:
    lines = [line(1, "hello"), line(2, "\0 there", 4), line(3, "x", 12)]
    assert cycle_text(lines, 16) == " 0: hello\n 4: <NUL> there\n12: x\n"
    assert cycle_text(lines[:1], 1) == "0: hello\n"


@given(st.lists(st.binary(max_size=30), min_size=1, max_size=10))
def test_no_text_is_lost(parts: list[bytes]) -> None:
    data = b"\n".join(parts) + b"\n"
    texts = [one.text for one in lines_of(piece(data))]
    wanted = [part.decode("utf-8", "replace").removesuffix("\r") for part in data[:-1].split(b"\n")]
    assert texts == wanted


@pytest.mark.parametrize("data", [b"", b"\n"])
def test_an_empty_piece_is_an_empty_line(data: bytes) -> None:
    assert [one.text for one in lines_of(piece(data))] == [""]
