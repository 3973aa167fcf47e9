"""The table of NVRx's names: complete, and true: each name imports, or is missing with its remedy.

The data come from NVRx's wheel; what a name does here is decided by hand (A9.1 of users.md).
"""

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from docs.generators import nvrx, nvrx_names
from everstep_services.cli.run.arguments import scan
from everstep_services.cli.run.nvrx_config import option_of
from everstep_services.cli.run.options import OPTIONS
from tests.e2e.nvrx import wheels
from trainer_sdk.nvrx import aliases

WITHIN_S = 200.0
CHECK = """
import importlib, json, sys
found = {}
for module, names in json.load(sys.stdin).items():
    there = importlib.import_module(f"nvidia_resiliency_ext.{module}")
    found[module] = {}
    for name, methods in names.items():
        value = getattr(there, name, None)
        if hasattr(there, name):
            found[module][name] = [each for each in methods if hasattr(value, each)]
print(json.dumps(found))
"""


def stands_in(module: str) -> bool:
    return bool(aliases.MODULES.get(module))


def is_importable(module: str) -> bool:
    return not module.startswith("ptl_resiliency") or find_spec("lightning") is not None


def test_each_name_of_a_module_that_stands_in_is_decided_and_no_other() -> None:
    decided, named = nvrx.decisions(), nvrx_names.load()["modules"]
    wanted = {module: set(names) for module, names in named.items() if stands_in(module)}
    assert {module: set(names) for module, names in decided["names"].items()} == wanted
    states = [state for names in decided["names"].values() for state, _ in names.values()]
    assert set(states) <= set(nvrx.STATES)
    for module, classes in decided["methods"].items():
        for name in classes:
            methods = set(nvrx.decided_methods(module, name))
            assert methods <= set(named[module][name]), (module, name)


def test_each_name_imports_or_is_missing_as_the_table_has_it() -> None:
    """No name is said to be here that is not, and none is missing in silence."""
    named, decided = nvrx_names.load()["modules"], nvrx.decisions()["names"]
    wanted = {module: names for module, names in named.items() if module in decided}
    wanted = {module: names for module, names in wanted.items() if is_importable(module)}
    assert len(wanted) > 30
    here: dict[str, dict[str, list[str]]] = {}
    for module, names in wanted.items():
        present = {
            name: each for name, each in names.items() if decided[module][name][0] != "not here"
        }
        here[module] = {
            name: [method for method in methods if is_here(module, name, method)]
            for name, methods in present.items()
        }
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


def is_here(module: str, name: str, method: str) -> bool:
    state, _ = nvrx.decided_methods(module, name).get(method, ("as theirs", ""))
    return state != "not here"


def test_a_module_without_counterpart_names_its_remedy() -> None:
    finder = aliases.AliasFinder()
    for module in nvrx_names.load()["modules"]:
        if module and module not in aliases.MODULES:
            with pytest.raises(ModuleNotFoundError) as error:
                finder.find_spec(f"{aliases.PACKAGE}.{module}")
            assert aliases.instead_of(module) in str(error.value)
            assert "no such part" not in str(error.value), module


def test_every_option_and_key_of_the_launcher_is_known_to_everstep_run() -> None:
    stored = nvrx_names.load()
    ours = {name for option in OPTIONS for name in option.names}
    options = stored["options"]
    theirs = {*options["fault_tolerance.launcher"], *options["fault_tolerance.cli_args"]}
    assert theirs <= ours
    assert {option_of(key) for key in stored["keys"]} <= ours | {"--ft-numa-bind-strict"}


def test_options_that_the_table_says_are_ignored_are_named_in_one_line() -> None:
    for option in OPTIONS:
        if option.note and option.names[0].startswith("--ft-"):
            value = [] if option.kind == "flag" else ["x"]
            given = scan([option.names[0], *value, "train.py"], {})
            assert [note for note in given.notes if option.note in note], option.names


def test_each_program_and_variable_is_decided() -> None:
    stored: Any = nvrx_names.load()
    launcher = {"fault_tolerance.launcher", "fault_tolerance.cli_args"}
    assert set(stored["options"]) - launcher == set(nvrx.decisions()["options"])
    for variable in stored["variables"]:
        assert nvrx.decided_variable(variable)[0] in nvrx.STATES
    for decided in nvrx.decisions()["variables"]:
        matches = [each for each in stored["variables"] if re.match(decided, each)]
        assert matches, decided


@pytest.mark.matrix
@pytest.mark.timeout(400)
def test_the_stored_names_are_those_of_the_release(tmp_path: Path) -> None:
    package = wheels.nvrx(tmp_path) / aliases.PACKAGE
    assert nvrx_names.names_in(package) == nvrx_names.load()
