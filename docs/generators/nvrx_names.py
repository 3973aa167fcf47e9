"""Reads the public names of NVRx from its unpacked wheel, without importing it.

`python -m docs.generators.nvrx_names FOLDER` writes them to `nvrx_names.json`, from which the
reference page is made; FOLDER is the package `nvidia_resiliency_ext` of the release.
"""

import ast
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainer_sdk.nvrx.aliases import MODULES

DATA = Path(__file__).with_suffix(".json")
_HELPERS = {"logger", "log", "T", "U", "V", "ctx", "DESCRIPTOR"}
"""Names at the top of modules that nobody imports."""
_VARIABLE = re.compile(r"(?:NVRX|FT|LLM|SLACK|CROSS_SLURM)_[A-Z0-9_]+[A-Z0-9]")
_NO_VARIABLES = {"FT_DIR_NAME", "LLM_API_KEY_ENV_VAR", "LLM_API_KEY_FILE_ENV_VAR"}
_CALLS = {"__init__", "__call__"}
_CONFIG = "fault_tolerance.config"


def names_in(package: Path) -> dict[str, Any]:
    """Modules with their names and methods, options, environment variables, and YAML keys.

    Of modules that stand in also the arguments of each call, and the attributes of instances.
    """
    modules: dict[str, dict[str, list[str]]] = {}
    arguments: dict[str, dict[str, str]] = {}
    attributes: dict[str, dict[str, str]] = {}
    options: dict[str, list[str]] = {}
    variables: set[str] = set()
    keys: list[str] = []
    for path in sorted(package.rglob("*.py")):
        module = _module(path, package)
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if "-" not in module:  # scripts beside the package cannot be imported
            modules[module] = dict(sorted(_names(tree, is_package=path.name == "__init__.py")))
        if MODULES.get(module):
            arguments[module] = dict(_arguments(tree.body, ""))
            classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
            attributes[module] = {
                node.name: " ".join(sorted(set(_attributes(node))))
                for node in classes
                if _is_public(node.name) and any(_attributes(node))
            }
        if given := sorted(set(_options(tree))):
            options[module] = given
        variables |= set(_variables(tree))
        if module == _CONFIG:
            keys = list(_fields(tree, "FaultToleranceConfig"))
    return {
        "modules": {module: names for module, names in modules.items() if names},
        "arguments": {module: calls for module, calls in arguments.items() if calls},
        "attributes": {module: classes for module, classes in attributes.items() if classes},
        "options": options,
        "variables": sorted(variables),
        "keys": sorted(keys),
    }


def load() -> dict[str, Any]:
    """The names as they are stored."""
    stored: dict[str, Any] = json.loads(DATA.read_text(encoding="utf-8"))
    return stored


def _module(path: Path, package: Path) -> str:
    parts = path.relative_to(package).with_suffix("").parts
    return ".".join(parts).removesuffix("__init__").rstrip(".")


def _names(tree: ast.Module, *, is_package: bool) -> list[tuple[str, list[str]]]:
    """What a module defines at its top, and a package exports; with the methods of classes."""
    found: dict[str, list[str]] = {}
    for node in tree.body:
        match node:
            case ast.ClassDef():
                found[node.name] = sorted(set(_methods(node)))
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                found[node.name] = []
            case ast.ImportFrom() if node.level and is_package:
                found |= {alias.asname or alias.name: [] for alias in node.names}
            case ast.Assign() | ast.AnnAssign():
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                found |= {each.id: [] for each in targets if isinstance(each, ast.Name)}
            case _:
                pass
    return [(name, methods) for name, methods in found.items() if _is_public(name)]


def _is_public(name: str) -> bool:
    return not name.startswith("_") and name not in _HELPERS


def _methods(node: ast.ClassDef) -> Iterator[str]:
    for each in node.body:
        is_function = isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
        if is_function and not each.name.startswith("_"):
            yield each.name


def _arguments(body: list[ast.stmt], prefix: str) -> Iterator[tuple[str, str]]:
    """The arguments of each public function and method, without types and the object itself."""
    for node in body:
        if isinstance(node, ast.ClassDef):
            if not prefix and _is_public(node.name):
                yield from _arguments(node.body, f"{node.name}.")
        elif isinstance(node, ast.FunctionDef) and (
            _is_public(node.name) or (prefix and node.name in _CALLS)
        ):
            decorators = {ast.unparse(each) for each in node.decorator_list}
            if "property" not in decorators:
                of_object = bool(prefix) and "staticmethod" not in decorators
                yield prefix + node.name, _without_types(node.args, of_object=of_object)


def _without_types(arguments: ast.arguments, *, of_object: bool) -> str:
    for each in ast.walk(arguments):
        if isinstance(each, ast.arg):
            each.annotation = None
    if of_object:
        del arguments.args[0]
    return ast.unparse(arguments)


def _attributes(node: ast.ClassDef) -> Iterator[str]:
    """The public attributes that the constructor sets."""
    for method in node.body:
        if isinstance(method, ast.FunctionDef) and method.name == "__init__":
            for each in ast.walk(method):
                if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store):
                    of_self = isinstance(each.value, ast.Name) and each.value.id == "self"
                    if of_self and _is_public(each.attr):
                        yield each.attr


def _options(tree: ast.Module) -> Iterator[str]:
    """The long options that a program declares, with dashes."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = getattr(node.func, "attr", "") or getattr(node.func, "id", "")
        if called.endswith("add_argument"):
            texts = [each.value for each in node.args if isinstance(each, ast.Constant)]
            for text in texts:
                if isinstance(text, str) and text.startswith("--"):
                    yield text.replace("_", "-")


def _variables(tree: ast.Module) -> Iterator[str]:
    """NVRx's own environment variables: texts of their form, and fields of settings."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if _VARIABLE.fullmatch(node.value) and node.value not in _NO_VARIABLES:
                yield node.value
        elif isinstance(node, ast.ClassDef):
            prefix = _prefix(node)
            if prefix:
                yield from (f"{prefix}{field.upper()}" for field in _own_fields(node))


def _prefix(node: ast.ClassDef) -> str:
    """The prefix of the variables that a class of settings reads; empty for other classes."""
    for each in ast.walk(node):
        if isinstance(each, ast.keyword) and each.arg == "env_prefix":
            value = each.value
            return str(value.value) if isinstance(value, ast.Constant) else ""
    return ""


def _fields(tree: ast.Module, name: str) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name == name:
            yield from _own_fields(node)


def _own_fields(node: ast.ClassDef) -> Iterator[str]:
    for each in node.body:
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            name = each.target.id
            if not name.startswith("_") and name != "model_config":
                yield name


if __name__ == "__main__":
    found = names_in(Path(sys.argv[1]))
    DATA.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n", encoding="utf-8")
