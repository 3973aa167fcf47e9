"""What `py-spy dump --json` prints, as far as it is kept, and the ranks among its values."""

import msgspec

DISTRIBUTED = "torch/distributed/distributed_c10d.py"
PEERS = ("src", "dst", "group_src", "group_dst", "peer")
"""Names of ranks: arguments of torch.distributed, and variables where a transfer is awaited."""


class SpyLocal(msgspec.Struct):
    """A variable of a frame, as text."""

    name: str
    repr: str | None = None


class SpyFrame(msgspec.Struct, omit_defaults=True):
    """A call."""

    name: str = ""
    filename: str = ""
    module: str | None = None
    line: int | None = 0
    locals: list[SpyLocal] | None = None


class SpyThread(msgspec.Struct):
    """A thread, its innermost frame first."""

    frames: list[SpyFrame]
    pid: int = 0
    thread_name: str | None = None
    os_thread_id: int | None = None
    active: bool = False
    owns_gil: bool = False


SPY_THREADS = msgspec.json.Decoder(list[SpyThread])
"""Made at import: two threads that have msgspec look at a class for the first time at once crash.
"""
