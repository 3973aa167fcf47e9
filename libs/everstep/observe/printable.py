"""Text from outside without control sequences of terminals: names, reasons, lines of logs."""

import re

_OBEYED = (
    "\x00-\x08\x0b-\x1f\x7f-\x9f"  # controls, but tabs and line ends
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # the direction of what follows
    "\u200b\u2028\u2029\u2060\ufeff\u206a-\u206f"  # line ends of another kind, what has no width
    "\U000e0000-\U000e007f\ud800-\udfff"  # tags that nobody sees, halves of characters
)
_UNPRINTABLE = re.compile(f"[{_OBEYED}]")
_UNPRINTABLE_IN_LINES = re.compile(rf"(?!\x1b\[[\d;]*m)[{_OBEYED}]")


def printable(text: str) -> str:
    r"""The text with each character that a terminal obeys as `\u202e`, which JSON reads back."""
    return _UNPRINTABLE.sub(lambda found: _escaped(found[0]), text)


def beginning(text: str, most: int) -> str:
    """A text of at most this many characters; a longer one ends after a whole word, with `…`."""
    if len(text) <= most:
        return text
    words, _, rest = text[:most].rpartition(" ")
    whole = words if 2 * len(rest) < most else text[: most - 1]
    return f"{whole.rstrip(' ,;:')}…"


def printable_line(text: str) -> str:
    """A line of a log: colours stay, other control sequences are replaced."""
    return _UNPRINTABLE_IN_LINES.sub("\ufffd", text)


def _escaped(character: str) -> str:
    units = character.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at : at + 2].hex()}" for at in range(0, len(units), 2))
