"""Imports modules in the forge before it forks, and checks whether it may still fork."""

import ctypes
import importlib
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from trainer_sdk.bootstrap.garbage_collection import collector_paused
from trainer_sdk.bootstrap.import_watch import ImportWatch
from trainer_sdk.bootstrap.script_analysis import read_script
from trainer_sdk.wire import ForgePlan, Unfit

_TORCH, _DYNAMO, _SURVIVAL = "torch", "torch._dynamo", "trainer_sdk.survive.loop"
_DEVICES = ("/dev/nvidia", "/dev/kfd")
_NVML = "/dev/nvidiactl"
"""All that NVML opens to count devices; CUDA opens each device, and `/dev/nvidia-uvm`."""
_NOT_STARTED = 3
"""CUDA_ERROR_NOT_INITIALIZED."""
NVML_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""With this, `torch.cuda.is_available()` asks NVML, which spoils no fork, and many modules call
it when they are imported. Ranks do not have it.
"""


@dataclass(slots=True)
class Preloaded:
    """The result of the imports."""

    names: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    """Each as `name: reason`."""
    unfit: Unfit | None = None
    warned: list[warnings.WarningMessage] = field(default_factory=list)
    """The warnings that a rank with these imports would have printed on its stderr."""


def preload(plan: ForgePlan, imports: ImportWatch) -> Preloaded:
    """Import torch and the plan's modules; stop at the first that makes a fork unsafe."""
    done = Preloaded()
    with imports, _warnings_kept(done.warned):
        _import_all(plan, imports, done)
    if done.unfit is None:
        done.unfit = imports.verdict()
    return done


def _import_all(plan: ForgePlan, imports: ImportWatch, done: Preloaded) -> None:
    script = read_script(plan.command, plan.cwd)
    names = script.imports() if plan.preload == "auto" else plan.preload
    # The first optimizer or DDP imports dynamo, which takes as long as torch itself.
    ours = (_TORCH, _DYNAMO) if script.needs_dynamo() else (_TORCH,)
    if script.survives():  # a lost rank begins while all others wait for it
        ours = (*ours, _SURVIVAL)
    sys.path.insert(0, script.folder)
    try:
        for name in dict.fromkeys((*ours, *names, *plan.besides)):
            if _is_left_out(name, plan.without):
                continue
            loaded = frozenset(sys.modules)
            # Torch's import leaves almost no garbage, and looking for it takes a tenth of the time.
            with collector_paused() if name in ours else nullcontext():
                fit = _import(name, done, named=name in names)
            if name not in ours:
                imports.look(loaded)
            if not fit:
                break
    finally:
        if script.folder in sys.path:  # a module may have removed it
            sys.path.remove(script.folder)


def _is_left_out(name: str, without: tuple[str, ...]) -> bool:
    return any(f"{name}.".startswith(f"{left}.") for left in without)


@contextmanager
def _warnings_kept(shown: list[warnings.WarningMessage]) -> Iterator[None]:
    """Collect warnings in `shown`; a module's own filters and `showwarning` stay."""
    module: Any = warnings
    show = module._showwarnmsg_impl  # noqa: SLF001
    module._showwarnmsg_impl = shown.append  # noqa: SLF001
    try:
        yield
    finally:
        module._showwarnmsg_impl = show  # noqa: SLF001


def _import(name: str, done: Preloaded, *, named: bool) -> bool:
    try:
        importlib.import_module(name)
    # The script's own import raises it again, where the user looks for it.
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
    """Why a fork of this process could not be a rank; empty if it could.

    A forked child has only the forking thread: a lock that another thread holds stays locked for
    ever. A child cannot use a device that its parent has opened.
    """
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        return f"{threads - 1} more thread(s) run in it"
    opened = (path for path in _open_files() if path != _NVML)
    device = next((path for path in opened if path.startswith(_DEVICES)), "")
    if device:
        return f"it has opened {device}"
    torch = sys.modules.get("torch")
    if _has_started_driver() or (torch is not None and torch.cuda.is_initialized()):
        return "CUDA is initialised in it"
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return "it has a process group"
    return ""


def _has_started_driver() -> bool:
    """Whether a module has called `cuInit`, as Triton's does: torch does not know of that."""
    try:
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOW | os.RTLD_NOLOAD)
    except OSError:
        return False  # nobody has loaded it
    return bool(driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) != _NOT_STARTED)


def _open_files() -> Iterator[str]:
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            yield os.readlink(f"/proc/self/fd/{descriptor}")
        except OSError:
            continue  # the descriptor that listed the folder
