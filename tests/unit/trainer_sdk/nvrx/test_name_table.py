"""The table of NVRx's names: complete, and true: each name imports, or is missing with its remedy.

Each call takes the arguments that NVRx's takes, and each instance has its attributes.

The data come from NVRx's wheel; what a name does here is decided by hand (A9.1 of users.md).
"""

import ast
import importlib
import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
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


def standing_in() -> Iterator[tuple[str, Any, str]]:
    """Each module that stands in, ours, and each of its names that is here."""
    for module, names in nvrx.decisions()["names"].items():
        if stands_in(module) and is_importable(module):
            ours = importlib.import_module(f"trainer_sdk.nvrx.{aliases.MODULES[module]}")
            for name, (state, _) in names.items():
                if state != "not here":
                    yield module, ours, name


def test_each_call_takes_the_arguments_that_nvrx_takes() -> None:
    """In their order, with their names and defaults; those decided otherwise are all needed."""
    stored = nvrx_names.load()["arguments"]
    wrong: dict[str, str] = {}
    for module, ours, name in standing_in():
        for call, text in stored.get(module, {}).items():
            owner, _, method = call.partition(".")
            value = getattr(getattr(ours, name), method or "__call__", None)
            value = getattr(ours, name) if method in {"", "__init__"} else value
            if owner == name and value is not None and is_here(module, name, method):
                flaw = flaw_of(text, value, skips=bool(method) and method != "__init__")
                wrong |= {f"{module}.{call}": flaw} if flaw else {}
    decided = {
        call: reason
        for call, reason in nvrx.decisions()["arguments"].items()
        if any(call.startswith(f"{module}.") and is_importable(module) for module in stored)
    }
    assert {call: flaw for call, flaw in wrong.items() if call not in decided} == {}
    assert set(decided) == set(wrong)


def flaw_of(theirs: str, value: Any, *, skips: bool) -> str:
    """What a caller of theirs would notice; `skips` if ours has the object as its first one."""
    wanted = ast.parse(f"def call({theirs}): ...").body[0]
    assert isinstance(wanted, ast.FunctionDef)
    ours = list(inspect.signature(value).parameters.values())
    ours = ours[1:] if skips and ours and ours[0].name == "self" else ours
    by_position = [each for each in ours if each.kind is each.POSITIONAL_OR_KEYWORD]
    args = wanted.args
    defaults = [None] * (len(args.args) - len(args.defaults)) + args.defaults
    for position, (arg, default) in enumerate(zip(args.args, defaults, strict=True)):
        if position >= len(by_position):
            if any(each.kind is each.VAR_POSITIONAL for each in ours):
                break
            return f"does not take {arg.arg}"
        if by_position[position].name != arg.arg:
            return f"{arg.arg} is called {by_position[position].name}"
        if flaw := flaw_of_default(by_position[position], default):
            return flaw
    if flaw := flaw_of_keywords(args, ours):
        return flaw
    return "" if args.vararg or args.kwarg else flaw_of_needs(args, ours)


def flaw_of_keywords(theirs: ast.arguments, ours: list[inspect.Parameter]) -> str:
    by_name = {each.name: each for each in ours}
    takes_all = any(each.kind is each.VAR_KEYWORD for each in ours)
    for arg, default in zip(theirs.kwonlyargs, theirs.kw_defaults, strict=True):
        if arg.arg not in by_name:
            if not takes_all:
                return f"does not take {arg.arg}"
        elif flaw := flaw_of_default(by_name[arg.arg], default):
            return flaw
    return ""


def flaw_of_needs(theirs: ast.arguments, ours: list[inspect.Parameter]) -> str:
    given = {each.arg for each in (*theirs.args, *theirs.kwonlyargs)}
    variable = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
    needed = {
        each.name for each in ours if each.default is each.empty and each.kind not in variable
    }
    return f"needs {', '.join(needed - given)}" if needed - given else ""


def flaw_of_default(ours: inspect.Parameter, theirs: ast.expr | None) -> str:
    if theirs is None:
        return ""
    if ours.default is ours.empty:
        return f"{ours.name} has no default"
    try:
        wanted = ast.literal_eval(theirs)
    except ValueError:
        return ""  # it is computed
    return "" if ours.default == wanted else f"{ours.name} is {ours.default!r} by default"


def test_each_instance_has_the_attributes_that_nvrx_sets() -> None:
    stored = nvrx_names.load()["attributes"]
    missing: dict[str, str] = {}
    for module, ours, name in standing_in():
        value = getattr(ours, name)
        if not inspect.isclass(value):
            continue
        source = "".join(
            inspect.getsource(each)
            for each in value.__mro__
            if each.__module__.startswith("trainer_sdk.")
        )
        absent = [
            attribute
            for attribute in stored.get(module, {}).get(name, "").split()
            if not hasattr(value, attribute)
            and not re.search(rf"self\.{attribute}\b(,[^=]+)?(: [^=]+)? = ", source)
            and not re.search(rf"^    {attribute}: ", source, re.MULTILINE)
        ]
        missing |= {f"{module}.{name}": " ".join(absent)} if absent else {}
    decided = nvrx.decisions()["attributes"]
    here = [call for call in decided if is_importable(call)]
    assert missing == {call: decided[call] for call in here}


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
