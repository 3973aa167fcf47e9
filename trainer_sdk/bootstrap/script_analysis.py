"""Analyses a script before it runs, from its source text alone."""

import ast
import os
import sys
import sysconfig
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from importlib.util import resolve_name
from itertools import islice

from trainer_sdk.wire import RankCommand

_MOST_FILES = 20
_MOST_BYTES = 2**20
"""Limits the source that is read: of a script, and of the user's modules that it imports."""
_TORCH, _OPTIM, _DDP = "torch", "optim", "DistributedDataParallel"
_NEEDING = (
    "torch.optim.",
    "torch.utils.checkpoint.",
    "torch.distributed.fsdp.",
    "torch.distributed.tensor.",
)
"""Modules that import dynamo when they are used, and the names in them."""
_SURVIVE = "survive"
_BASE = "Optimizer"
"""The base of all optimizers, which itself does not need dynamo (see `torch_hooks`)."""


@dataclass(frozen=True, slots=True)
class Script:
    """The script of the ranks. If its source cannot be read, it counts as empty."""

    folder: str
    """The first folder on its module path."""
    package: str
    """The package of its relative imports; empty if it may have none."""
    tree: ast.Module

    def imports(self) -> tuple[str, ...]:
        """The installed modules that it imports at its top level.

        The user's own modules are left out: they may read the rank's environment.
        """
        installed = (name for name in _top_level(self.tree.body) if self._is_installed(name))
        return tuple(dict.fromkeys(installed))

    def needs_dynamo(self) -> bool:
        """Whether its ranks will import `torch._dynamo`, as far as the source shows.

        They do if its code, or a module of the user that it imports, uses DDP, FSDP2, DTensor,
        activation checkpoints, or more of `torch.optim` than the base class. Strings, comments and
        code for type checkers do not count.
        """
        return any(map(_needs_dynamo, self._trees()))

    def survives(self) -> bool:
        """Whether it seems to call `run.survive`, as far as the same source shows."""
        nodes = (node for tree in self._trees() for node in _running(tree))
        return any(isinstance(node, ast.Attribute) and node.attr == _SURVIVE for node in nodes)

    def _trees(self) -> Iterator[ast.Module]:
        yield self.tree
        yield from self._own_modules()

    def _own_modules(self) -> Iterator[ast.Module]:
        """The user's own modules that it imports."""
        names = (name for node in _running(self.tree) for name in _imported(node, self.package))
        origins = dict.fromkeys(_origin(name, [self.folder]) for name in names)
        left = _MOST_BYTES
        for path in islice((origin for origin in origins if origin.endswith(".py")), _MOST_FILES):
            source = _source(path, left)
            left -= len(source)
            yield _parsed(source)

    def _is_installed(self, name: str) -> bool:
        origin = _origin(name, [self.folder, *sys.path])
        paths = sysconfig.get_paths()
        roots = {paths["purelib"], paths["platlib"]}
        return any(origin.startswith(os.path.join(root, "")) for root in roots) or (
            f"{os.sep}dist-packages{os.sep}" in origin
        )


def read_script(command: RankCommand, cwd: str) -> Script:
    """The script of a command; its errors are left to the ranks, which report them."""
    if command.kind == "module":
        path, package = _module(command.target, cwd)
        return Script(cwd, package, _parsed(_source(path, _MOST_BYTES)))
    path = os.path.join(cwd, command.target)
    folder = os.path.dirname(os.path.realpath(path))
    return Script(folder, "", _parsed(_source(path, _MOST_BYTES)))


def _module(target: str, cwd: str) -> tuple[str, str]:
    """The file that `python -m` runs, and its package; empty if there is none."""
    for name in (target, f"{target}.__main__"):
        origin = _origin(name, [cwd, *sys.path])
        if origin and os.path.basename(origin) != "__init__.py":
            return origin, name.rpartition(".")[0]
    return "", ""


def _source(path: str, most: int) -> bytes:
    """A file's bytes; empty if it cannot be read or has more than `most`."""
    if not os.path.isfile(path):  # a FIFO would wait for ever
        return b""
    try:
        with open(path, "rb") as file:
            text = file.read(most + 1)
    except OSError:
        return b""
    return text if len(text) <= most else b""


def _parsed(source: bytes) -> ast.Module:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the source: each rank prints them
            return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # MemoryError: nested too deeply
        return ast.Module([], [])


def _top_level(body: Sequence[ast.stmt]) -> Iterator[str]:
    for statement in body:
        if isinstance(statement, ast.Import):
            yield from (alias.name for alias in statement.names)
        elif isinstance(statement, ast.ImportFrom) and statement.module and not statement.level:
            yield statement.module
        elif isinstance(statement, ast.Try):
            yield from _top_level(statement.body)


def _running(tree: ast.Module) -> Iterator[ast.AST]:
    """Each node of the code, without the parts for type checkers."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns") or (name == "body" and _is_for_types(node)):
                continue
            values = value if isinstance(value, list) else [value]
            waiting += [child for child in values if isinstance(child, ast.AST)]


def _is_for_types(node: ast.AST) -> bool:
    match node:
        case ast.If(test=ast.Name(id="TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING")):
            return True
        case _:
            return False


def _imported(node: ast.AST, package: str) -> Iterator[str]:
    """The full names in an import; for `from x import y` both `x` and `x.y`."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        try:
            base = resolve_name("." * node.level + (node.module or ""), package)
        except ImportError:
            return  # it leads out of its package
        yield base
        yield from (f"{base}.{alias.name}" for alias in node.names)


def _needs_dynamo(tree: ast.Module) -> bool:
    code = list(_running(tree))
    torch = {
        alias.asname or _TORCH
        for node in code
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.name == _TORCH or (alias.name.startswith(f"{_TORCH}.") and not alias.asname)
    }
    bases = {
        id(node.value) for node in code if isinstance(node, ast.Attribute) and node.attr == _BASE
    }
    return any(
        (_uses_dynamo(node, torch) and id(node) not in bases) or _is_ddp(node) for node in code
    )


def _uses_dynamo(node: ast.AST, torch: set[str]) -> bool:
    """Whether a node imports from such a module, or reads `optim` of a name bound to torch."""
    match node:
        case ast.Attribute():
            return (
                node.attr == _OPTIM and isinstance(node.value, ast.Name) and node.value.id in torch
            )
        case ast.ImportFrom(module="torch.optim" | "torch.optim.optimizer", level=0):
            return any(alias.name != _BASE for alias in node.names)
        case _:
            return any(f"{name}.".startswith(_NEEDING) for name in _imported(node, ""))


def _is_ddp(node: ast.AST) -> bool:
    if isinstance(node, ast.Attribute):
        return node.attr == _DDP
    parts = [name.split(".") for name in _imported(node, "")]
    return any((name[0], name[-1]) == (_TORCH, _DDP) for name in parts)


def _origin(name: str, path: Sequence[str]) -> str:
    """The file of a module, found without running its parent packages; empty if none is found."""
    search: Sequence[str] = path
    spec = None
    for depth in range(1, name.count(".") + 2):
        try:
            spec = PathFinder.find_spec(".".join(name.split(".")[:depth]), search)
        except (ImportError, KeyError, ValueError):
            return ""  # such as a namespace package, whose parent would have to be imported
        if spec is None:
            return ""
        search = spec.submodule_search_locations or ()
    return (spec.origin or "") if spec is not None else ""
