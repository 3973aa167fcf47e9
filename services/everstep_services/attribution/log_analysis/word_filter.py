"""Which lines have one of many words, without a look at each character of each line.

A window is four bytes of the text that begin at an even place. Wherever a word of three letters
or more stands, it fills three bytes of some window at least: so each word has one window for even
places and one for odd places, where a missing fourth byte may be any. All windows of a text are
looked up at once in two tables of hashes; only where both know a window is the word compared.
"""

from collections.abc import Collection, Iterator

import numpy as np
from numpy.typing import NDArray

_BITS = 18
_SHIFT = np.uint32(32 - _BITS)
_FIRST, _SECOND = np.uint32(2654435761), np.uint32(2246822519)
_ANY = bytes(range(256))
_COMMON = b" etaoinsrhldcumfpgwybvkxjqz"
"""Letters of ordinary text, the most common first."""
_LEAST_LETTERS = 3


class WordFilter:
    """Finds words in the lines of a text: exactly those that stand there."""

    def __init__(self, words: Collection[bytes]) -> None:
        self._of_window: dict[bytes, list[tuple[int, bytes]]] = {}
        for word in words:
            for begin, window in _windows_of(word):
                self._of_window.setdefault(window, []).append((begin, word))
        values = np.frombuffer(b"".join(self._of_window), np.dtype("<u4"))
        self._first, self._second = (_table(values, factor) for factor in (_FIRST, _SECOND))

    def words_of_lines(self, text: bytes) -> Iterator[tuple[int, bytes]]:
        """The number of a line, from zero, and a word that it has, for all lines and words.

        The text is in lower case. A pair may come more than once.
        """
        pairs = np.frombuffer(text + bytes(4 - len(text) % 2), np.dtype("<u2"))
        windows = pairs[1:].astype(np.uint32)
        windows <<= np.uint32(16)
        windows |= pairs[:-1]
        places = np.flatnonzero(self._first[(windows * _FIRST) >> _SHIFT])
        places = places[self._second[(windows[places] * _SECOND) >> _SHIFT]]
        if not len(places):
            return
        ends = np.flatnonzero(np.frombuffer(text, np.uint8) == ord("\n"))
        numbers = np.searchsorted(ends, places * 2 + 1)  # the second byte is always in the word
        contents = windows[places].tobytes()
        for at, (place, number) in enumerate(zip(places.tolist(), numbers.tolist(), strict=True)):
            for begin, word in self._of_window.get(contents[4 * at : 4 * at + 4], ()):
                start = 2 * place - begin
                if start >= 0 and text.startswith(word, start):
                    yield number, word


def _table(values: NDArray[np.uint32], factor: np.uint32) -> NDArray[np.bool_]:
    table = np.zeros(1 << _BITS, np.bool_)
    table[(values * factor) >> _SHIFT] = True
    return table


def _windows_of(word: bytes) -> Iterator[tuple[int, bytes]]:
    """For each parity of the place where a word begins: where in it a window is, and its bytes.

    The rarest window is taken.
    """
    if len(word) < _LEAST_LETTERS:
        raise ValueError(f"the word {word!r} is too short: it needs {_LEAST_LETTERS} letters")
    for parity in (0, -1):
        begins = range(parity, len(word) - 2, 2)
        begin = max(begins, key=lambda begin: _rarity(word[max(0, begin) : begin + 4]))
        part = word[max(0, begin) : begin + 4]
        if len(part) == 4:
            yield begin, part
        elif begin < 0:
            yield from ((begin, bytes((other,)) + part) for other in _ANY)
        else:
            yield from ((begin, part + bytes((other,))) for other in _ANY)


def _rarity(part: bytes) -> tuple[int, int, bytes]:
    """How rare a part of a word is in ordinary text: its length, its letters; then itself."""
    return len(part), sum(_COMMON.find(letter) % (len(_COMMON) + 1) for letter in part), part
