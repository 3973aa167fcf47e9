"""Words of rules in many lines at once: the fast way finds what the slow way finds."""

import io
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep_services.attribution.log_analysis import chunks
from everstep_services.attribution.log_analysis.chunks import LogFile, Shapes, shape_of
from everstep_services.attribution.log_analysis.rules import shipped
from everstep_services.attribution.log_analysis.word_filter import WordFilter

_WORDS = sorted(shipped().words)
_SHAPED = sorted({shape_of(word.encode()) for word in _WORDS})
_PIECES = st.one_of(
    st.sampled_from(_WORDS).map(str.encode),
    st.sampled_from(_WORDS).map(lambda word: word.upper().encode()),
    st.sampled_from(_WORDS).map(lambda word: word[1:].encode()),
    st.sampled_from(_WORDS).map(lambda word: word[:-1].encode()),
    st.sampled_from(
        [b"step 7", b"loss: 2.5", b"iteration", b"3", b".", b" ", b"\r", b"\xff", b"\0"]
    ),
    st.text("abcdeiort nNAX", max_size=12).map(str.encode),
    st.binary(max_size=4).filter(lambda piece: b"\n" not in piece),
    st.just(b"y z" * 900),
)
_LINES = st.lists(st.lists(_PIECES, max_size=6).map(b"".join), max_size=40)


def loud_lines(content: bytes, *, least_filtered: int) -> tuple[list[int], list[object]]:
    log = LogFile(io.BytesIO(content), Shapes(shipped().words, least_filtered))
    return [log.numbers[at] for _ in log.chunks() for at in log.loud], list(log.progress)


@settings(max_examples=30)
@given(_LINES)
def test_the_filter_finds_the_lines_that_the_expressions_find(lines: list[bytes]) -> None:
    content = b"\n".join(lines)
    assert loud_lines(content, least_filtered=0) == loud_lines(content, least_filtered=sys.maxsize)


@given(_LINES)
def test_each_word_of_each_line_is_found(lines: list[bytes]) -> None:
    text = b"\n".join(lines).lower()
    expected = {
        (number, word)
        for number, line in enumerate(text.split(b"\n"))
        for word in _SHAPED
        if word in line
    }
    assert set(WordFilter(_SHAPED).words_of_lines(text)) == expected


def test_a_word_is_found_at_every_place() -> None:
    words = WordFilter([b"xid", b"edac", b"error:", b"segfault at"])
    for word in (b"xid", b"edac", b"error:", b"segfault at"):
        for before in range(9):
            for after in range(9):
                text = b"a" * before + word + b"a" * after
                assert list(words.words_of_lines(text)) == [(0, word)]


def test_a_word_that_is_too_short_is_refused() -> None:
    with pytest.raises(ValueError, match="too short"):
        WordFilter([b"ab"])


def test_words_are_found_without_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "everstep_services.attribution.log_analysis.word_filter"
    monkeypatch.setitem(sys.modules, name, None)
    loud, _ = loud_lines(b"a\nNVRM: Xid (PCI): 79\nb", least_filtered=0)
    assert loud == [2]


def test_the_filter_is_used_for_many_new_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it, new words cost as much as each character of them."""
    monkeypatch.setattr(Shapes, "_searched", None)
    lines = b"".join(
        f"{number:b}\n".translate({48: "a", 49: "b"}).encode() for number in range(40_000)
    )
    loud, _ = loud_lines(lines + b"segfault at 0", least_filtered=chunks._LEAST_FILTERED)
    assert loud == [40_001]
