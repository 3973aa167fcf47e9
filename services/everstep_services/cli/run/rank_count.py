"""How many ranks a node runs: a number, or one for each device or core, without importing torch."""

import importlib
import os
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

from everstep_services.cli.run.arguments import UsageError

_PROC = Path("/proc/driver/nvidia/gpus")
_WITHIN_S = 120.0
_BY_TORCH = """
import sys, torch
kind = sys.argv[1]
if kind == "auto":
    here = torch.accelerator.is_available()
    print(torch.accelerator.device_count() if here else 0)
else:
    print(getattr(torch, kind).device_count())
"""

Count = Callable[[], int]


def count_ranks(text: str, environ: Mapping[str, str], python: str) -> tuple[int, str]:
    """The number that `--nproc-per-node` means here, and what was counted (empty: a number)."""
    wanted = text.strip().lower()
    if wanted.isascii() and wanted.isdecimal():
        if int(wanted) == 0:
            raise UsageError("--nproc-per-node 0: a node runs at least one rank")
        return int(wanted), ""
    if wanted == "cpu":
        return cores(), "CPU cores"
    if wanted in {"gpu", "auto"}:
        gpus = count_gpus(environ)
        if gpus:
            return gpus, "GPUs"
        if wanted == "gpu":
            visible = environ.get("CUDA_VISIBLE_DEVICES")
            why = "" if visible is None else f" (CUDA_VISIBLE_DEVICES is {visible!r})"
            raise UsageError(
                f"--nproc-per-node gpu: there is no GPU here{why}; give a number, or `auto`"
            )
        return cores(), "CPU cores, as there is no GPU"
    return _ask_torch(wanted, python, environ), f"{wanted} devices"


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0))


def count_gpus(environ: Mapping[str, str], installed: Count | None = None) -> int:
    """GPUs that a rank would see: those installed, less what CUDA_VISIBLE_DEVICES hides."""
    number = (installed or _installed_gpus)()
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None or not number:
        return number
    seen: list[str] = []
    for word in (part.strip() for part in visible.split(",")):
        if word.startswith(("GPU-", "MIG-")):
            seen.append(word)
        elif word.isascii() and word.isdecimal() and int(word) < number:
            seen.append(str(int(word)))
        else:
            break  # CUDA itself ignores all that follows a device that is not there
    return len(seen) if len(set(seen)) == len(seen) else 0  # one twice: CUDA shows none


def _installed_gpus() -> int:
    try:
        pynvml = importlib.import_module("pynvml")
    except ModuleNotFoundError:
        return _gpus_of_the_driver()
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return _gpus_of_the_driver()
    try:
        return int(pynvml.nvmlDeviceGetCount())
    except pynvml.NVMLError:
        return _gpus_of_the_driver()
    finally:
        pynvml.nvmlShutdown()


def _gpus_of_the_driver() -> int:
    try:
        return len(list(_PROC.iterdir()))
    except OSError:
        return 0


def _ask_torch(kind: str, python: str, environ: Mapping[str, str]) -> int:
    """Devices of a kind that only torch knows, counted in a process of its own."""
    if not kind.isidentifier():
        raise UsageError(
            f"--nproc-per-node {kind!r}: expected a whole number, or one of auto, gpu, cpu, xpu"
        )
    try:
        done = subprocess.run(  # noqa: S603  our own text, and a word that is an identifier
            [python, "-P", "-c", _BY_TORCH, kind],
            capture_output=True, text=True, timeout=_WITHIN_S, check=False, env=dict(environ),
        )  # fmt: skip
        number = int(done.stdout.strip() or 0) if done.returncode == 0 else 0
    except (OSError, ValueError, subprocess.TimeoutExpired):
        number = 0
    if number < 1:
        raise UsageError(
            f"--nproc-per-node {kind}: torch finds no such device here; give a number, or one of "
            f"auto, gpu, cpu"
        )
    return number
