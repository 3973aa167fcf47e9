"""Restores what its last launch has saved, and saves once more: `ROOT STEP`."""

import sys

import torch

from trainer_sdk.checkpoint import Checkpointer

root, step = sys.argv[1], int(sys.argv[2])
state = {"weights": torch.full((5,), -1.0)}
with Checkpointer(root, on_error="fatal") as saves:
    found = saves.restore(state)
    restored = None if found is None else found.step
    print(f"restored {restored} {state['weights'][0].item():g}", flush=True)
    state["weights"].fill_(step)
    saves.save(step, state)
