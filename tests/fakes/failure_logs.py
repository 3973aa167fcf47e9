"""Logs of trainings that fail, with labels: which class, on which rank.

A seed chooses the launcher's layout, the words of the failure, the rank, the order in which lines
of ranks reach a file, noise, failures that training outlives, and a clock of
its own for each node, up to 5 minutes wrong. All other ranks write the
tracebacks and lines of those that lose a peer.
The lines have the forms that the programs print; words that vary are drawn.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

RANKS_A_NODE = 8
_SKEW_S = 300


@dataclass(frozen=True, slots=True)
class Labelled:
    """A folder of logs, and the truth."""

    failure_class: str
    rank: int | None
    paths: Sequence[Path]


RAISED = {
    "python_exception": (
        "KeyError: 'tokens'",
        "IndexError: list index out of range",
        "TypeError: forward() got an unexpected keyword argument 'mask'",
        "RuntimeError: The size of tensor a (4096) must match the size of tensor b (4095) at "
        "non-singleton dimension 1",
        "json.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0)",
        "mylib.errors.BadShard: shard 17 has no tokens",
    ),
    "assertion": ("AssertionError", "AssertionError: batch 12 is empty"),
    "import_error": (
        "ModuleNotFoundError: No module named 'flash_attn'",
        "ImportError: libcudnn.so.9: cannot open shared object file: No such file or directory",
    ),
    "gpu_oom": (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB. GPU 3 has a total "
        "capacity of 79.15 GiB of which 1.2 GiB is free.",
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB",
        "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    ),
    "host_oom": (
        "MemoryError",
        "OSError: [Errno 12] Cannot allocate memory",
        "RuntimeError: [enforce fail at alloc_cpu.cpp:118] err == 0. DefaultCPUAllocator: can't "
        "allocate memory: you tried to allocate 68719476736 bytes.",
    ),
    "cuda_error": (
        "RuntimeError: CUDA error: an illegal memory access was encountered",
        "torch.AcceleratorError: CUDA error: unspecified launch failure",
        "RuntimeError: CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`",
    ),
    "device_assert": ("RuntimeError: CUDA error: device-side assert triggered",),
    "cuda_driver": (
        "RuntimeError: Found no NVIDIA driver on your system.",
        "RuntimeError: CUDA error: no kernel image is available for execution on the device",
        "RuntimeError: CUDA error: invalid device ordinal",
    ),
    "gpu_ecc": ("RuntimeError: CUDA error: uncorrectable ECC error encountered",),
    "nan": (
        "RuntimeError: Function 'MulBackward0' returned nan values in its 0th output.",
        "ValueError: loss is nan at step 4711",
        "Exception: Current loss scale already at minimum - cannot decrease scale anymore.",
    ),
    "missing_file": (
        "FileNotFoundError: [Errno 2] No such file or directory: '/data/shard_17.bin'",
        "OSError: [Errno 2] No such file or directory: '/data/vocab.json'",
    ),
    "permission": ("PermissionError: [Errno 13] Permission denied: '/ckpt/step_40'",),
    "disk_full": ("OSError: [Errno 28] No space left on device: '/ckpt/step_40/1.pt'",),
    "quota": ("OSError: [Errno 122] Disk quota exceeded: '/home/u/out'",),
    "storage": (
        "OSError: [Errno 116] Stale file handle: '/nfs/ckpt'",
        "OSError: [Errno 5] Input/output error",
        "requests.exceptions.HTTPError: 503 Server Error: Service Unavailable for url: "
        "https://hub.example/model",
        "botocore.exceptions.ClientError: An error occurred (SlowDown) when calling the PutObject "
        "operation (reached max retries: 4): Please reduce your request rate.",
    ),
    "network": (
        "socket.gaierror: [Errno -3] Temporary failure in name resolution",
        "ConnectionRefusedError: [Errno 111] Connection refused",
        "OSError: [Errno 113] No route to host",
    ),
    "data_loader": (
        "RuntimeError: DataLoader worker (pid 4711) exited unexpectedly with exit code 1.",
    ),
    "nccl_usage": (
        "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.hpp:317, invalid usage, "
        "NCCL version 2.21.5\nncclInvalidUsage: This usually reflects invalid usage of NCCL.",
    ),
}
"""Classes that end a rank with an exception of its own."""

WRITTEN = {
    "segfault": ("Fatal Python error: Segmentation fault", "Segmentation fault (core dumped)"),
    "illegal_instruction": ("Illegal instruction (core dumped)",),
    "bus_error": (
        "ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient "
        "shared memory (shm).",
        "Bus error (core dumped)",
    ),
    "arguments": ("train.py: error: unrecognized arguments: --lerning-rate 3",),
}
"""Classes of which the rank writes a plain line."""

OF_NODES = {
    "gpu_fault": (
        "NVRM: Xid (PCI:0000:3b:00): 79, pid=4711, name=python, GPU has fallen off the bus.",
        "NVRM: Xid (PCI:0000:3b:00): 119, pid=4711, name=python, Timeout after 6s of waiting for "
        "RPC response from GPU3 GSP!",
    ),
    "gpu_ecc": ("NVRM: Xid (PCI:0000:86:00): 48, pid=4711, An uncorrectable double bit error",),
    "nvlink": ("NVRM: Xid (PCI:0000:86:00): 74, pid=4711, NVLink: fatal error detected on link 4",),
    "host_oom": (
        "Out of memory: Killed process 4711 (python) total-vm:1073741824kB, anon-rss:9kB",
        "Memory cgroup out of memory: Killed process 4711 (python) total-vm:107374kB",
    ),
}
"""Classes of which the kernel of a node tells; the rank itself ends without a word, or in CUDA."""

OF_SCHEDULERS = {
    "time_limit": (
        "slurmstepd: error: *** JOB 4711 ON node-3 CANCELLED AT 2026-11-02T03:11:11 DUE TO TIME "
        "LIMIT ***",
    ),
    "preempted": (
        "slurmstepd: error: *** STEP 4711.0 ON node-3 CANCELLED AT 2026-11-02T03:11:11 DUE TO "
        "PREEMPTION ***",
    ),
    "cancelled": (
        "slurmstepd: error: *** JOB 4711 ON node-3 CANCELLED AT 2026-11-02T03:11:11 ***",
    ),
    "node_failed": (
        "slurmstepd: error: *** JOB 4711 ON node-3 CANCELLED AT 2026-11-02T03:11:11 DUE TO NODE "
        "FAILURE, SEE SLURMCTLD LOG FOR DETAILS ***",
    ),
}

CLASSES = tuple(sorted({*RAISED, *WRITTEN, *OF_NODES, *OF_SCHEDULERS}))

_CASCADES = (
    "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer "
    "[10.0.0.{n}]:4{n}",
    "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Read error "
    "[10.0.0.{n}]:4{n}: Connection reset by peer",
    "torch.distributed.DistBackendError: NCCL error in: ../torch/csrc/distributed/c10d/"
    "NCCLUtils.hpp:317, remote process exited or there was a network error, NCCL version 2.21.5",
    "torch.distributed.elastic.multiprocessing.api.SignalException: Process {n} got signal: 15",
    "torch.distributed.DistNetworkError: failed to recv, got 0 bytes",
)
_NOISE = (
    "UserWarning: errors in the file are ignored (permission denied is retried)",
    "[W1102 03:11:11.000 socket.cpp:460] [c10d] could not connect yet, trying again",
    "loading checkpoint shard 3 of 12",
    "NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/IPC",
    "INFO retry policy: 3 attempts, timeout after 30 s",
)


class _Writer:
    """Writes lines in one layout."""

    def __init__(self, folder: Path, dice: random.Random, world: int) -> None:
        self.layout = dice.choice(("ranks", "torchrun", "srun", "files", "ours"))
        self.folder = folder
        self.lines: dict[str, list[str]] = {}
        nodes = (world + RANKS_A_NODE - 1) // RANKS_A_NODE
        self.skews = [dice.uniform(-_SKEW_S, _SKEW_S) for _ in range(nodes)]
        self.now = datetime(2026, 11, 2, 3, 0)  # noqa: DTZ001

    def of_rank(self, rank: int, line: str) -> None:
        node = rank // RANKS_A_NODE
        match self.layout:
            case "ranks":
                self._put("all.log", f"[rank{rank}]: {line}")
            case "torchrun":
                local = rank % RANKS_A_NODE
                self._put(f"node-{node}.log", f"[default{local}]:[rank{rank}]: {line}")
            case "srun":
                self._put("slurm-4711.out", f"{node}: [rank{rank}]: {line}")
            case "files":
                self._put(f"rank-{rank}.log", line)
            case _:
                self._put("console.log", f"node-{node}:{rank}| {line}")

    def stamp(self, rank: int, text: str) -> str:
        at = self.now + timedelta(seconds=self.skews[rank // RANKS_A_NODE])
        return f"[{at:%Y-%m-%d %H:%M:%S},{at.microsecond // 1000:03}] {text}"

    def of_kernel(self, node: int, line: str) -> None:
        at = self.now + timedelta(seconds=self.skews[node])
        self._put("kern.log", f"{at:%b %d %H:%M:%S} node-{node} kernel: [ 4711.42] {line}")

    def of_launcher(self, line: str) -> None:
        one = {"files": "launcher.log", "torchrun": "node-0.log", "srun": "slurm-4711.out"}
        self._put(one.get(self.layout, "all.log"), line)

    def close(self, dice: random.Random) -> list[Path]:
        paths = []
        for name, content in self.lines.items():
            path = self.folder / name
            path.write_text("\n".join(content) + "\n")
            paths.append(path)
        dice.shuffle(paths)
        return paths

    def _put(self, name: str, line: str) -> None:
        self.lines.setdefault(name, []).append(line)


def write(folder: Path, failure_class: str, seed: int, world: int = 64) -> Labelled:
    """Logs of a job in which one rank, node, or the scheduler ends the training."""
    dice = random.Random(f"{failure_class} {seed}")
    writer = _Writer(folder, dice, world)
    culprit = dice.randrange(world)
    _train(writer, dice, world)
    kinds = [
        table for table in (RAISED, WRITTEN, OF_NODES, OF_SCHEDULERS) if failure_class in table
    ]
    kind = dice.choice(kinds)
    text = dice.choice(kind[failure_class])
    others = [rank for rank in range(world) if rank != culprit]
    dice.shuffle(others)
    early = dice.randrange(4)
    tellers = [(rank, _lost(dice)) for rank in others[:early]]  # pipes overtake each other
    if kind is RAISED:
        tellers.append((culprit, _raised(text)))
    elif kind is WRITTEN:
        tellers.append((culprit, [text]))
    elif kind is OF_NODES:
        writer.of_kernel(culprit // RANKS_A_NODE, text)
    else:
        writer.of_launcher(text)
    tellers += [(rank, _lost(dice)) for rank in others[early:]]
    _interleave(writer, dice, tellers)
    writer.of_launcher("W1102 03:11:12 api.py:900] Sending process 4712 closing signal SIGTERM")
    writer.of_launcher("torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ")
    is_of_rank = kind in (RAISED, WRITTEN)
    return Labelled(failure_class, culprit if is_of_rank else None, writer.close(dice))


def _train(writer: _Writer, dice: random.Random, world: int) -> None:
    outlived = dice.randrange(3) == 0
    for step in range(1, 9):
        writer.now += timedelta(seconds=1)
        for rank in range(world):
            writer.of_rank(rank, writer.stamp(rank, f"step {step} loss {dice.random():.3f}"))
            if dice.randrange(20) == 0:
                writer.of_rank(rank, dice.choice(_NOISE))
            if outlived and step == 2 and rank == 1:
                for line in _raised("ValueError: bad record 17 skipped"):
                    writer.of_rank(rank, line)


def _raised(text: str) -> list[str]:
    return [
        "Traceback (most recent call last):",
        '  File "/home/u/train.py", line 88, in <module>',
        "    main()",
        '  File "/home/u/train.py", line 61, in main',
        "    loss = step(batch)",
        '  File "/usr/site-packages/torch/nn/modules/module.py", line 1751, in _call_impl',
        "    return forward_call(*args, **kwargs)",
        *text.split("\n"),
    ]


def _lost(dice: random.Random) -> list[str]:
    text = dice.choice(_CASCADES).format(n=dice.randrange(1, 250))
    return _raised(text)


def _interleave(writer: _Writer, dice: random.Random, tellers: list[tuple[int, list[str]]]) -> None:
    """Lines of ranks that write at the same time, in the order in which the ranks began."""
    waiting, writing = list(tellers), list[tuple[int, list[str]]]()
    while waiting or writing:
        while waiting and len(writing) < 4:
            writing.append(waiting.pop(0))
        rank, rest = dice.choice(writing)
        writer.of_rank(rank, rest.pop(0))
        if not rest:
            writing.remove((rank, rest))
