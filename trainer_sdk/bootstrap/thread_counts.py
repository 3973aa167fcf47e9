"""Gives a forked rank the numbers of threads that a fresh process would have."""

import ctypes
import os
import sys
from collections.abc import Mapping

_PREFIXES = ("", "scipy_")
_SUFFIXES = ("", "64_")


def restore_threads(forge: Mapping[str, str], rank: Mapping[str, str]) -> None:
    """Set the rank's own values in libraries, which have read the forge's variables."""
    torch = sys.modules.get("torch")
    wanted = _number(rank, "OMP_NUM_THREADS")
    if torch is not None and wanted and forge.get("OMP_NUM_THREADS") != rank["OMP_NUM_THREADS"]:
        torch.set_num_threads(wanted)
    blas = (
        _number(rank, "OPENBLAS_NUM_THREADS")
        or _number(rank, "GOTO_NUM_THREADS")
        or wanted
        or len(os.sched_getaffinity(0))
    )
    if blas > 1:  # the forge has 1
        for path in _openblas():
            _set(path, blas)


def _number(environ: Mapping[str, str], name: str) -> int:
    value = environ.get(name, "").partition(",")[0]
    return int(value) if value.isdigit() else 0


def _openblas() -> set[str]:
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as file:
        paths = {line.split(maxsplit=5)[-1].rstrip("\n") for line in file if "openblas" in line}
    return {path for path in paths if path.startswith("/")}


def _set(path: str, number: int) -> None:
    library = ctypes.CDLL(path)
    for prefix in _PREFIXES:
        for suffix in _SUFFIXES:
            function = getattr(library, f"{prefix}openblas_set_num_threads{suffix}", None)
            if function is not None:
                function(number)
                return
