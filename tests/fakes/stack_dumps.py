"""Dumps of stacks as py-spy prints them, from a few words a frame."""

import json
from collections.abc import Sequence
from typing import Any

_TORCH = "/venv/lib/python3.12/site-packages/torch"
_MAIN = ("main /home/u/train.py:61", "<module> /home/u/train.py:80")

REDUCE = (
    f"all_reduce {_TORCH}/distributed/distributed_c10d.py:3252",
    f"_exception_logger.<locals>.wrapper {_TORCH}/distributed/c10d_logger.py:83",
    *_MAIN,
)
BARRIER = (
    f"barrier {_TORCH}/distributed/distributed_c10d.py:5356",
    "Trainer.save /home/u/train.py:90",
    "<module> /home/u/train.py:99",
)
BROADCAST = (f"broadcast {_TORCH}/distributed/distributed_c10d.py:3100", *_MAIN)
RECEIVE = (f"recv {_TORCH}/distributed/distributed_c10d.py:2700", *_MAIN)
BACKWARD = (
    f"_engine_run_backward {_TORCH}/autograd/graph.py:869",
    f"Tensor.backward {_TORCH}/_tensor.py:625",
    *_MAIN,
)
RENDEZVOUS = (
    f"_create_c10d_store {_TORCH}/distributed/rendezvous.py:190",
    f"init_process_group {_TORCH}/distributed/distributed_c10d.py:1500",
    *_MAIN,
)
FORWARD = (
    "Model.forward /home/u/model.py:12",
    f"Module._call_impl {_TORCH}/nn/modules/module.py:1787",
    *_MAIN,
)
QUEUE = (
    "Condition.wait /usr/lib/python3.12/threading.py:355",
    "Queue.get /usr/lib/python3.12/queue.py:171",
)
LOADER = (
    "poll /usr/lib/python3.12/multiprocessing/connection.py:257",
    f"_MultiProcessingDataLoaderIter._try_get_data {_TORCH}/utils/data/dataloader.py:1310",
    *_MAIN,
)
SAMPLE = (
    "Samples.__getitem__ /home/u/data.py:33",
    f"_MapDatasetFetcher.fetch {_TORCH}/utils/data/_utils/fetch.py:54",
    f"_SingleProcessDataLoaderIter._next_data {_TORCH}/utils/data/dataloader.py:788",
    *_MAIN,
)
WORKER = (
    "Samples.__getitem__ /home/u/data.py:33",
    f"_MapDatasetFetcher.fetch {_TORCH}/utils/data/_utils/fetch.py:54",
    f"_worker_loop {_TORCH}/utils/data/_utils/worker.py:349",
)
SAVE = (
    f"_open_zipfile_writer_file.__init__ {_TORCH}/serialization.py:780",
    f"save {_TORCH}/serialization.py:966",
    *_MAIN,
)
IMPORT = (
    "<module> /home/u/huge.py:3",
    "_call_with_frames_removed <frozen importlib._bootstrap>:241",
    "_find_and_load <frozen importlib._bootstrap>:1176",
    *_MAIN,
)
SHUTDOWN = ("_shutdown /usr/lib/python3.12/threading.py:1590",)
_RUNNER = "/venv/lib/python3.12/site-packages/trainer_sdk/bootstrap"
AFTER_SCRIPT = (f"_looks {_RUNNER}/torch_exit.py:116", f"_wait {_RUNNER}/torch_exit.py:71")
RECORDING = (
    "parse /usr/lib/python3.12/ast.py:50",
    f"_report_end {_RUNNER}/script_runner.py:140",
    f"run {_RUNNER}/script_runner.py:55",
)
POOL = (
    "_worker /usr/lib/python3.12/concurrent/futures/thread.py:81",
    "Thread.run /usr/lib/python3.12/threading.py:982",
)
WRITER = (
    *QUEUE,
    "Watch.run /venv/lib/python3.12/site-packages/trainer_sdk/checkpoint/save/save_queue.py:90",
)


def thread(
    frames: Sequence[str],
    *,
    name: str = "MainThread",
    pid: int = 100,
    os_thread: int | None = None,
    active: bool = False,
    owns_gil: bool = False,
) -> dict[str, Any]:
    """A thread; frames are `name file:line`, and `name libx.so` for native ones."""
    return {
        "pid": pid,
        "thread_id": 1,
        "thread_name": name,
        "os_thread_id": os_thread or (pid if name == "MainThread" else pid + 7),
        "active": active,
        "owns_gil": owns_gil,
        "frames": [_frame(one) for one in frames],
    }


def _frame(text: str) -> dict[str, Any]:
    name, _, place = text.partition(" ")
    file, _, line = place.rpartition(":")
    is_native = not file
    file = file or place
    return {
        "name": name,
        "filename": file,
        "module": file if is_native else None,
        "short_filename": file,
        "line": 0 if is_native else int(line),
        "locals": None,
        "is_entry": False,
    }


def dump(*threads: dict[str, Any]) -> bytes:
    """What `py-spy dump --json` prints of these threads."""
    return json.dumps(threads, indent=2).encode()
