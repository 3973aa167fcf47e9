"""What a forge imports before it forks, and whether it may still fork afterwards."""

import gc
import importlib
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from trainer_sdk.bootstrap.import_watch import ImportWatch
from trainer_sdk.bootstrap.script_analysis import read_script
from trainer_sdk.wire import ForgePlan, Unfit

_TORCH, _DYNAMO = "torch", "torch._dynamo"
_DEVICES = ("/dev/nvidia", "/dev/kfd")


@dataclass(slots=True)
class Preloaded:
    """What became of the imports."""

    names: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    """`name: why`."""
    unfit: Unfit | None = None
    warned: list[warnings.WarningMessage] = field(default_factory=list)
    """What a rank that imports all of this would have written to its stderr."""


def preload(plan: ForgePlan, imports: ImportWatch) -> Preloaded:
    """Import torch and what the plan names; stop at the first that makes a fork unsafe."""
    done = Preloaded()
    with imports, _warnings_kept(done.warned):
        _import_all(plan, imports, done)
    if done.unfit is None:
        done.unfit = imports.verdict()
    return done


def _import_all(plan: ForgePlan, imports: ImportWatch, done: Preloaded) -> None:
    script = read_script(plan.command, plan.cwd)
    names = script.imports() if plan.preload == "auto" else plan.preload
    # A process's first optimizer, or first DDP, imports it, which takes as long as torch itself.
    ours = (_TORCH, _DYNAMO) if script.needs_dynamo() else (_TORCH,)
    sys.path.insert(0, script.folder)
    try:
        for name in dict.fromkeys((*ours, *names, *plan.besides)):
            if _is_left_out(name, plan.without):
                continue
            loaded = frozenset(sys.modules)
            with _uncollected() if name in ours else nullcontext():
                fit = _import(name, done, named=name in names)
            if name not in ours:
                imports.look(loaded)
            if not fit:
                break
    finally:
        if script.folder in sys.path:  # a module may have taken it away
            sys.path.remove(script.folder)


def _is_left_out(name: str, without: tuple[str, ...]) -> bool:
    return any(f"{name}.".startswith(f"{left}.") for left in without)


@contextmanager
def _warnings_kept(shown: list[warnings.WarningMessage]) -> Iterator[None]:
    """Filters that a module adds, and what it puts in the place of `showwarning`, stay."""
    module: Any = warnings
    show = module._showwarnmsg_impl  # noqa: SLF001
    module._showwarnmsg_impl = shown.append  # noqa: SLF001
    try:
        yield
    finally:
        module._showwarnmsg_impl = show  # noqa: SLF001


@contextmanager
def _uncollected() -> Iterator[None]:
    """Of what torch makes while it is imported nearly all stays: to look for garbage is a tenth."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _import(name: str, done: Preloaded, *, named: bool) -> bool:
    try:
        importlib.import_module(name)
    # The script's own import says it again, where the user looks for it.
    except Exception as error:  # noqa: BLE001
        if named:
            done.failed.append(f"{name}: {type(error).__name__}: {error}")
        return True
    if named or name in (_TORCH, _DYNAMO):
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
