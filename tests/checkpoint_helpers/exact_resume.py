"""Trainings that are killed at five steps, and go on from what was saved: each loss of each step.

`exact_resume.py FOLDER CASES` prints for each case, a list of the fields of `Case`, how many losses
were made after a restore, and which of them differ from those of an undisturbed training. Torch is
imported once; each rank of each launch is forked from here.
"""

import json
import os
import signal
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # each training would import it with its first optimizer
import torch.distributed as dist

from tests.checkpoint_helpers.exact_training import LAST, Case, Training, differing
from trainer_sdk.checkpoint.checkpointer import Checkpointer

KILLS = (3, 6, 9, 11, 14)
"""The last step of each launch but the final one; the state is older at most of them."""
EVERY = 2


def undisturbed(case: Case, folder: Path) -> dict[int, str]:
    """All losses of a training that nobody kills, and that saves nothing."""
    del folder
    training = Training(case)
    list(training.steps(0))
    return training.losses


def launched(case: Case, folder: Path, last: int) -> dict[int, str]:
    """The losses of a launch that goes on from what there is, until this step."""
    training = Training(case)
    saves = Checkpointer(folder / "root", job="exact", every=1000, on_error="fatal")
    found = saves.restore(training.state)
    every = case.epoch if case.loader == "plain" else EVERY
    for step in training.steps(0 if found is None else found.step):
        if step % every == 0:
            saves.save(step, training.state, wait=True)
        if step == last:
            break
    return training.losses


def in_ranks(
    case: Case, folder: Path, number: int, work: Callable[[Case, Path], dict[int, str]]
) -> list[dict[int, str]]:
    """What each rank of a launch returns; each is killed once it has told it."""
    ranks = []
    for rank in range(case.ranks):
        child = os.fork()
        if not child:
            os.environ.update(RANK=str(rank), WORLD_SIZE=str(case.ranks))
            _be_rank(case, folder, number, work)
        ranks.append(child)
    for child in ranks:
        os.waitpid(child, 0)
    told = [json.loads(_told(folder, number, rank).read_text()) for rank in range(case.ranks)]
    return [{int(step): loss for step, loss in losses.items()} for losses in told]


def _told(folder: Path, number: int, rank: int) -> Path:
    return folder / f"told-{number}-{rank}"


def _be_rank(
    case: Case, folder: Path, number: int, work: Callable[[Case, Path], dict[int, str]]
) -> None:
    torch.set_num_threads(1)
    rank, store = int(os.environ["RANK"]), f"file://{folder}/store-{number}"
    try:
        if case.ranks > 1:
            dist.init_process_group("gloo", init_method=store, rank=rank, world_size=case.ranks)
        losses = work(case, folder)
        if case.ranks > 1:
            dist.barrier()
        _told(folder, number, rank).write_text(json.dumps(losses))
    finally:
        os.kill(os.getpid(), signal.SIGKILL)


def main(folder: Path, cases: list[Any]) -> None:
    warnings.simplefilter("ignore", DeprecationWarning)
    said = []
    for number, fields in enumerate(cases):
        case, place = Case(*fields), folder / str(number)
        place.mkdir()
        wanted = in_ranks(case, place, 0, undisturbed)
        made, apart = 0, []
        for launch, last in enumerate((*KILLS, LAST), 1):
            found = in_ranks(case, place, launch, partial(launched, last=last))
            for losses, of_rank in zip(found, wanted, strict=True):
                made += len(losses)
                apart += differing(losses, of_rank)
        said.append({"case": case, "made": made, "differing": apart})
    print(json.dumps({"cases": said}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
