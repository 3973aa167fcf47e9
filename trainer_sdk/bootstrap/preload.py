"""What a forge imports before it forks, and whether it may still fork afterwards."""

import ast
import importlib
import os
import re
import sys
import sysconfig
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.machinery import PathFinder

from trainer_sdk.wire import Command, ForgePlan, Unfit

_TORCH, _DYNAMO = "torch", "torch._dynamo"
_OPTIMIZER = re.compile(rb"\boptim\b")
"""A script that names this module makes an optimizer, and torch's first one imports `_DYNAMO`."""
_DEVICES = ("/dev/nvidia", "/dev/kfd")


@dataclass(slots=True)
class Preloaded:
    """What became of the imports."""

    names: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    """`name: why`."""
    unfit: Unfit | None = None


def preload(plan: ForgePlan) -> Preloaded:
    """Import torch and what the plan names; stop at the first that makes a fork unsafe."""
    done = Preloaded()
    folder = script_folder(plan.command, plan.cwd)
    names = imports_of_script(plan.command, plan.cwd) if plan.preload == "auto" else plan.preload
    optimizes = _OPTIMIZER.search(_source(plan.command, plan.cwd))
    ours = (_TORCH, _DYNAMO) if optimizes else (_TORCH,)
    sys.path.insert(0, folder)
    try:
        for name in dict.fromkeys((*ours, *names)):
            if name not in plan.without and not _import(name, done, named=name in names):
                break
    finally:
        sys.path.remove(folder)
    return done


def _import(name: str, done: Preloaded, *, named: bool) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # each rank would not have seen it either, but once
            importlib.import_module(name)
    # The script's own import says it again, where the user looks for it.
    except Exception as error:  # noqa: BLE001
        if named:
            done.failed.append(f"{name}: {type(error).__name__}: {error}")
        return True
    done.names.append(name)
    reason = why_unsafe()
    if reason:
        done.unfit = Unfit(reason=f"{reason} (after `import {name}`)", module=name)
    return not reason


def why_unsafe() -> str:
    """Why a fork of this process would not be a sound rank; empty if it would.

    Only the forking thread lives on in a child: a lock that another one holds stays locked for
    ever. A device that was opened here cannot be used there.
    """
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        return f"{threads - 1} more thread(s) run in it"
    device = next((path for path in _open_files() if path.startswith(_DEVICES)), "")
    if device:
        return f"it has opened {device}"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "CUDA is initialised in it"
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return "it has a process group"
    return ""


def _open_files() -> Iterator[str]:
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            yield os.readlink(f"/proc/self/fd/{descriptor}")
        except OSError:
            continue  # the one that listed the folder


def script_folder(command: Command, cwd: str) -> str:
    """What the script will find first on its path."""
    if command.kind == "module":
        return cwd
    return os.path.dirname(os.path.realpath(os.path.join(cwd, command.target)))


def imports_of_script(command: Command, cwd: str) -> tuple[str, ...]:
    """What the script imports at its top level and an installer has put there.

    The user's own modules are not among them: they may look at the rank's environment.
    """
    folder = script_folder(command, cwd)
    try:
        tree = ast.parse(_source(command, cwd))
    except (SyntaxError, ValueError):
        return ()  # the ranks will say it
    found = dict.fromkeys(name for name in _top_level(tree.body) if _is_installed(name, folder))
    return tuple(found)


def _source(command: Command, cwd: str) -> bytes:
    """The script's text; empty where there is none to be read: the ranks will say it."""
    try:
        with open(_script_path(command, cwd, script_folder(command, cwd)), "rb") as file:
            return file.read()
    except OSError:
        return b""


def _script_path(command: Command, cwd: str, folder: str) -> str:
    if command.kind != "module":
        return os.path.join(cwd, command.target)
    for name in (command.target, f"{command.target}.__main__"):
        origin = _origin(name, [folder, *sys.path])
        if origin and os.path.basename(origin) != "__init__.py":
            return origin
    return ""


def _top_level(body: Sequence[ast.stmt]) -> Iterator[str]:
    for statement in body:
        if isinstance(statement, ast.Import):
            yield from (alias.name for alias in statement.names)
        elif isinstance(statement, ast.ImportFrom) and statement.module and not statement.level:
            yield statement.module
        elif isinstance(statement, ast.Try):
            yield from _top_level(statement.body)


def _is_installed(name: str, folder: str) -> bool:
    origin = _origin(name, [folder, *sys.path])
    paths = sysconfig.get_paths()
    roots = {paths["purelib"], paths["platlib"]}
    return any(origin.startswith(os.path.join(root, "")) for root in roots) or (
        f"{os.sep}dist-packages{os.sep}" in origin
    )


def _origin(name: str, path: Sequence[str]) -> str:
    """Where a module is, found without running any of its parents."""
    search: Sequence[str] = path
    spec = None
    for depth in range(1, name.count(".") + 2):
        try:
            spec = PathFinder.find_spec(".".join(name.split(".")[:depth]), search)
        except (ImportError, KeyError, ValueError):
            return ""  # a part of a namespace package, for one, asks for a parent that was imported
        if spec is None:
            return ""
        search = spec.submodule_search_locations or ()
    return (spec.origin or "") if spec is not None else ""
