"""NCCL's RAS as its documentation shows it: its answers, and a server that speaks its protocol."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

IN_WORDS = """\
Job summary
===========

  Nodes  Processes         GPUs  Processes     GPUs
(total)   per node  per process    (total)  (total)
      2          4            1          8        8

Communicators... (0.00s)
=============

Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
    0         1         2         4         8         8   RUNNING  MISMATCH
    1         4         2         1         2         8   RUNNING  OK

Errors
======

Warnings
========

"""
DIFFERENT = "#0-0 (27a079b828ff1a75) MISMATCH\n  Communicator ranks have different "
ALONE = (
    "AllReduce operation counts\n"
    "  7 ranks have launched up to operation 64\n"
    "  Rank 6 has launched up to operation 60 -- GPU 2 managed by process 106 on node 10.0.0.2\n"
)
TWO = (
    "collective operation counts\n"
    "  6 ranks have launched up to operation 6650\n"
    "  2 ranks have launched up to operation 6649\n"
    "  Rank 0 -- GPU 0 managed by process 100 on node 10.0.0.1\n"
    "  Rank 2 -- GPU 2 managed by process 102 on node 10.0.0.1\n"
)
DEAD = (
    "DEAD\n  1 job process is considered dead (unreachable via the RAS network)\n"
    "  Process 106 on node 10.0.0.2 managing GPU 2\n"
)


def answer(*communicators: Mapping[str, Any]) -> bytes:
    """The whole answer as JSON."""
    head = {"nccl_version": "2.29.3", "cuda_runtime_version": 13000, "cuda_driver_version": 13000,
            "timestamp": "2026-11-29 12:00:00",
            "communicators_count": len(communicators)}  # fmt: skip
    ras = {"collection_time_sec": 0.001, "timeouts_count": 0}
    return json.dumps({**head, "communicators": communicators, "ras": ras}, indent=2).encode()


def communicator(
    launched: Mapping[int, Mapping[str, int]],
    silent: Sequence[int] = (),
    *,
    pids: int = 100,
    members: Sequence[int] = (),
) -> dict[str, Any]:
    """A communicator of these ranks; `members` are their numbers in the world, if they differ."""
    world = members or [*launched, *silent]

    def known(rank: int) -> dict[str, Any]:
        one = world[rank] if members else rank
        return {"rank": rank, "host": f"10.0.0.{1 + one // 4}", "pid": pids + one,
                "cuda_dev": one % 4, "nvml_dev": one % 4}  # fmt: skip

    fine = {"init_state": 0, "async_error": 0, "finalize_called": False, "destroy_flag": False,
            "abort_flag": False}  # fmt: skip
    missing = {"unresponsive": True, "considered_dead": False}
    return {
        "hash": "0x27a079b828ff1a75", "secondary_hash": "0x1:0x2", "size": len(world),
        "ranks_count": len(launched), "missing_ranks_count": len(silent),
        "ranks": [{**known(rank), "status": fine, "collective_counts": counts}
                  for rank, counts in launched.items()],
        "missing_ranks": [{**known(rank), "status": missing} for rank in silent],
    }  # fmt: skip


@asynccontextmanager
async def ras_server(
    told: bytes, *, has_json: bool = True, silent_first: int = 0
) -> AsyncIterator[str]:
    """The address of a server that tells this; the first connections get no answer at all."""
    asked = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        asked += 1
        is_silent = asked <= silent_first
        try:
            async for line in reader:
                if is_silent:
                    continue
                match line.split():
                    case [b"CLIENT", b"PROTOCOL", _]:
                        writer.write(b"SERVER PROTOCOL 2\n")
                    case [b"TIMEOUT", number] if number.isdigit() and int(number):
                        writer.write(b"OK\n")
                    case [b"SET", b"FORMAT", b"json"] if has_json:
                        writer.write(b"OK\n")
                    case [b"VERBOSE", b"STATUS"]:
                        writer.write(told)
                        return
                    case _:
                        writer.write(b"ERROR: Unknown command\n")
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        host, port = server.sockets[0].getsockname()
        yield f"{host}:{port}"
