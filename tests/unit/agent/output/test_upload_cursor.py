"""How much of a file is sent, and when; without a file and without a store."""

import itertools
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.messages.rank_logs import PIECE_BYTES, LogHeader
from everstep_services.agent.output.upload_cursor import HOLD_S, MARKS_MOST, UploadCursor, resumed

SECOND = 1_000_000


@pytest.fixture
def new_name() -> Callable[[], str]:
    numbers = itertools.count(1)
    return lambda: f"file-{next(numbers)}"


def made() -> UploadCursor:
    return UploadCursor(rank=3, stream="stdout", file="file-0")


def sent(cursor: UploadCursor, data: bytes, now: float = 0.0) -> LogHeader | None:
    """Send one piece of what the file holds behind the cursor."""
    cut = cursor.cut(data[cursor.offset :][:PIECE_BYTES], now)
    if cut is None:
        return None
    cursor.sent(cut, now)
    return cut.header


def test_whole_lines_are_sent_and_the_rest_waits(new_name: Callable[[], str]) -> None:
    cursor, data = made(), b"one\ntwo\nthr"
    cursor.looked(len(data), 5 * SECOND, new_name)
    header = sent(cursor, data)
    assert header == LogHeader(
        file="file-0", offset=0, size=8, line=0, times=((3, 5 * SECOND),), is_open=False
    )
    assert sent(cursor, data, HOLD_S / 2) is None
    data += b"ee\n"
    cursor.looked(len(data), 6 * SECOND, new_name)
    header = sent(cursor, data, HOLD_S / 2)
    assert header is not None
    assert (header.offset, header.size, header.line) == (8, 6, 2)
    assert cursor.entry().lines == 3


def test_a_line_without_an_end_does_not_wait_for_ever(new_name: Callable[[], str]) -> None:
    """A question to a user, or a progress bar that only overwrites itself."""
    cursor, data = made(), b"Continue? "
    cursor.looked(len(data), SECOND, new_name)
    assert sent(cursor, data, 10.0) is None
    header = sent(cursor, data, 10.0 + HOLD_S)
    assert header is not None
    assert header.is_open
    assert cursor.offset == len(data)


def test_the_end_is_sent_when_the_rank_has_ended(new_name: Callable[[], str]) -> None:
    cursor, data = made(), b"last words"
    cursor.looked(len(data), SECOND, new_name)
    cursor.is_over = cursor.is_whole = True
    assert cursor.is_due(0.0, 60.0)
    assert not cursor.entry().is_over
    assert sent(cursor, data) is not None
    assert cursor.entry().is_over


def test_a_line_of_ten_megabytes_is_sent_in_parts(new_name: Callable[[], str]) -> None:
    cursor, data = made(), "é".encode() * 5_000_000 + b"\n"
    cursor.looked(len(data), SECOND, new_name)
    parts = []
    while cursor.offset < len(data):
        header = sent(cursor, data)
        assert header is not None
        assert header.size <= PIECE_BYTES
        parts.append(data[header.offset : header.offset + header.size])
        assert header.line == 0
    assert b"".join(parts) == data
    for part in parts:
        part.decode()  # no character is cut in two
    assert cursor.line == 1


def test_a_truncated_file_begins_again(new_name: Callable[[], str]) -> None:
    cursor, data = made(), b"one\ntwo\n"
    cursor.looked(len(data), SECOND, new_name)
    sent(cursor, data)
    cursor.looked(12, SECOND, new_name)  # four bytes that nobody has sent
    cursor.looked(4, 2 * SECOND, new_name)
    assert (cursor.file, cursor.offset, cursor.lost) == ("file-1", 0, 4)
    header = sent(cursor, b"new\n")
    assert header is not None
    assert (header.file, header.offset, header.line) == ("file-1", 0, 0)


def test_times_are_of_when_the_file_grew(new_name: Callable[[], str]) -> None:
    """A store that was away does not make lines younger."""
    cursor, data = made(), b""
    for second in range(1, 4):
        data += b"x\ny\n"
        cursor.looked(len(data), second * SECOND, new_name)
    header = sent(cursor, data, 100.0)
    assert header is not None
    assert header.times == ((2, SECOND), (4, 2 * SECOND), (7, 3 * SECOND))
    assert (cursor.first_us, cursor.last_us) == (SECOND, 3 * SECOND)


def test_times_are_bounded(new_name: Callable[[], str]) -> None:
    cursor = made()
    for length in range(1, 5 * MARKS_MOST):
        cursor.looked(length, length, new_name)
    assert len(cursor.marks) <= MARKS_MOST
    assert cursor.marks[-1] == (5 * MARKS_MOST - 1, 5 * MARKS_MOST - 1)


def test_small_output_is_sent_after_a_while_and_much_at_once(new_name: Callable[[], str]) -> None:
    cursor = made()
    assert not cursor.is_due(0.0, 2.0)
    cursor.looked(4, SECOND, new_name)
    assert cursor.is_due(0.0, 2.0)
    sent(cursor, b"one\n", 10.0)
    cursor.looked(8, SECOND, new_name)
    assert not cursor.is_due(11.0, 2.0)
    assert cursor.is_due(12.0, 2.0)
    cursor.looked(4 + PIECE_BYTES, SECOND, new_name)
    assert cursor.is_due(11.0, 2.0)


def test_another_agent_goes_on_where_one_has_died(new_name: Callable[[], str]) -> None:
    cursor, data = made(), b"one\ntwo\n"
    cursor.looked(4, SECOND, new_name)
    sent(cursor, data[:4])
    other = resumed(cursor.entry(), is_over=True)
    other.looked(len(data), 2 * SECOND, new_name)
    other.is_whole = True
    header = sent(other, data)
    assert header is not None
    assert (header.file, header.offset, header.line) == ("file-0", 4, 1)
    assert other.is_done


@given(
    st.lists(st.binary(max_size=40), max_size=30), st.lists(st.booleans(), min_size=31, max_size=31)
)
def test_pieces_put_together_are_the_file(writes: list[bytes], sends: list[bool]) -> None:
    """Whatever is written, and whenever it is sent: each byte once, in order."""
    cursor, data, got, now = made(), b"", b"", 0.0
    for write, is_sent in zip([*writes, b""], sends, strict=False):
        data += write
        now += 1.0
        cursor.looked(len(data), int(now * SECOND), lambda: "never")
        if is_sent and (header := sent(cursor, data, now)):
            got += data[header.offset : header.offset + header.size]
            assert header.line == data[: header.offset].count(b"\n")
    cursor.is_over = cursor.is_whole = True
    cursor.looked(len(data), int(now * SECOND), lambda: "never")
    while not cursor.is_done:
        header = sent(cursor, data, now)
        assert header is not None
        got += data[header.offset : header.offset + header.size]
    assert got == data
    assert cursor.lost == 0
