"""Columns line up in every script, and a pipe gets plain text."""

import pytest

from everstep_services.cli.cells import aligned, blank_or, listed, short_cell, span


def test_columns_line_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also under wide characters, and where options ask for colour and for narrow tables."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "20")
    rows = [("node", "why"), ("日本", "[bold]x[/] " + "y" * 300), (None, True)]
    assert list(aligned(rows)) == ["  node  why", "  日本  [bold]x[/] " + "y" * 300, "        yes"]
    assert list(aligned([("a", "")], indent=0)) == ["a"]
    assert list(aligned([])) == []


def test_values_are_short() -> None:
    assert listed((1, 2, 3), 5) == "1, 2, 3"
    assert listed(("a", "b", "c"), 2) == "a, b and 1 more"
    assert (blank_or(span, None), blank_or(span, 2.0)) == ("", "2 s")
    assert short_cell("2026-11-25T23:11:12.205466Z") == "2026-11-25 23:11:12"
