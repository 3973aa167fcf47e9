"""Saves once, says how that ended, and waits for a line: `ROOT STEP`."""

import sys

import torch

from trainer_sdk.checkpoint import Checkpointer

with Checkpointer(sys.argv[1]) as saves:
    handle = saves.save(int(sys.argv[2]), {"a": torch.ones(3)}, wait=True)
    print(handle.state, handle.reason, flush=True)
    sys.stdin.readline()
