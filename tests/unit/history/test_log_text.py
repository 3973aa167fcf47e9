"""Lines of logs as HTML: colours of terminals, and text that stays text."""

import pytest

from everstep_services.history.dashboard.ansi import log_text


@pytest.mark.parametrize(
    ("line", "html"),
    [
        ("plain", "plain"),
        ("<b> & \"q\"", "&lt;b&gt; &amp; &#34;q&#34;"),
        ("a\x1b[31mred\x1b[0m b", 'a<span class="ansi-red">red</span> b'),
        ("\x1b[1;92mx\x1b[22my", '<span class="ansi-bold ansi-green">x</span>'
                                 '<span class="ansi-green">y</span>'),
        ("\x1b[38;5;9mx\x1b[38;5;200my\x1b[38;2;1;2;3mz", '<span class="ansi-red">x</span>yz'),
        ("\x1b[8;30;40mhidden\x1b[m", '<span class="ansi-black">hidden</span>'),
        ("\x1b[48;5;31mx", "x"),
        ("\x1b[;;999999mx", "x"),
        ("\x1b]0;t\x07\x1b[2J\u202ex\r", "\ufffd]0;t\ufffd\ufffd[2J\ufffdx\ufffd"),
        ("\x1b[38mx\x1b[48my", "xy"),
    ],
)  # fmt: skip
def test_colours_become_classes_and_nothing_else_is_obeyed(line: str, html: str) -> None:
    """A13.3: what a rank writes changes no page and no terminal."""
    assert log_text(line) == html


@pytest.mark.parametrize(
    ("search", "html"),
    [("a<", "x<mark>a&lt;</mark>b<mark>a&lt;</mark>"), ("", "xa&lt;ba&lt;"), ("q", "xa&lt;ba&lt;")],
)
def test_what_was_searched_for_is_marked(search: str, html: str) -> None:
    assert log_text("xa<ba<", search) == html
