"""Trainings that go back in place and pass over batches, killed at any point of it.

`rolled_back.py FOLDER TRIALS` prints for each trial, a list of the fields of `Trial`, which losses
differ from those of a training that never saw the batches. Each rank of each launch is forked.
"""

import json
import os
import random
import shutil
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch._dynamo  # each training would import it with its first optimizer
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from tests.checkpoint_helpers.exact_training import BATCH, LAST, SIZE, Case, Training
from trainer_sdk import layout
from trainer_sdk.checkpoint import checkpointer
from trainer_sdk.checkpoint.checkpointer import Checkpointer
from trainer_sdk.checkpoint.data import PositionedSampler
from trainer_sdk.checkpoint.restore import restorer
from trainer_sdk.numerics.data import Batches
from trainer_sdk.numerics.rollback import Rollback
from trainer_sdk.numerics.skips import Skips
from trainer_sdk.rank_session import session

MOVED_AT, SEEN_AT = 8, 10
"""The batches from the first of these steps to the last are bad."""
BACK_TO = 6
"""The newest checkpoint before the first: there is one after each second step."""
KILLS: dict[str, tuple[Any, str, bool]] = {
    "decided": (Skips, "add", False),
    "recorded": (Skips, "add", True),
    "marked": (restorer, "quarantine_suspects", True),
    "quarantined": (Skips, "quarantined", True),
    "restored": (checkpointer.Checkpointer, "roll_back", True),
}
"""The function at whose begin, or end, the first rank is killed."""


class Trial(NamedTuple):
    """A way to train, and where it is killed."""

    loader: str = "positioned"
    workers: int = 0
    sharding: str = "ddp"
    tier: str = "global"
    """`global`, `memory` or `both`."""
    ranks: int = 2
    kill: str = ""
    later: int = 0
    """The number of ranks after the kill, if it is another one."""

    @property
    def case(self) -> Case:
        buckets = "kept" if self.ranks > 2 else "made_anew"
        persistent = self.workers > 0 and self.tier == "both"
        return Case(
            self.loader,
            self.workers,
            "all",
            persistent=persistent,
            ranks=self.ranks,
            buckets=buckets,
        )


class ShardedTraining(Training):
    """The model is sharded by FSDP2."""

    def __init__(self, case: Case) -> None:
        super().__init__(case._replace(ranks=1))
        fully_shard(self.model)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.state |= {"model": self.model, "optimizer": self.optimizer}


def training_of(trial: Trial) -> Training:
    return (ShardedTraining if trial.sharding == "fsdp2" else Training)(trial.case)


def by_hand(trial: Trial, folder: Path) -> None:
    """Go on from the same checkpoint, with the samples of each batch counted out."""
    training = training_of(trial)
    with Checkpointer(folder / "root", job="back") as saves:
        saves.restore(training.state, step=BACK_TO)
    unit = BATCH * 2
    bad = range((MOVED_AT - 1) * unit, SEEN_AT * unit)
    sampler = PositionedSampler(SIZE, batch_size=1, seed=3, place=(0, 1))
    stream = [sample for at, [sample] in zip(range(1000), sampler, strict=False) if at not in bad]
    begin = BACK_TO * unit + BATCH * training.rank
    batches = [
        stream[at : at + BATCH] for at in range(begin, len(stream) - BATCH, BATCH * trial.ranks)
    ]
    before = torch.get_rng_state()
    loader = iter(DataLoader(training.loader.dataset, batch_sampler=batches))
    torch.set_rng_state(before)  # it has drawn a seed for workers
    for step, batch in zip(range(BACK_TO + 1, LAST + 1), loader, strict=False):
        training.make(step, batch)
        tell(folder, step, training.losses[step])


def generators() -> tuple[Any, ...]:
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def never_saw(trial: Trial, folder: Path) -> None:
    """Train without the bad batches: they are drawn, and leave no trace."""
    training, step = training_of(trial), 0
    before = generators()
    for number, batch in enumerate(given(trial, training, training._begin(0), 0), 1):
        if MOVED_AT <= number <= SEEN_AT:
            random.setstate(before[0])
            np.random.set_state(before[1])
            torch.set_rng_state(before[2])
            continue
        step += 1
        training.make(step, batch)
        tell(folder, step, training.losses[step])
        before = generators()
        if step == LAST:
            return


