"""The list of what tests prove: read from docstrings alone, complete, and without unknown ids."""

import json
import tomllib
from pathlib import Path

import pytest

from tests.acceptance import ROOT, citations, coverage, main

LISTED = """
"A2.10" = "The tenth."
"A2.9" = "The ninth."
"A1.1" = "The first."
"""
TEST = '''
"""A module that proves something (A2.9)."""

raise SystemExit("nobody imports this")


def helper() -> None:
    """No test (A1.1)."""


def test_plain() -> None:
    """One (A2.10): and A2.9, A8 and XA1.1 are other words."""
    def test_inner() -> None:
        """Nobody runs it (A1.1)."""


@marked
async def test_async() -> None:
    """A2.10, and once more A2.10."""


class TestGroup:
    def test_method(self) -> None:
        """Of a class (A2.10)."""
'''


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository of a few files."""
    for folder in ("tests/unit", "benchmarks"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "tests/acceptance.toml").write_text(LISTED)
    (tmp_path / "tests/unit/test_it.py").write_text(TEST)
    (tmp_path / "tests/unit/helper.py").write_text('"""No test (A1.1)."""\n')
    (tmp_path / "benchmarks/figures.py").write_text('"""Figures (A2.9)."""\n')
    return tmp_path


def test_every_cited_id_is_known() -> None:
    known = tomllib.loads((ROOT / "tests/acceptance.toml").read_text())
    cited = {id_ for id_, _ in citations(ROOT)}
    assert cited - known.keys() == set()
    assert len(cited) > 50, "they are found at all"


def test_each_id_has_one_short_sentence() -> None:
    for id_, sentence in tomllib.loads((ROOT / "tests/acceptance.toml").read_text()).items():
        assert 20 < len(sentence) < 100, id_
        assert "\n" not in sentence, id_


def test_tests_modules_classes_and_benchmarks_are_read(root: Path) -> None:
    it = "tests/unit/test_it.py"
    assert coverage(root).tests == {
        "A1.1": [],
        "A2.9": [it, f"{it}::test_plain", "benchmarks/figures.py"],
        "A2.10": [f"{it}::test_plain", f"{it}::test_async", f"{it}::TestGroup::test_method"],
    }


def test_the_table_is_in_the_order_of_numbers_and_ends_with_what_has_no_test(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([], root) == 0
    out, err = capsys.readouterr()
    lines = [line for line in out.splitlines() if line]
    assert [line[:5].strip() for line in lines[:6]] == ["A2.9", "", "", "A2.10", "", ""]
    assert lines[0] == "A2.9   tests/unit/test_it.py"
    assert lines[6:] == ["without a test:", "A1.1   The first.", "2 of 3 ids have a test"]
    assert err == ""


def test_json_says_the_same(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--json"], root) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["with_test"], said["total"]) == (2, 3)
    assert {one["id"]: one["tests"] for one in said["ids"]} == coverage(root).tests
    assert said["ids"][0] == {"id": "A1.1", "sentence": "The first.", "tests": []}


def test_an_unknown_id_is_one_line_and_code_1(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (root / "tests/test_new.py").write_text('def test_new() -> None:\n    """A9.99."""\n')
    assert main([], root) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err == (
        "acceptance: not in tests/acceptance.toml: A9.99 in tests/test_new.py::test_new: "
        "correct it, or list it there\n"
    )


def test_when_all_have_a_test_nothing_is_missing(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (root / "tests/test_first.py").write_text('"""A1.1."""\n')
    assert main([], root) == 0
    out = capsys.readouterr().out
    assert "without a test" not in out
    assert out.endswith("3 of 3 ids have a test\n")
