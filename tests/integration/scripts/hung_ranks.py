"""A gloo rank that hangs on purpose, and writes its flight recorder when it has come to stand.

    hung_ranks.py FAULT RANK WORLD FOLDER

Ranks meet through a file. Each writes `FOLDER/dump_RANK` (pickle) and `FOLDER/json_RANK.json` once
all of them stand, and then ends itself.
"""

import json
import os
import sys
import threading
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace, _dump_fr_trace_json  # type: ignore[attr-defined]

from tests.waiting import until

FAULT, RANK, WORLD, FOLDER = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])


def progress() -> tuple[int, int]:
    """How many collectives this rank has entered, and how many of them are over."""
    entries = json.loads(_dump_fr_trace_json(True, False)).get("entries", ())
    return len(entries), sum(one["retired"] for one in entries)


def stand_and_tell() -> None:
    until(lambda: progress() == _expected(), "this rank has come to stand")
    (FOLDER / f"stands_{RANK}").touch()
    until(lambda: len(list(FOLDER.glob("stands_*"))) == WORLD, "all ranks stand")
    (FOLDER / f"dump_{RANK}").write_bytes(_dump_fr_trace(True, True, False))
    (FOLDER / f"json_{RANK}.json").write_bytes(_dump_fr_trace_json(True, False))
    (FOLDER / f"told_{RANK}").touch()
    until(lambda: len(list(FOLDER.glob("told_*"))) == WORLD, "all ranks have told")
    os._exit(0)


def tell_or_end() -> None:
    try:
        stand_and_tell()
    finally:
        os._exit(1)  # or the others would wait for this rank


def _expected() -> tuple[int, int]:
    if FAULT == "leave":
        return (3 if RANK == 1 else 4), 3
    return 2, 1


dist.init_process_group("gloo", rank=RANK, world_size=WORLD, init_method=f"file://{FOLDER}/store")
ones = [dist.new_group(list(range(WORLD)), group_desc=name) for name in ("left", "right")]
threading.Thread(target=tell_or_end, daemon=True).start()
tensor = torch.ones(4, 3)
if FAULT == "leave":
    for _ in range(3):
        dist.all_reduce(tensor)
    if RANK != 1:
        dist.all_reduce(tensor)
else:
    dist.all_reduce(tensor)
    dist.all_reduce(tensor, group=ones[RANK % 2])
threading.Event().wait()
