"""`FrameworkNumerics` on two real gloo ranks, without a framework: `looked_at.py FOLDER`.

Torch is imported once, and the ranks are forked. Each case is a training of its own; all ranks
write what has become of it.
"""

import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from trainer_sdk import testing
from trainer_sdk.integrations import seals
from trainer_sdk.integrations.framework_numerics import FrameworkNumerics
from trainer_sdk.integrations.framework_session import FrameworkSession
from trainer_sdk.numerics import NumericsPolicy
from trainer_sdk.numerics import rollback as rollback_acts
from trainer_sdk.numerics.replica_hash import HASH_EVERY
from trainer_sdk.numerics.rollback import RestartNeededError
from trainer_sdk.wire import NumericsReported

WORLD = 2
PATIENCE = timedelta(seconds=150)
"""Longer than the test may take: a rank that waits for another one fails it."""
KNOWN = 60
"""Steps after which a spike is noticed."""
_LONG = 40 * HASH_EVERY
"""Steps without gradients take microseconds; hashes are compared in the background."""
NAN = float("nan")


class Training:
    """A framework's loop, whose losses are given."""

    def __init__(self, folder: Path, **choices: Any) -> None:
        self.rank = dist.get_rank()
        self.run = FrameworkSession("looked at")
        self.numerics = FrameworkNumerics(self.run, NumericsPolicy(**choices))
        self.numerics.open(str(folder), ("", ".ckpt"))
        self.folder = folder
        self.step = 0
        self.model = nn.parallel.DistributedDataParallel(nn.Linear(1, 1))
        self.ended = ""

    def train(
        self,
        to: int,
        losses: Mapping[int, float] | None = None,
        level: float = 1.0,
        rate: float = 0.1,
    ) -> None:
        """Train up to a step; steps have these losses, or healthy ones of this level."""
        state = {"model": self.model}
        while self.step < to:
            self.step += 1
            healthy = level + self.step % 7 / 100 + self.rank / 10
            loss = (losses or {}).get(self.step, healthy)
            data = self.step - 1, self.step
            self.numerics.look(self.step, state, loss=loss, lr=rate, data=data)
            self.run.step(self.step)
            if self.step % 10 == 0 and not self.rank:
                path = self.folder / f"step={self.step}.ckpt"
                path.write_bytes(b"a checkpoint")
                seals.seal(path, self.step)

    def spoil(self) -> None:
        """Change a parameter of the second rank alone."""
        with torch.no_grad():
            self.model.module.weight += self.rank


class FailingRate(float):
    """A learning rate that cannot be compared."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        raise ValueError(other)


def last_step(folder: Path) -> None:
    training = Training(folder)
    training.train(5, {5: NAN})
    training.numerics.finish()


def last_parameters(folder: Path) -> None:
    training = Training(folder)
    training.train(5)
    training.spoil()
    training.numerics.finish()


def go_on(folder: Path, losses: Mapping[int, float], level: float = 1.0) -> None:
    first = Training(folder)
    first.train(KNOWN)
    states = first.numerics.state_of_all()
    second = Training(folder)
    second.numerics.load_state_dict(json.loads(json.dumps(states)))
    assert second.numerics.state_of_all() == states
    second.step = KNOWN
    second.train(KNOWN + 20, losses, level)
    second.numerics.finish()


def spike_after_a_restart(folder: Path) -> None:
    go_on(folder, {KNOWN + 1: 50.0})


def another_loss_after_a_restart(folder: Path) -> None:
    go_on(folder, {}, level=1.2)


def same_loss_after_a_restart(folder: Path) -> None:
    go_on(folder, {})


def error_on_a_single_rank(folder: Path) -> None:
    training = Training(folder)
    training.train(5)
    training.train(20, rate=FailingRate() if training.rank else 0.1)
    training.numerics.finish()
    dist.barrier()


def error_of_a_single_rank_at_a_hash(folder: Path) -> None:
    training = Training(folder)
    training.train(HASH_EVERY)
    training.train(HASH_EVERY + 20, rate=0.1 if training.rank else FailingRate())
    training.numerics.finish()
    dist.barrier()


def stop(folder: Path) -> None:
    training = Training(folder, replica="stop")
    training.train(15)
    training.spoil()
    training.train(_LONG)


def rollback(folder: Path) -> None:
    training = Training(folder, replica="rollback")
    training.train(HASH_EVERY + 15)
    training.spoil()
    training.train(_LONG)


CASES: tuple[Callable[[Path], None], ...] = (
    last_step,
    last_parameters,
    spike_after_a_restart,
    another_loss_after_a_restart,
    same_loss_after_a_restart,
    stop,
    rollback,
    error_on_a_single_rank,
    error_of_a_single_rank_at_a_hash,
)


def result(case: Callable[[Path], None], folder: Path) -> dict[str, Any]:
    """How a case has ended, its events, and the checkpoints that are left."""
    ended = ""
    if not dist.get_rank():
        folder.mkdir()
    dist.barrier()
    with testing.watched(rank=dist.get_rank()) as watch:
        try:
            case(folder)
        except RestartNeededError:
            ended = "restart"
        except SystemExit as error:
            ended = f"exit {error.code}"
    dist.barrier()
    reported = [message for message in watch.messages if isinstance(message, NumericsReported)]
    return {
        "ended": ended,
        "step": watch.step,
        "events": [[each.event, each.body] for each in reported],
        "good": sorted(
            checked.step
            for checked in map(seals.check, folder.glob("*.ckpt"))
            if checked.state == "good"
        ),
    }


def main(folder: Path) -> None:
    rollback_acts._ENDED_WITHIN_S = 0.0  # no agent ends the ranks
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=WORLD,
        timeout=PATIENCE,
    )
    results = {case.__name__: result(case, folder / case.__name__) for case in CASES}
    (folder / f"rank-{rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


def forked(folder: Path) -> list[int]:
    """The exit codes of the ranks."""
    children = []
    for rank in range(WORLD):
        child = os.fork()
        if not child:
            os.environ["RANK"], os.environ["WORLD_SIZE"] = str(rank), str(WORLD)
            code = 1
            try:
                main(folder)
                code = 0
            except BaseException:
                traceback.print_exc()
            os._exit(code)
        children.append(child)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


if __name__ == "__main__":
    codes = forked(Path(sys.argv[1]))
    sys.exit(max(map(abs, codes)))
