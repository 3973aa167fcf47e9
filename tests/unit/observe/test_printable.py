"""Nothing from outside is obeyed by a terminal."""

import json
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.observe.printable import beginning, printable, printable_line
from everstep.runtime import one_line
from everstep_services.cli.cells import cell
from everstep_services.cli.output import echo, print_json

HOSTILE = "a\x1b[2J\x07\x9b1m\u202eevil\u2066\u200b\u2028\ufeff\U000e0041\udc80z"


def test_what_a_terminal_obeys_is_shown_as_it_is_written() -> None:
    assert printable(HOSTILE) == (
        "a\\u001b[2J\\u0007\\u009b1m\\u202eevil\\u2066\\u200b\\u2028\\ufeff\\udb40\\udc41\\udc80z"
    )
    assert (
        printable("plain „text“ 日本 👩\u200d🔬\tand\nlines")
        == "plain „text“ 日本 👩\u200d🔬\tand\nlines"
    )


@given(st.text())
def test_nothing_that_is_printed_is_a_control_or_turns_the_direction(text: str) -> None:
    for character in printable(text):
        assert character in "\t\n" or unicodedata.category(character) not in {
            "Cc",
            "Cs",
            "Zl",
            "Zp",
        }
        assert unicodedata.bidirectional(character) not in {
            *("LRE", "RLE", "PDF", "LRO", "RLO", "LRI", "RLI", "FSI", "PDI")
        }


def test_colours_of_a_log_stay_and_nothing_else_does() -> None:
    assert printable_line("\x1b[31mred\x1b[0m\x1b[2J\u202e") == "\x1b[31mred\x1b[0m\ufffd[2J\ufffd"


def test_every_way_out_of_the_commands_escapes(capsys: pytest.CaptureFixture[str]) -> None:
    assert "\u202e" not in cell(HOSTILE) + cell([HOSTILE]) + cell({"name": HOSTILE[:-2]})
    assert "\u202e" not in one_line(ValueError(HOSTILE))
    echo(HOSTILE)
    echo(HOSTILE, err=True)
    print_json({"name": HOSTILE[:-2]})
    out, err = capsys.readouterr()
    assert "\u202e" not in out + err
    document = out[out.index("{") :]
    assert json.loads(document) == {"name": HOSTILE[:-2]}, "escaped, it is the same to a program"


@given(st.text(), st.integers(1, 50))
def test_a_text_that_is_cut_is_marked_and_not_longer(text: str, most: int) -> None:
    cut = beginning(text, most)
    assert len(cut) <= most
    assert cut == text or (cut.endswith("…") and text.startswith(cut[:-1]))


def test_no_word_of_a_sentence_is_cut() -> None:
    sentence = "n2 is silent; its warden answers"
    cuts = {beginning(sentence, most) for most in range(16, 40)}
    whole = {"n2 is silent…", "n2 is silent; its…", "n2 is silent; its warden…"}
    assert cuts == {*whole, sentence}
    assert beginning("x" * 50, 20) == f"{'x' * 19}…"
