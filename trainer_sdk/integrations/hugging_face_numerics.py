"""What a step of Hugging Face's `Trainer` computed, and which data it uses next.

Its callbacks get neither, so some methods of the `Trainer` are followed while it trains. Data are
counted in optimizer steps, as the `Trainer` itself counts when it resumes.
"""

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from everstep.evidence.files import read_regular
from trainer_sdk.integrations.framework_numerics import FrameworkNumerics
from trainer_sdk.integrations.framework_session import FrameworkSession
from trainer_sdk.integrations.skipped_data import (
    ShortenedSampler,
    number_after,
    shorten,
    skipped,
    used_before,
)
from trainer_sdk.numerics.policy import NumericsPolicy


class TrainerNumerics(FrameworkNumerics):
    """The numerics of one `Trainer`."""

    def __init__(
        self, run: FrameworkSession, policy: NumericsPolicy, settle: Callable[[], None]
    ) -> None:
        super().__init__(run, policy)
        self._settle = settle
        self._trainer: Any = None
        self._loss: Any = None
        self._norm: Any = None
        self._rate: Any = None
        self._first = 0
        """The number of the first step of the present epoch."""
        self._has_order = False
        """Whether the data are those of a sampler, in an order that a restart repeats."""

    @contextmanager
    def follow(self, trainer: Any) -> Iterator[None]:
        """Follow the loop of a `Trainer` in this block."""
        self.open(trainer.args.output_dir, ("checkpoint-", ""))
        self._trainer = trainer
        followed: dict[str, Callable[..., Any]] = {
            "set_initial_training_values": self._epochs,
            "_init_training_state": self._resume,
            "_run_epoch": self._epoch,
            "training_step": self._training_step,
            "_get_grad_norm": self._grad_norm,
        }
        for name, follower in followed.items():
            plain = getattr(trainer, name)
            setattr(trainer, name, functools.partial(follower, trainer, plain))
        try:
            yield
        finally:
            for name in followed:
                delattr(trainer, name)

    def step(self, step: int) -> None:
        """Look at a finished step."""
        loss, self._loss, norm, self._norm = self._loss, None, self._norm, None
        number = number_after(step - 1, self.spans)
        state = {"model": self._trainer.model_wrapped, "scaler": self._trainer.accelerator.scaler}
        self.look(
            step,
            {name: part for name, part in state.items() if part is not None},
            loss=loss,
            grad_norm=norm,
            lr=self._rate,
            data=(number, number + 1) if self._has_order else None,
        )

    def settle(self) -> None:
        """Wait until all checkpoints so far have their seals."""
        self._settle()

    def save(self, folder: str, rank: int) -> None:
        """Write this rank's statistics into a checkpoint; ranks that have no part in it do not."""
        if os.path.isdir(folder):
            with open(_place(folder, rank), "wb") as file:
                file.write(msgspec.json.encode(self.state_dict()))

    def _load(self, folder: str, rank: int) -> None:
        with contextlib.suppress(FileNotFoundError):
            state = msgspec.json.decode(read_regular(_place(folder, rank)), type=dict[str, str])
            self.load_state_dict(state)

    def _training_step(self, trainer: Any, plain: Any, *given: Any, **named: Any) -> Any:
        self._rate = trainer.optimizer.param_groups[0].get("lr")
        loss = plain(*given, **named)
        self._loss = loss if self._loss is None else self._loss + loss
        return loss

    def _grad_norm(self, trainer: Any, plain: Any, *given: Any, **named: Any) -> Any:
        del trainer
        self._norm = plain(*given, **named)
        return self._norm

    def _epochs(self, trainer: Any, plain: Any, *given: Any, **named: Any) -> Any:
        """As many epochs as `max_steps` needs without the skipped data."""
        epochs, per_epoch, *others = plain(*given, **named)
        if trainer.args.max_steps > 0 and self.spans:
            last = number_after(trainer.args.max_steps - 1, self.spans)
            epochs = max(epochs, last // per_epoch + 1)
        return epochs, per_epoch, *others

    def _resume(
        self,
        trainer: Any,
        plain: Any,
        max_steps: int,
        per_epoch: int,
        epochs: int,
        checkpoint: str | None,
        *given: Any,
    ) -> tuple[int, int]:
        """The epoch, and how many of its batches have been used."""
        place: tuple[int, int] = plain(max_steps, per_epoch, epochs, checkpoint, *given)
        if checkpoint is not None:
            self._load(checkpoint, trainer.args.process_index)
        spans, used = self.spans, trainer.state.global_step
        if not spans or not used or trainer.args.ignore_data_skip:
            return place
        epoch = number_after(used, spans) // per_epoch
        used_of_epoch = used - used_before(epoch * per_epoch, spans)
        return epoch, used_of_epoch * trainer.args.gradient_accumulation_steps

    def _epoch(self, trainer: Any, plain: Any, **named: Any) -> None:
        """Train an epoch without its skipped data."""
        per_epoch, batches = named["num_update_steps_per_epoch"], named["steps_in_epoch"]
        accumulated = trainer.args.gradient_accumulation_steps
        self._first = named["epoch"] * per_epoch
        end, spans = self._first + per_epoch, self.spans
        self._has_order = not trainer.args.ignore_data_skip and shorten(
            named["train_dataloader"],
            lambda sampler: ShortenedSampler(sampler, spans, lambda: (self._first, 0), accumulated),
        )
        count = skipped(self._first, end, spans)
        if not count or not self._has_order:
            plain(**named)
        elif count < per_epoch:
            of_last = batches - (per_epoch - 1) * accumulated  # a step of fewer batches
            lost = count * accumulated
            lost -= (accumulated - of_last) * skipped(end - 1, end, spans)
            named["num_update_steps_per_epoch"] -= count
            named["steps_in_epoch"] -= lost
            plain(**named)


def _place(folder: str, rank: int) -> str:
    return os.path.join(folder, f"everstep-numerics-{rank}.json")
