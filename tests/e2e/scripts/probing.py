"""Writes down what a script can see of its process, before it has done anything itself."""

# ruff: noqa: E402  what is imported by others is looked at first

import sys

SEEN_FIRST = {"modules": sorted(sys.modules), "path": list(sys.path), "meta": len(sys.meta_path)}

import atexit
import ctypes
import gc
import inspect
import json
import locale
import logging
import multiprocessing
import os
import random
import resource
import signal
import tempfile
import threading
import time
import uuid
import warnings
from pathlib import Path

import noisy_library  # type: ignore[import-not-found]  # in a folder of the test's
import numpy
import torch


def status(*names: str) -> dict[str, str]:
    lines = Path("/proc/self/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return {name: fields[name].strip() for name in names if name in fields}


def descriptors() -> dict[str, str]:
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[name] = os.readlink(f"/proc/self/fd/{name}").split(":")[0]
        except OSError:
            continue  # the folder itself
    return found


def square(number: int) -> int:
    return number * number


def spawned() -> list[int]:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.map(square, [2])


def seen(standard_input: str) -> dict[str, object]:
    main = sys.modules["__main__"]
    names = {
        number: str(signal.getsignal(number)).split(" at ")[0] for number in (1, 2, 10, 13, 15)
    }
    limits = {
        name: resource.getrlimit(getattr(resource, name))
        for name in dir(resource)
        if name.startswith("RLIMIT_")
    }
    priority = os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0)
    return {
        "environ": dict(os.environ),
        "stdin": [standard_input, sys.stdin.name, sys.stdin.mode, sys.stdin.isatty()],
        "stdout": [sys.stdout.encoding, sys.stdout.errors, sys.stderr.errors],
        "line by line": [sys.stdout.line_buffering, getattr(sys.stdout, "write_through", None)],
        "filters": sorted(str(one) for one in warnings.filters),
        "warned": noisy_library.WARNED,
        "showwarning": warnings.showwarning.__module__,
        "argv": [sys.argv, sys.executable],
        "orig_argv": sys.orig_argv,
        "command line": Path("/proc/self/cmdline").read_bytes().decode(),
        "flags": str(sys.flags),
        "xoptions": sys._xoptions,
        "main": [main.__file__, str(main.__spec__), main.__doc__, type(main.__loader__).__name__],
        "main names": sorted(name for name in vars(main) if name.startswith("__")),
        "source": inspect.getsource(square),
        "modules": SEEN_FIRST["modules"],
        "path": SEEN_FIRST["path"],
        "import hooks": SEEN_FIRST["meta"],
        "library": [noisy_library.RANK, os.environ.get("NOISY_WAS_HERE")],
        "logging": [logging.getLogger().level, len(logging.getLogger().handlers)],
        "log clock": abs(vars(logging)["_startTime"] - time.time()) < 600,
        "threads": [one.name for one in threading.enumerate()],
        "native id": threading.main_thread().native_id == os.getpid(),
        "torch threads": torch.get_num_threads(),
        "cuda": torch.cuda.is_initialized(),  # type: ignore[no-untyped-call]
        "torch seed": torch.initial_seed(),
        "default type": str(torch.get_default_dtype()),
        "limits": limits,
        "priority": priority,
        "affinity": sorted(os.sched_getaffinity(0)),
        "umask": os.umask(0o22),
        "cwd": os.getcwd(),
        "group": [os.getpgrp() == os.getpid(), os.getsid(0) == os.getpid()],
        "signals": names,
        "masks": status("SigBlk", "SigIgn", "SigCgt", "Seccomp", "NoNewPrivs", "CapEff"),
        "descriptors": descriptors(),
        "drawn": [random.random(), float(numpy.random.random()), noisy_library.DRAWN.random()],
        "given": noisy_library.GIVEN.random(),
        "key": multiprocessing.current_process().authkey.hex(),
        "names": [uuid.uuid4().hex, next(vars(tempfile)["_get_candidate_names"]())],
        "hash": hash("a"),
        "locale": [locale.getlocale(), locale.setlocale(locale.LC_ALL), time.tzname],
        "collector": [gc.isenabled(), gc.get_threshold(), gc.get_freeze_count() > 0],
        "tracing": [str(sys.gettrace()), str(sys.getprofile()), sys.getrecursionlimit()],
        "hooks": [
            sys.excepthook is sys.__excepthook__,
            sys.breakpointhook is sys.__breakpointhook__,
        ],
        "exit handlers": atexit._ncallbacks() - 0,
        "children": multiprocessing.get_start_method(allow_none=True),
        "spawned": spawned(),
        "dies with its parent": bool(parent_signal()),
    }


def parent_signal() -> int:
    number = ctypes.c_int()
    ctypes.CDLL(None).prctl(2, ctypes.byref(number), 0, 0, 0)
    return number.value


if __name__ == "__main__":
    rank = os.environ["RANK"]
    first_line = sys.stdin.readline().strip() if rank == "0" else ""
    Path(sys.argv[1], f"{rank}.json").write_text(json.dumps(seen(first_line)))
