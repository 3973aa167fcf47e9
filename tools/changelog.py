"""Holds the form of the changelog and its fragments, and that everything has the same version.

    python tools/changelog.py               check both; exit code 1 names what is wrong
    python tools/changelog.py cut VERSION   give everything this version, and make its section

The version is that of `libs/everstep/__init__.py`; `PLACES` lists the files that repeat it. A
fragment of `changelog.d/` has one paragraph: see the README there.
"""

import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = "libs/everstep/__init__.py"
KINDS = ("added", "changed", "deprecated", "removed", "fixed", "security")
LONGEST = 500
SECTION_WORDS = 1000
"""Two pages."""

_NUMBER = r"\d+\.\d+\.\d+"
PLACES = {
    SOURCE: rf'^__version__ = "({_NUMBER})"$',
    "CITATION.cff": rf"^version: ({_NUMBER})$",
    "deploy/docker/Dockerfile": rf'image\.version="({_NUMBER})"',
    "deploy/helm/everstep/Chart.yaml": rf'^(?:version|appVersion): "?({_NUMBER})"?$',
    "deploy/helm/everstep/values.yaml": rf'^  tag: "({_NUMBER})"$',
    "deploy/kubernetes/**/*.yaml": rf"(?:newTag: |/everstep(?:-agent)?:|of Everstep )({_NUMBER})",
    "docs/install.md": rf"everstep-({_NUMBER})-py3",
    "docs/quickstart.md": rf"^everstep ({_NUMBER}) is ready",
    "docs/reference/*api.json": rf'^  "version": "({_NUMBER})"',
    "mkdocs.yml": rf"^copyright: Everstep ({_NUMBER})",
}
_FRAGMENT = re.compile(rf"[a-z0-9]+(?:-[a-z0-9]+)*\.({'|'.join(KINDS)})\.md")
_HEADING = re.compile(rf"^## ({_NUMBER})$", re.MULTILINE)


def version(root: Path) -> str:
    """The version that everything else repeats."""
    found = re.search(PLACES[SOURCE], (root / SOURCE).read_text(), re.MULTILINE)
    assert found is not None, f"{SOURCE} has no version"
    return found[1]


def complaints(root: Path) -> list[str]:
    """What is wrong with versions, fragments and the changelog."""
    return [*_versions(root), *_fragments(root), *_sections(root)]


def cut(root: Path, new: str) -> None:
    """Write the version everywhere, and a section of all fragments, which are then gone."""
    for path, pattern in _places(root):
        text = path.read_text()
        for match in reversed(list(re.finditer(pattern, text, re.MULTILINE))):
            text = text[: match.start(1)] + new + text[match.end(1) :]
        path.write_text(text)
    parts = [f"## {new}\n"]
    for kind in KINDS:
        paths = sorted((root / "changelog.d").glob(f"*.{kind}.md"))
        if paths:
            items = [f"- {' '.join(path.read_text().split())}" for path in paths]
            parts.append("\n".join([f"### {kind.capitalize()}\n", *items, ""]))
        for path in paths:
            path.unlink()
    changelog = root / "CHANGELOG.md"
    text = changelog.read_text()
    newest = _HEADING.search(text)
    end = newest.start() if newest else len(text)
    changelog.write_text(text[:end] + "\n".join([*parts, text[end:]]))


def _places(root: Path) -> Iterator[tuple[Path, str]]:
    for place, pattern in PLACES.items():
        paths = sorted(root.glob(place))
        assert paths, f"{place} is not there"
        yield from ((path, pattern) for path in paths)


def _versions(root: Path) -> Iterator[str]:
    wanted = version(root)
    matched: dict[str, bool] = {}
    for path, pattern in _places(root):
        matched.setdefault(pattern, False)
        for match in re.finditer(pattern, path.read_text(), re.MULTILINE):
            matched[pattern] = True
            if match[1] != wanted:
                yield f"{path.relative_to(root)}: version {match[1]}, and {SOURCE} has {wanted}"
    yield from (f"nothing matches {pattern}" for pattern, any_ in matched.items() if not any_)


def _fragments(root: Path) -> Iterator[str]:
    for path in sorted((root / "changelog.d").iterdir()):
        name, text = path.relative_to(root), path.read_text().strip()
        if path.name == "README.md":
            continue
        if not _FRAGMENT.fullmatch(path.name):
            yield f"{name}: the name is TOPIC.KIND.md, with a kind of {', '.join(KINDS)}"
        if not text.endswith(".") or text[0] in "-*#" or "\n\n" in text:
            yield f"{name}: write one paragraph of whole sentences"
        if len(text) > LONGEST:
            yield f"{name}: {len(text)} characters, and {LONGEST} at most"


def _sections(root: Path) -> Iterator[str]:
    _, *sections = re.split(r"^## ", (root / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    titles = [section.partition("\n")[0] for section in sections]
    if not titles or titles[0] != version(root):
        yield f"CHANGELOG.md: the first section is that of {version(root)}"
    numbers = [_number(title) for title in titles]
    if numbers != sorted(set(numbers), reverse=True) or () in numbers:
        yield f"CHANGELOG.md: each section is a version, the newest first: {', '.join(titles)}"
    for title, section in zip(titles, sections, strict=True):
        words = len(section.split())
        if words > SECTION_WORDS:
            yield f"CHANGELOG.md: {title} has {words} words, and {SECTION_WORDS} at most"
        for kind in re.findall(r"^### (.+)$", section, re.MULTILINE):
            if kind.lower() not in KINDS:
                yield f"CHANGELOG.md: {kind} of {title} is none of {', '.join(KINDS)}"


def _number(title: str) -> tuple[int, ...]:
    return tuple(map(int, title.split("."))) if re.fullmatch(_NUMBER, title) else ()


def main(arguments: Sequence[str]) -> int:
    if len(arguments) == 2 and arguments[0] == "cut" and _number(arguments[1]):
        cut(ROOT, arguments[1])
    elif arguments:
        print(__doc__, file=sys.stderr)
        return 2
    lines = complaints(ROOT)
    for line in lines:
        print(line)
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
