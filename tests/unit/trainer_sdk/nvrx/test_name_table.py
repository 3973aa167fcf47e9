"""The table of NVRx's names in the guide: each of them imports, or is missing with its remedy."""

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.e2e.nvrx import wheels
from trainer_sdk.nvrx import aliases

GUIDE = Path(__file__).parents[4] / "docs" / "guides" / "from-nvrx.md"
WITHIN_S = 200.0
STATES = {"as theirs", "differs", "ignored", "not here"}
CHECK = """
import importlib, json, sys
found = {}
for module, names in json.load(sys.stdin).items():
    there = importlib.import_module(f"nvidia_resiliency_ext.{module}")
    found[module] = [name for name in names if hasattr(there, name)]
print(json.dumps(found))
"""


def rows() -> Iterator[tuple[str, str, str]]:
    """Module, name and state of each row."""
    module = ""
    for line in GUIDE.read_text(encoding="utf-8").splitlines():
        if heading := re.fullmatch(r"### `([a-z_.]+)`", line):
            module = heading[1]
        elif line.startswith("### "):
            return
        elif module and (row := re.match(r"\| `(\w+)` \| ([a-z ]+) \|", line)):
            yield module, row[1], row[2]


def elsewhere() -> list[str]:
    """The modules without counterpart; `…` stands for any."""
    text = GUIDE.read_text(encoding="utf-8").partition("### Other modules")[2]
    found = []
    for line in text.splitlines():
        if line.startswith("| `"):
            names = re.findall(r"`([a-z_.…]+)`", line.split(" | ")[0])
            package = names[0].rpartition(".")[0]
            found += [package + name if name.startswith(".") else name for name in names]
    return found


def test_each_name_of_the_table_imports_or_is_missing() -> None:
    wanted: dict[str, list[str]] = {}
    here: dict[str, list[str]] = {}
    for module, name, state in rows():
        assert state in STATES
        if module.startswith("ptl_resiliency") and find_spec("lightning") is None:
            continue
        wanted.setdefault(module, []).append(name)
        here.setdefault(module, [])
        if state != "not here":
            here[module].append(name)
    assert len(wanted) > 15
    done = subprocess.run(
        [sys.executable, "-c", CHECK],
        input=json.dumps(wanted),
        env={**os.environ, "PYTHONPATH": aliases.FOLDER},
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == here


def test_every_module_that_stands_in_is_in_the_table() -> None:
    shown = {module for module, _, _ in rows()}
    assert shown == {name for name, ours in aliases.MODULES.items() if ours}


@pytest.mark.matrix
@pytest.mark.timeout(400)
def test_the_table_has_every_public_name_of_nvrx(tmp_path: Path) -> None:
    package = wheels.nvrx(tmp_path) / aliases.PACKAGE
    shown: dict[str, set[str]] = {}
    for module, name, _ in rows():
        shown.setdefault(module, set()).add(name)
    others = elsewhere()
    for path in sorted(package.rglob("*.py")):
        module = ".".join(path.relative_to(package).with_suffix("").parts)
        module = module.removesuffix("__init__").rstrip(".")
        if module in shown:
            assert public_names(path) <= shown[module], module
        elif aliases.MODULES.get(module, module):
            assert any(is_below(module, other) for other in others), module


def is_below(module: str, other: str) -> bool:
    if other.endswith("…"):
        return module.startswith(other[:-1])
    return f"{module}.".startswith(f"{other}.")


def public_names(path: Path) -> set[str]:
    """What a module defines at its top, and a package exports."""
    found: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ImportFrom) and node.level and path.name == "__init__.py":
            found |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign):
            found |= {each.id for each in node.targets if isinstance(each, ast.Name)}
    helpers = {"logger", "T", "U", "V", "ctx"}
    return {name for name in found if not name.startswith("_")} - helpers
