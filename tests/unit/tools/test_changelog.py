"""The changelog, its fragments, and one version for all that is released."""

import shutil
from pathlib import Path

import pytest

from tools import changelog
from tools.changelog import PLACES, ROOT, complaints, cut, version


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """What the check reads, without fragments."""
    for place in [*PLACES, "CHANGELOG.md", "changelog.d/README.md"]:
        for path in ROOT.glob(place):
            copy = tmp_path / path.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, copy)
    return tmp_path


def test_the_repository_has_one_version_and_a_changelog_in_its_form() -> None:
    assert complaints(ROOT) == []


@pytest.mark.parametrize("place", [place for place in PLACES if place != changelog.SOURCE])
def test_a_file_with_another_version_is_named(tree: Path, place: str) -> None:
    path = next(path for path in sorted(tree.glob(place)) if version(tree) in path.read_text())
    path.write_text(path.read_text().replace(version(tree), "9.9.9"))
    named = str(path.relative_to(tree))
    lines = complaints(tree)
    assert lines
    assert all(line.startswith(f"{named}: version 9.9.9, and ") for line in lines)


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("hang.md", "It is new.", "the name is TOPIC.KIND.md"),
        ("hang.improved.md", "It is new.", "the name is TOPIC.KIND.md"),
        ("hang.added.md", "", "write one paragraph"),
        ("hang.added.md", "- It is new.", "write one paragraph"),
        ("hang.added.md", "It is new", "write one paragraph"),
        ("hang.added.md", "It is new.\n\nIt is good.", "write one paragraph"),
        ("hang.added.md", f"It is {'very ' * 100}new.", "500 at most"),
    ],
)
def test_a_fragment_of_another_form_is_refused(
    tree: Path, name: str, text: str, complaint: str
) -> None:
    (tree / "changelog.d" / name).write_text(text)
    (line,) = complaints(tree)
    assert line.startswith(f"changelog.d/{name}: ")
    assert complaint in line


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("## 0.1.0", "## Unreleased\n\n## 0.1.0", "the first section is that of 0.1.0"),
        ("## 0.1.0", "## 0.1.0\n\n## 0.2.0", "the newest first"),
        ("### Added", "### Added\n\n### News", "News of 0.1.0 is none of"),
        ("### Added", f"### Added\n\n{'word ' * 1000}", "1000 at most"),
    ],
)
def test_a_changelog_of_another_form_is_refused(
    tree: Path, old: str, new: str, complaint: str
) -> None:
    path = tree / "CHANGELOG.md"
    path.write_text(path.read_text().replace(old, new, 1))
    assert any(complaint in line for line in complaints(tree))


def test_a_cut_gives_all_files_the_version_and_makes_a_section_of_the_fragments(tree: Path) -> None:
    for name in ("b.fixed", "a.fixed", "z.added"):
        (tree / "changelog.d" / f"{name}.md").write_text(f"{name}\nis there.\n")
    cut(tree, "0.2.0")
    assert version(tree) == "0.2.0"
    assert complaints(tree) == []
    text = (tree / "CHANGELOG.md").read_text()
    section = text.partition("## 0.2.0\n")[2].partition("## 0.1.0\n")[0]
    assert section == (
        "\n### Added\n\n- z.added is there.\n\n"
        "### Fixed\n\n- a.fixed is there.\n- b.fixed is there.\n\n"
    )
    assert [path.name for path in (tree / "changelog.d").iterdir()] == ["README.md"]
