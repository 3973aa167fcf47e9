"""Lists which tests prove what users hold the product to, by the ids that docstrings cite.

    python -m tests.acceptance [--json]

The ids are in `acceptance.toml`. Tests, their classes and modules cite them, and benchmarks where a
figure is the proof: "… (A8.3)." The files are only parsed, never imported. Exit code 1 when one
cites an id that is not in the list.
"""

import argparse
import ast
import json
import re
import sys
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
_LIST = "tests/acceptance.toml"
_SOURCES = ("tests/**/test_*.py", "benchmarks/*.py")
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_ID = re.compile(r"\bA\d+\.\d+\b")


class UnknownIdError(Exception):
    """A docstring cites an id that nobody has listed."""


@dataclass(frozen=True, slots=True)
class Coverage:
    """What must be proven, and the tests that prove it, both in the order of the ids."""

    sentences: dict[str, str]
    tests: dict[str, list[str]]

    @property
    def without(self) -> dict[str, str]:
        """The sentences that no test proves."""
        return {id_: text for id_, text in self.sentences.items() if not self.tests[id_]}

    @property
    def summary(self) -> str:
        total = len(self.sentences)
        return f"{total - len(self.without)} of {total} ids have a test"


def coverage(root: Path = ROOT) -> Coverage:
    """Read the list and all docstrings below a folder."""
    listed: dict[str, str] = tomllib.loads((root / _LIST).read_text())
    sentences = {id_: listed[id_] for id_ in sorted(listed, key=_by_number)}
    tests: dict[str, list[str]] = {id_: [] for id_ in sentences}
    unknown = []
    for id_, place in citations(root):
        if id_ in tests:
            tests[id_].append(place)
        else:
            unknown.append(f"{id_} in {place}")
    if unknown:
        raise UnknownIdError(f"not in {_LIST}: {', '.join(unknown)}: correct it, or list it there")
    return Coverage(sentences, tests)


def citations(root: Path = ROOT) -> Iterator[tuple[str, str]]:
    """Each id that is cited, with the test that cites it."""
    for pattern in _SOURCES:
        for path in sorted(root.glob(pattern)):
            module = ast.parse(path.read_text(), path)
            for place, docstring in _docstrings(module, path.relative_to(root).as_posix()):
                yield from ((id_, place) for id_ in sorted(set(_ID.findall(docstring))))


def _docstrings(node: ast.Module | ast.ClassDef, place: str) -> Iterator[tuple[str, str]]:
    """Those of a module or class and of the tests in it; helpers prove nothing."""
    yield place, ast.get_docstring(node) or ""
    for child in node.body:
        if isinstance(child, ast.ClassDef) and child.name.startswith("Test"):
            yield from _docstrings(child, f"{place}::{child.name}")
        elif isinstance(child, _FUNCTIONS) and child.name.startswith("test_"):
            yield f"{place}::{child.name}", ast.get_docstring(child) or ""


def _by_number(id_: str) -> tuple[int, ...]:
    return tuple(int(number) for number in id_.removeprefix("A").split("."))


def table(found: Coverage) -> Iterator[str]:
    """The lines that people read: tests first, then what has none."""
    width = max(map(len, found.sentences), default=0)
    for id_, tests in found.tests.items():
        for number, test in enumerate(tests):
            yield f"{'' if number else id_:{width}}  {test}"
    if found.without:
        yield "\nwithout a test:"
    for id_, sentence in found.without.items():
        yield f"{id_:{width}}  {sentence}"
    yield f"\n{found.summary}"


def as_json(found: Coverage) -> str:
    """The same for programs."""
    ids = [
        {"id": id_, "sentence": sentence, "tests": found.tests[id_]}
        for id_, sentence in found.sentences.items()
    ]
    total = len(ids)
    record = {"ids": ids, "with_test": total - len(found.without), "total": total}
    return json.dumps(record, indent=2)


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.acceptance",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="for programs")
    asked = parser.parse_args(arguments)
    try:
        found = coverage(root)
    except UnknownIdError as error:
        print(f"acceptance: {error}", file=sys.stderr)
        return 1
    print(as_json(found) if asked.json else "\n".join(table(found)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
