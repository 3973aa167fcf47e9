"""The public names of the SDK with their arguments, read from its source."""

import ast
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
MODULES = (
    "trainer_sdk",
    "trainer_sdk.checkpoint",
    "trainer_sdk.inject",
    "trainer_sdk.integrations.accelerate",
    "trainer_sdk.integrations.dcp",
    "trainer_sdk.integrations.deepspeed",
    "trainer_sdk.integrations.hugging_face",
    "trainer_sdk.integrations.lightning",
    "trainer_sdk.integrations.torchtitan",
    "trainer_sdk.numerics",
    "trainer_sdk.testing",
)
"""Where scripts import from. The names of NVRx have a page of their own."""

Arguments = dict[str, list[str]]
Definition = ast.ClassDef | ast.FunctionDef


def sdk_json() -> str:
    """Each name with its arguments, a line each, as JSON; an attribute has `null`."""
    lines = [f" {json.dumps(name)}: {json.dumps(each)}" for name, each in sorted(names().items())]
    return "\n".join(["{", ",\n".join(lines), "}\n"])


def names() -> dict[str, Arguments | None]:
    """Each public function, class, method and attribute."""
    return {
        name: arguments
        for module in MODULES
        for public in _public(module)
        for name, arguments in _described(f"{module}.{public}", module, public)
    }


def _public(module: str) -> list[str]:
    """`__all__`, or what the module defines itself."""
    tree = _tree(module)
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            exported: list[str] = ast.literal_eval(node.value)
            return exported
    defined = [node.name for node in tree.body if isinstance(node, Definition)]
    return [name for name in defined if not name.startswith("_")]


def _described(name: str, module: str, own: str) -> Iterator[tuple[str, Arguments | None]]:
    definition = _definition(module, own)
    if definition is None:
        yield name, None
    elif isinstance(definition[1], ast.FunctionDef):
        yield name, _arguments(definition[1], of_object=False)
    else:
        yield name, {}
        yield from _members(name, *definition)


def _members(name: str, module: str, node: Definition) -> Iterator[tuple[str, Arguments | None]]:
    """What a class has, from its bases in the SDK first: a later name wins."""
    assert isinstance(node, ast.ClassDef)
    for base in node.bases:
        inherited = _definition(module, ast.unparse(base))
        if inherited is not None and isinstance(inherited[1], ast.ClassDef):
            yield from _members(name, *inherited)
    for each in node.body:
        if isinstance(each, ast.FunctionDef) and each.name == "__init__":
            yield name, _arguments(each, of_object=True)
        elif isinstance(each, ast.FunctionDef) and not each.name.startswith("_"):
            decorators = {ast.unparse(decorator) for decorator in each.decorator_list}
            is_called = not decorators & {"property", "cached_property"}
            of_object = "staticmethod" not in decorators
            arguments = _arguments(each, of_object=of_object) if is_called else None
            yield f"{name}.{each.name}", arguments
        elif isinstance(each, ast.AnnAssign) and not ast.unparse(each.target).startswith("_"):
            yield f"{name}.{ast.unparse(each.target)}", None


def _definition(module: str, name: str) -> tuple[str, Definition] | None:
    """The module that defines a name, and the definition; None if that is not in the SDK."""
    if module.partition(".")[0] != "trainer_sdk":
        return None
    tree = _tree(module)
    for node in tree.body:
        if isinstance(node, Definition) and node.name == name:
            return module, node
    for imported in ast.walk(tree):
        if isinstance(imported, ast.ImportFrom) and imported.module is not None:
            for alias in imported.names:
                if (alias.asname or alias.name) == name:
                    return _definition(imported.module, alias.name)
    return None


def _arguments(node: ast.FunctionDef, *, of_object: bool) -> Arguments:
    """Each argument: whether it is required, and how it may be given."""
    given = node.args
    positional = [*given.posonlyargs, *given.args]
    first_optional = len(positional) - len(given.defaults)
    described: Arguments = {}
    for place, argument in enumerate(positional):
        need = "required" if place < first_optional else "optional"
        by_name = ["by name"] if argument in given.args else []
        described[argument.arg] = [need, *by_name, f"position {place - of_object}"]
    for argument, default in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        described[argument.arg] = ["required" if default is None else "optional", "by name"]
    for rest, stars in ((given.vararg, "*"), (given.kwarg, "**")):
        if rest is not None:
            described[stars] = ["optional"]
    if of_object:
        described.pop(positional[0].arg)
    return described


@cache
def _tree(module: str) -> ast.Module:
    path = ROOT / module.replace(".", "/")
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(file.read_text(encoding="utf-8"))