def given(trial: Trial, training: Training, batches: Any, step: int) -> Iterator[torch.Tensor]:
    """The batches of all epochs."""
    if not isinstance(batches, Batches) or trial.loader.startswith("positioned"):
        yield from batches
        return
    for epoch in count(max(step - 1, 0) // trial.case.epoch):
        if trial.ranks > 1:
            training.loader.sampler.set_epoch(epoch)
        yield from batches


def launched(trial: Trial, folder: Path) -> None:
    """Go on from what there is, and go back once the bad batches are seen."""
    training, root = training_of(trial), "" if trial.tier == "memory" else folder / "root"
    saves = Checkpointer(root, job="back", every=1000, keep_memory=trial.tier != "global")
    found = saves.restore(training.state)
    step = 0 if found is None else found.step
    rollback = Rollback(training.state, session(), checkpointer=saves)
    batches = Batches(training.loader, training.state, rollback.skips.spans)
    first_ranks = 2 if trial.later else trial.ranks
    unit = BATCH * first_ranks if trial.loader.startswith("positioned") else 1
    tell(folder, -1, str(step))
    for batch in given(trial, training, batches, step):
        step += 1
        training.make(step, batch)
        if batches.position == ((SEEN_AT - 1) * unit, SEEN_AT * unit):
            with torch.no_grad():
                next(iter(training.model.parameters())).mul_(float("nan"))
            samples = batches.span(MOVED_AT, step)
            went = rollback.back_to(
                MOVED_AT, batches, case="c", step=step, reason="it is nan", samples=samples
            )
            assert went.to_step == BACK_TO, went
            step = went.to_step
            continue
        batches.taken(step)
        tell(folder, step, training.losses[step])
        if step % 2 == 0:
            saves.save(step, training.state, wait=True)
        if trial.kill == "stepped" and rollback.skips.acts:
            kill_rank()
        if step == LAST:
            return


def kill_rank() -> None:
    """Kill the first rank, once in a trial; the others wait for it until they are ended."""
    mark = Path(os.environ["KILLED"])
    if os.environ["RANK"] == "0" and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def kill_at(point: str) -> None:
    place, name, is_after = KILLS[point]
    whole: Callable[..., Any] = getattr(place, name)

    def killed(*args: Any, **kwargs: Any) -> Any:
        if not is_after:
            kill_rank()
        result = whole(*args, **kwargs)
        if is_after:
            kill_rank()
        return result

    setattr(place, name, killed)


def tell(folder: Path, step: int, loss: str) -> None:
    rank = os.environ["RANK"]
    with (folder / f"told-{rank}").open("a") as file:
        file.write(f"{step} {loss}\n")


def told(folder: Path, rank: int) -> list[tuple[int, str]]:
    lines = (folder / f"told-{rank}").read_text().splitlines()
    return [(int(step), loss) for step, loss in (line.split() for line in lines)]


def launch(trial: Trial, folder: Path, number: int, work: Callable[[Trial, Path], None]) -> bool:
    """Whether all ranks came to the end; after the first that did not, the others are killed."""
    ranks = []
    for rank in range(trial.ranks):
        child = os.fork()
        if not child:
            os.environ.update(
                RANK=str(rank), WORLD_SIZE=str(trial.ranks), KILLED=str(folder / "killed")
            )
            if trial.tier != "global":
                os.environ[layout.ROUND_VARIABLE] = str(number)
                os.environ[layout.IMAGES_VARIABLE] = str(folder / "images")
            be_rank(trial, folder, number, work)
        ranks.append(child)
    codes: dict[int, int] = {}
    while len(codes) < len(ranks):
        child, status = os.wait()
        codes[child] = status
        if status:
            for other in ranks:
                if other not in codes:
                    os.kill(other, signal.SIGKILL)
    return not any(codes.values())


def be_rank(trial: Trial, folder: Path, number: int, work: Callable[[Trial, Path], None]) -> None:
    torch.set_num_threads(1)
    rank, store = int(os.environ["RANK"]), f"file://{folder}/store-{number}-{work.__name__}"
    code = 1
    try:
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=trial.ranks)
        if trial.kill in KILLS:
            kill_at(trial.kill)
        work(trial, folder)
        dist.barrier()
        code = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
        raise
    finally:
        sys.stderr.flush()
        os._exit(code)


def tried(trial: Trial, place: Path) -> dict[str, Any]:
    wanted, folder = place / "wanted", place / "found"
    for each in (wanted, folder, folder / "images"):
        each.mkdir(parents=True)
    assert launch(trial, wanted, 0, never_saw)
    launches = 1
    (folder / "images/offer.json").write_text('{"round": 99, "complete": true}')
    present = trial
    while not launch(present, folder, launches, launched):
        launches += 1
        present = trial._replace(ranks=trial.later or trial.ranks)
        assert launches < 4
    if trial.later:
        shutil.copytree(folder / "root", wanted / "root")
        assert launch(present, wanted, 9, by_hand)
    apart = []
    for rank in range(present.ranks):
        losses = dict(told(folder, rank))
        losses.pop(-1)
        right = dict(told(wanted, rank))
        apart += [
            step for step in losses.keys() | right.keys() if losses.get(step) != right.get(step)
        ]
    began = [int(step) for number, step in told(folder, 0) if number == -1]
    where = folder / ("images/own/rank-0" if trial.tier == "memory" else "root")
    acts = json.loads((where / "numerics.json").read_text())["acts"]
    spans = [act["samples"] for act in acts]
    return {"differing": apart, "launches": launches, "began": began, "spans": spans}


def main(folder: Path, trials: list[Any]) -> None:
    warnings.simplefilter("ignore", DeprecationWarning)
    result = [tried(Trial(*fields), folder / str(at)) for at, fields in enumerate(trials)]
    print(json.dumps({"trials": result}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
