"""Ranks that stand still: locks, sleeps, data, checkpoints."""

import ctypes
import fcntl
import itertools
import os
import queue
import select
import socket
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

from tests.corpus.injected.registry import HOURS_S, Training, fault


@fault("lock_held", "forward")
def sleeps_with_the_interpreter(training: Training) -> None:
    """A C function keeps the interpreter's lock."""
    ctypes.PyDLL(None).sleep(HOURS_S)


@fault("lock_held", "forward")
def computes_with_the_interpreter(training: Training) -> None:
    """A loop in C keeps the interpreter's lock, and computes."""
    sum(itertools.repeat(1, 10**18))


@fault("lock_held", "forward")
def abandoned_lock(training: Training) -> None:
    """A thread has ended without releasing what it held."""
    lock = threading.Lock()
    thread = threading.Thread(target=lock.acquire)
    thread.start()
    thread.join()
    with lock:
        training.forward()


@fault("lock_held", "optimize")
def deadlocked_threads(training: Training) -> None:
    """Two threads take two locks in different orders."""
    one, other, met = threading.Lock(), threading.Lock(), threading.Barrier(2)

    def second() -> None:
        with other:
            met.wait()
            one.acquire()

    threading.Thread(target=second, daemon=True, name="prefetch").start()
    with one:
        met.wait()
        with other:
            training.optimize()


@fault("lock_held", "metrics")
def locked_file(training: Training) -> None:
    """Another process has locked a file, and does not let go."""
    path = training.folder / f"lock_{training.rank}"
    held = path.open("w")
    fcntl.flock(held, fcntl.LOCK_EX)
    child = subprocess.Popen(["sleep", str(HOURS_S)], pass_fds=[held.fileno()])
    held.close()
    (training.folder / f"child_{training.rank}").write_text(str(child.pid))
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)


@fault("lock_held", "backward")
def thread_keeps_the_interpreter(training: Training) -> None:
    """A thread in the background keeps the interpreter's lock; the main thread gets no turn."""
    threading.Thread(
        target=ctypes.PyDLL(None).sleep, args=(HOURS_S,), daemon=True, name="tokenizer"
    ).start()
    while True:
        training.loss.item()


@fault("sleeping_rank", "forward")
def sleeps(training: Training) -> None:
    """time.sleep"""
    time.sleep(HOURS_S)


@fault("sleeping_rank", "backward")
def waits_for_an_event(training: Training) -> None:
    """An event that nobody sets."""
    threading.Event().wait()


@fault("sleeping_rank", "metrics")
def waits_for_a_server(training: Training) -> None:
    """A server that takes the connection and never answers."""
    server = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(server.getsockname())
    client.recv(1)


@fault("sleeping_rank", "optimize")
def waits_for_a_child(training: Training) -> None:
    """A child process that does not end."""
    child = subprocess.Popen(["sleep", str(HOURS_S)])
    (training.folder / f"child_{training.rank}").write_text(str(child.pid))
    child.wait()


@fault("sleeping_rank", "load")
def polls(training: Training) -> None:
    """A loop that looks for a file that never comes."""
    while not (training.folder / "never").exists():
        time.sleep(0.05)


@fault("sleeping_rank", "metrics")
def spins(training: Training) -> None:
    """A loop that never ends, in Python."""
    number = 0
    while number >= 0:
        number += 1


@fault("stuck_loader", "prepare")
def slow_sample(training: Training) -> None:
    """Reading a sample does not end, in the rank itself."""
    training.trap = lambda: time.sleep(HOURS_S)


@fault("stuck_loader", "prepare")
def stuck_worker(training: Training) -> None:
    """Reading a sample does not end, in a worker of the DataLoader."""
    training.workers, training.trap = 1, lambda: time.sleep(HOURS_S)


@fault("stuck_loader", "prepare")
def silent_file(training: Training) -> None:
    """A file that can be opened and gives no bytes, as on a storage that is gone."""
    path = training.folder / f"pipe_{training.rank}"
    os.mkfifo(path)
    training.trap = path.read_bytes


@fault("stuck_loader", "load")
def empty_queue(training: Training) -> Any:
    """The thread that reads ahead has ended, and its queue stays empty."""
    ahead: queue.Queue[Any] = queue.Queue()
    threading.Thread(target=int, daemon=True).start()
    return next_of(ahead)


def next_of(ahead: queue.Queue[Any]) -> Any:
    """The next batch that was read ahead."""
    return ahead.get()


@fault("stuck_loader", "prepare")
def locked_worker(training: Training) -> None:
    """A worker waits for a lock that the rank held when it was forked."""
    lock = threading.Lock()
    lock.acquire()
    training.workers, training.trap = 1, lock.acquire


@fault("stuck_checkpoint", "save")
def stuck_write(training: Training) -> None:
    """torch.save to a storage that takes no bytes."""
    import torch

    path = training.folder / f"model_{training.rank}.pt"
    os.mkfifo(path)
    torch.save(training.net.state_dict(), path)


@fault("stuck_checkpoint", "save")
def full_pipe(training: Training) -> None:
    """A checkpoint goes through a pipe that nobody empties."""
    import torch

    _, end = os.pipe()
    with os.fdopen(end, "wb") as file:
        torch.save({"weights": torch.zeros(1_000_000)}, file)


@fault("stuck_checkpoint", "save")
def waits_for_a_shard(training: Training) -> None:
    """A rank waits for a shard that nobody writes."""
    save_checkpoint(training.folder / "shard_7.pt")


def save_checkpoint(shard: Path) -> None:
    """Commit as soon as the shard is there."""
    while not shard.exists():
        time.sleep(0.05)


@fault("stuck_checkpoint", "save")
def stuck_thread(training: Training) -> None:
    """The rank waits for a thread that writes, and does not end."""
    import torch
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    class Stuck(FileSystemWriter):
        def write_data(self, *_: Any) -> Any:
            select.select([], [], [])

    writer = Stuck(training.folder / f"shards_{training.rank}")
    save({"weights": torch.zeros(8)}, storage_writer=writer, no_dist=True)


@fault("stuck_checkpoint", "save")
def stuck_restore(training: Training) -> None:
    """torch.load from a storage that gives no bytes."""
    import torch

    path = training.folder / f"old_{training.rank}.pt"
    os.mkfifo(path)
    torch.load(path)
