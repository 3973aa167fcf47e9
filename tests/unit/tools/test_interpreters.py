"""Each process of Python that we start imports from its installation, not from where we stand."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]
SOURCES = [
    path
    for folder in ("libs", "services", "trainer_sdk")
    for path in sorted((ROOT / folder).rglob("*.py"))
]


def _starts(source: str) -> Iterator[tuple[int, list[str]]]:
    """The words of each command that begins with this interpreter."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.List | ast.Tuple | ast.Call):
            continue
        words = node.args if isinstance(node, ast.Call) else node.elts
        if words and ast.unparse(words[0]) in {"sys.executable", "python"}:
            texts = [each.value for each in words[1:] if isinstance(each, ast.Constant)]
            yield node.lineno, [text for text in texts if isinstance(text, str)]


def test_no_interpreter_that_we_start_imports_from_the_present_folder() -> None:
    texts = [(path, path.read_text()) for path in SOURCES]
    starts = [
        (path, *start)
        for path, text in texts
        if "sys.executable" in text or "python" in text
        for start in _starts(text)
    ]
    assert len([words for *_, words in starts if "-P" in words]) >= 10
    open_ones = [
        f"{path.relative_to(ROOT)}:{line}: {words}"
        for path, line, words in starts
        if {"-m", "-c"} & set(words) and not {"-P", "-I"} & set(words)
    ]
    assert open_ones == []


def test_no_pool_of_multiprocessing_is_used() -> None:
    """Its processes import from the present folder first."""
    users = [path for path in SOURCES if 'get_context("' in path.read_text()]
    assert users == []
