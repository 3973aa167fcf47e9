"""What a step of Lightning's `Trainer` computed, and which data it uses next.

Data are counted in batches of a rank. Lightning itself begins an epoch anew when it resumes in its
middle, unless the loader keeps its position; with this, it goes on with the next batch.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler

from trainer_sdk.integrations.framework_numerics import FrameworkNumerics
from trainer_sdk.integrations.framework_session import FrameworkSession
from trainer_sdk.integrations.skipped_data import (
    ShortenedSampler,
    Span,
    number_after,
    shorten,
    skipped,
    used_before,
)
from trainer_sdk.numerics.policy import NumericsPolicy

_NORMS = ("grad_norm", "grad_2.0_norm_total")
"""Metrics that have the gradient norm; the second is what Lightning's own `grad_norm` logs."""


class LightningNumerics(FrameworkNumerics):
    """The numerics of one `Trainer`."""

    def __init__(self, run: FrameworkSession, policy: NumericsPolicy) -> None:
        super().__init__(run, policy)
        self._trainer: Any = None
        self._loss: Any = None
        self._used = 0
        """How many batches were used when the present step began."""
        self._step = 0
        self._has_order = False
        """Whether the data are those of a sampler, in an order that a restart repeats."""
        self._batches: _LightningBatches | None = None

    def set_up(self, trainer: Any, folder: str) -> None:
        """Read what earlier rounds have decided, and have the loader pass over skipped data."""
        self._trainer = trainer
        self.open(folder, ("", ".ckpt"))
        strategy = trainer.strategy
        plain = strategy.process_dataloader

        def process_dataloader(loader: Any) -> Any:
            loader = plain(loader)
            if trainer.training:
                is_only = self._batches is None
                self._has_order = self._shorten(trainer, loader) and is_only
            return loader

        strategy.process_dataloader = process_dataloader

    def begin(self, trainer: Any) -> None:
        """Note where the training goes on."""
        self._step = trainer.global_step
        self._used = _used(trainer)
        if self._batches is not None:
            self._batches.begin(trainer.fit_loop._data_fetcher)  # noqa: SLF001 - see there
        self.begin_epoch(trainer)  # Lightning does not tell of one that it resumes in its middle

    def begin_epoch(self, trainer: Any) -> None:
        """Have an epoch validated at its end, although some of its batches are skipped."""
        is_at_end = trainer.val_check_interval == 1.0 and trainer.check_val_every_n_epoch
        if is_at_end and self._batches is not None and trainer.val_check_batch != float("inf"):
            trainer.val_check_batch = max(len(self._batches), 1)

    def batch(self, trainer: Any, outputs: Any) -> None:
        """Look at a step, if this batch has ended it."""
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, Tensor):
            loss = loss.detach()
            self._loss = loss if self._loss is None else self._loss + loss
        if trainer.global_step == self._step:
            return  # gradients are accumulated
        used, self._used = self._used, _used(trainer)
        loss, self._loss, self._step = self._loss, None, trainer.global_step
        spans = self.spans
        last = number_after(self._used - 1, spans)
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        metrics = trainer.callback_metrics
        self.look(
            self._step,
            {"model": trainer.model} | ({} if scaler is None else {"scaler": scaler}),
            loss=loss,
            grad_norm=next((metrics[name] for name in _NORMS if name in metrics), None),
            lr=trainer.optimizers[0].param_groups[0].get("lr") if trainer.optimizers else None,
            data=(number_after(used, spans), last + 1) if self._has_order else None,
        )

    def settle(self) -> None:
        """Wait until all checkpoints so far have their seals."""
        settle = getattr(self._trainer.strategy.checkpoint_io, "settle", None)
        if settle is not None:
            settle()

    def _shorten(self, trainer: Any, loader: Any) -> bool:
        is_its_own = hasattr(loader, "state_dict")  # it keeps its position, as the next one would
        if not isinstance(loader, DataLoader) or is_its_own:
            return False
        if isinstance(getattr(loader.batch_sampler, "sampler", None), RandomSampler):
            return False  # a restart would draw another order

        def make(batches: Any) -> ShortenedSampler:
            self._batches = _LightningBatches(trainer, batches, self.spans)
            return self._batches

        return shorten(loader, make)


class _LightningBatches(ShortenedSampler):
    """The batches of the present epoch."""

    def __init__(self, trainer: Any, batches: Any, spans: tuple[Span, ...]) -> None:
        super().__init__(batches, spans, self._of_pass)
        self._trainer = trainer
        self._has_begun = False

    def __len__(self) -> int:
        """The batches of an epoch; from the training's first epoch on, those that are used.

        Before, Lightning asks for the number of all epochs.
        """
        if not self._has_begun:
            return len(self.batches)
        whole = self._per_epoch()
        first = self._trainer.fit_loop.epoch_progress.current.processed * whole
        return whole - skipped(first, first + whole, self._spans)

    def begin(self, fetcher: Any) -> None:
        """The training begins: Lightning's fetcher has asked for the length of its first pass."""
        self._has_begun = True
        progress = self._trainer.fit_loop.epoch_loop.batch_progress.current
        if progress.processed and not self._of_pass()[1]:
            # It was saved at the end of a shortened epoch, and Lightning would go on with it.
            progress.completed = self._trainer.num_training_batches
        if fetcher is not None and fetcher.length is not None:
            fetcher.length = len(self)

    def _of_pass(self) -> tuple[int, int]:
        """The number of the first batch of this pass, and how many of it are used."""
        used = _used(self._trainer)
        try:
            whole = self._per_epoch()
        except TypeError:
            return 0, used  # one endless stream
        epoch: int = self._trainer.fit_loop.epoch_progress.current.processed
        end = used_before((epoch + 1) * whole, self._spans)
        if used == end > used_before(epoch * whole, self._spans):
            epoch += 1  # it was saved after its last batch, and is not counted yet
        sampler: Any = getattr(self.batches, "sampler", None)
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)  # workers ask for batches before Lightning does this
        first = epoch * whole
        return first, used - used_before(first, self._spans)

    def _per_epoch(self) -> int:
        whole, limit = len(self.batches), self._trainer.limit_train_batches
        return min(whole, limit) if isinstance(limit, int) else int(whole * limit)


def _used(trainer: Any) -> int:
    """How many batches this rank has used, over all epochs."""
    used: int = trainer.fit_loop.epoch_loop.batch_progress.total.processed
    return used
