"""Lines of logs as HTML: colours of terminals become classes, all else is text.

`static/logs.js` does the same with lines that arrive while the page is open.
"""

import re
from collections.abc import Iterator

from markupsafe import Markup, escape

from everstep.observe.printable import printable_line

_COLOURS = ("black", "red", "green", "yellow", "blue", "magenta", "cyan", "white")
_STYLES = {1: "bold", 2: "dim", 3: "italic", 4: "under", 7: "invert"}
_ENDS = {22: ("bold", "dim"), 23: ("italic",), 24: ("under",), 27: ("invert",)}
_SPAN = Markup('<span class="{}">{}</span>')
_SEQUENCE = re.compile(r"\x1b\[([\d;]*)m")


def log_text(line: str, search: str = "") -> Markup:
    """A line with its colours, and with what was searched for marked."""
    parts = []
    for classes, text in segments(printable_line(line)):
        html = _marked(text, search)
        parts.append(
            Markup('<span class="{}">{}</span>').format(classes, html) if classes else html
        )
    return Markup("").join(parts)


def segments(line: str) -> Iterator[tuple[str, str]]:
    """The pieces of a line, each with its classes. Backgrounds and hidden text are not obeyed."""
    styles: set[str] = set()
    colour = ""
    for place, part in enumerate(_SEQUENCE.split(line)):
        if place % 2:
            colour = _obey(part, styles, colour)
        elif part:
            names = [*sorted(styles), *([colour] if colour else [])]
            yield " ".join(f"ansi-{name}" for name in names), part


def _obey(sequence: str, styles: set[str], colour: str) -> str:
    """Change the styles, and return the colour that follows."""
    codes = iter([int(code[:4] or 0) for code in sequence.split(";")])
    for code in codes:
        if code == 0:
            styles.clear()
            colour = ""
        elif code in _STYLES:
            styles.add(_STYLES[code])
        elif code in _ENDS:
            styles.difference_update(_ENDS[code])
        elif code in {38, 48}:
            chosen = _of_palette(next(codes, 0), codes)
            colour = chosen if code == 38 else colour
        elif code == 39:
            colour = ""
        elif 30 <= code <= 37 or 90 <= code <= 97:
            colour = _COLOURS[code % 10]
    return colour


def _of_palette(kind: int, codes: Iterator[int]) -> str:
    """One of the sixteen colours that have names; "" for all others."""
    if kind == 5:
        number = next(codes, 0)
        return _COLOURS[number % 8] if number < 16 else ""
    if kind == 2:
        for _ in range(3):
            next(codes, 0)
    return ""


def _marked(text: str, search: str) -> Markup:
    if not search or search not in text:
        return escape(text)
    mark = Markup("<mark>{}</mark>").format(search)
    return mark.join(escape(piece) for piece in text.split(search))
