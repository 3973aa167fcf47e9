"""Data of a toy training of which the samples of some steps are poisoned, or left out.

`POISON=60:nan,70:spike` poisons the samples that the 61st and the 71st step would use; with
`WITHOUT=60` the data do not have them.
"""

import os

import torch

FEATURES = 4
_GENERATOR_SEED = 7


def samples(steps: int, per_step: int) -> list[dict[str, torch.Tensor]]:
    """Samples for this many steps of all ranks, in their order."""
    generator = torch.Generator().manual_seed(_GENERATOR_SEED)
    every = torch.randn(steps * per_step, FEATURES, generator=generator)
    for fault in filter(None, os.environ.get("POISON", "").split(",")):
        number, kind = fault.split(":")
        first = int(number) * per_step
        every[first : first + per_step] *= float("nan") if kind == "nan" else 1e4
    left_out = {int(number) for number in filter(None, os.environ.get("WITHOUT", "").split(","))}
    kept = [at for at in range(len(every)) if at // per_step not in left_out]
    return [{"x": every[at], "labels": every[at].sum()} for at in kept]
