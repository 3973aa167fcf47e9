"""Recorders of real processes: one that holds its interpreter, and servers that never answer."""

import asyncio
import socket
import sys
from pathlib import Path

from everstep_services.agent.timings.flight_recorders import FlightRecorders
from everstep_services.agent.timings.window import StepRange
from trainer_sdk import layout

HOLDS = """
import ctypes, os, sys
import torch, torch.distributed as dist
from trainer_sdk.bootstrap.torch_hooks import serve_torch

folder = sys.argv[1]
dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=0, world_size=1)
dist.all_reduce(torch.ones(8))
serve_torch(folder)
os.write(1, b"up")
ctypes.PyDLL(None).sleep(600)  # with the interpreter's lock
"""


async def test_a_rank_that_holds_its_interpreter_answers_and_a_silent_one_keeps_nobody_waiting(
    tmp_path: Path,
) -> None:
    """Torch's own thread tells of collectives; a server that never answers is a gap (A6.2)."""
    held, silent, gone = (tmp_path / name for name in ("held", "silent", "gone"))
    for folder in (held, silent, gone):
        folder.mkdir()
    rank = await asyncio.create_subprocess_exec(
        sys.executable, "-c", HOLDS, str(held), stdout=asyncio.subprocess.PIPE
    )
    try:
        assert rank.stdout is not None
        assert await rank.stdout.readexactly(2) == b"up"
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(silent / layout.WORKER_SOCKET))
            listening.listen()
            folders = {0: held, 1: silent, 2: gone}
            told = await FlightRecorders().read(folders, StepRange(1, 16), 10.0)
    finally:
        rank.kill()
        await rank.wait()
    (entry,) = told.recordings[0].entries
    assert (entry.op, entry.sequence) == ("all_reduce 8", 1)
    assert told.gaps == {1: "recorder silent"}, "who has opened no server is not asked"
