"""Everstep in Lightning.

trainer = Trainer(
    callbacks=[LightningCallback(local_every_n_train_steps=20)],
    plugins=[AsyncLightningCheckpointIO()],
)
trainer.fit(model, ckpt_path=newest_for_all("checkpoints"))
"""

import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.io import TorchCheckpointIO

from trainer_sdk.checkpoint import Checkpointer, FileSaver
from trainer_sdk.checkpoint.rank_group import NoGroupError
from trainer_sdk.checkpoint.save.request import SaveHandle
from trainer_sdk.environment import environ
from trainer_sdk.integrations import resume, seals
from trainer_sdk.integrations.framework_session import FrameworkSession, check_version, harmless
from trainer_sdk.integrations.sealer import Sealer
from trainer_sdk.numerics.values import LateMetrics
from trainer_sdk.sdk_log import warn_once

if TYPE_CHECKING:
    from trainer_sdk.integrations.lightning_numerics import LightningNumerics
    from trainer_sdk.numerics.policy import NumericsPolicy

__all__ = [
    "AsyncLightningCheckpointIO",
    "LightningCallback",
    "LightningCheckpointIO",
    "newest_for_all",
]

_SETUP, _STEP, _CHECKPOINT, _EVALUATION = "setup", "step", "checkpointing", "evaluation"
_SUFFIX = ".ckpt"
_FINISHED = "everstep-finished.json"
_IN_FLIGHT = 2
"""Lightning often saves twice at once: a numbered file, and the last one."""


class LightningCheckpointIO(TorchCheckpointIO):  # type: ignore[misc]  # untyped where it is absent
    """A `CheckpointIO`: Lightning's files, durable when the call returns, and then sealed."""

    def __init__(self) -> None:
        check_version("lightning", "2.6.1", "2.7")
        super().__init__()
        self._files: FileSaver | None = None
        self._sealer = Sealer()

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None
    ) -> None:
        """Save, and wait until the file is durable."""
        handle = self._schedule(checkpoint, path, storage_options)
        handle.wait()
        self._finalize()
        if handle.error is not None:
            raise handle.error

    def load_checkpoint(self, path: Any, *given: Any, **named: Any) -> dict[str, Any]:
        """Load, after all saves are durable; a damaged file is refused."""
        self._finalize(blocking=True)
        checkpoint = seals.check(path)
        if checkpoint.state == "damaged":
            raise ValueError(
                f"{path} is damaged: {checkpoint.reason}; resume from the one that "
                "newest_for_all(…) finds"
            )
        loaded: dict[str, Any] = super().load_checkpoint(path, *given, **named)
        return loaded

    def remove_checkpoint(self, path: Any) -> None:
        """Remove a file and its seal, once its save is over."""
        self._finalize(blocking=True)
        seals.unseal(path)
        super().remove_checkpoint(path)

    def settle(self) -> None:
        """Wait until all saves are durable, and have their seals."""
        self._finalize(blocking=True)
        self._sealer.close()

    def teardown(self) -> None:
        """Wait for the last save."""
        files, self._files = self._files, None
        try:
            if files is not None:
                files.close()
        finally:
            self._sealer.close()
            super().teardown()

    def _schedule(self, checkpoint: dict[str, Any], path: Any, options: Any | None) -> SaveHandle:
        if options is not None:
            raise TypeError(f"storage_options has no effect here, and is {options!r}: leave it out")
        place = os.fspath(path)
        if self._files is None:
            self._files = FileSaver(on_error="fatal", in_flight=_IN_FLIGHT)
        os.makedirs(os.path.dirname(os.path.abspath(place)), exist_ok=True)
        seals.unseal(place)  # of a file that is replaced
        handle = self._files.schedule(checkpoint, place)
        step = checkpoint.get("global_step")
        self._sealer.seal_once(handle.wait, place, step if isinstance(step, int) else 0)
        return handle

    def _finalize(self, *, blocking: bool = False) -> None:
        if self._files is not None:
            self._files.maybe_finalize(blocking=blocking)


class AsyncLightningCheckpointIO(LightningCheckpointIO):
    """The same, but a save returns once the checkpoint is copied; at most one is being written.

    A failed save raises at the next save, or at the end, as Lightning's `AsyncCheckpointIO` does.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None
    ) -> None:
        """Copy the checkpoint, and write it in the background."""
        self._finalize()
        self._schedule(checkpoint, path, storage_options)

    def wait(self) -> None:
        """Wait until all saves are durable."""
        self._finalize(blocking=True)


class LightningCallback(Callback):  # type: ignore[misc]  # untyped where it is absent
    """Reports progress, sections and metrics; saves and ends when the training must stop.

    `dirpath` is the folder of the checkpoint of a preemption, by default that of the Trainer's
    first `ModelCheckpoint`. With `local_every_n_train_steps`, states are also kept in the memory of
    the nodes, and a resume takes the newest of them if it is newer than `ckpt_path`.
    With `autoresume`, a training that has finished is noted in `dirpath`, and skipped when it is
    started again. `stragglers` measures kernels and sections on the accelerator, too. With
    `numerics`, each step is looked at: its loss, its gradient norm, and whether replicas are equal.
    """

    def __init__(
        self,
        *,
        dirpath: "str | os.PathLike[str]" = "",
        autoresume: bool = False,
        local_every_n_train_steps: int = 0,
        stragglers: bool = False,
        numerics: "NumericsPolicy | None" = None,
    ) -> None:
        check_version("lightning", "2.6.1", "2.7")
        self._run = FrameworkSession("Lightning")
        self._metrics = LateMetrics(self._run.session.report)
        self._dirpath = os.fspath(dirpath)
        self._autoresume = autoresume
        self._local_every = local_every_n_train_steps
        self._stragglers = stragglers
        self._local: Checkpointer | None = None
        self._step = 0
        self._unwrap: Callable[[], None] | None = None
        self._numerics = None if numerics is None else _numerics(self._run, numerics)
        self._run.begin(_SETUP)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Have saves measured and skipped data passed over; skip a training that has finished."""
        del pl_module
        if stage != "fit":
            return
        if self._numerics is not None:
            self._numerics.set_up(trainer, self._folder(trainer))
        self._set_up(trainer)

    @harmless
    def _set_up(self, trainer: Trainer) -> None:
        self._run.begin(_SETUP)
        self._measure_saves(trainer)
        if self._autoresume and os.path.exists(self._finished_mark(trainer)):
            warn_once(
                f"this training has finished, by {self._finished_mark(trainer)}: it is skipped; "
                "remove that file to train on"
            )
            trainer.limit_train_batches = 0
            trainer.limit_val_batches = 0

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore the newest state that is in memory, if it is newer than the file."""
        if self._local_every and self._run.is_reporting:
            # Its errors are of the resume, and the training must not begin from a wrong state.
            try:
                self._local = Checkpointer(memory_every=self._local_every)
            except NoGroupError:
                _warn_of_devices(trainer)
                return
            self._restore_local(self._local, trainer, pl_module)

    @harmless
    def on_train_start(self, trainer: Trainer, *_: Any) -> None:
        """Note where the training begins, and where it ends."""
        self._step = trainer.global_step
        if self._numerics is not None:
            self._numerics.begin(trainer)
        self._run.start_at(self._step, _total_steps(trainer))
        if self._stragglers and torch.cuda.is_available():
            self._run.session.time_device()
            self._run.session.trace_kernels()

    @harmless
    def on_train_epoch_start(self, trainer: Trainer, *_: Any) -> None:
        """Have the epoch validated at its end."""
        if self._numerics is not None:
            self._numerics.begin_epoch(trainer)

    @harmless
    def on_train_batch_start(self, *_: Any, **__: Any) -> None:
        """Enter the section of a step."""
        self._run.end_all()
        self._run.begin(_STEP)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *_: Any
    ) -> None:
        """Look at a finished step; save, and end, where that is due."""
        if self._numerics is not None:
            self._numerics.batch(trainer, outputs)
        self._note_step(trainer)
        self._save_in_memory(trainer, pl_module)
        if self._run.should_stop:
            self._save_and_stop(trainer)
        elif self._run.should_save:
            self._save(trainer)

    @harmless
    def on_validation_batch_start(self, *_: Any, **__: Any) -> None:
        """Enter the section of the evaluation."""
        self._run.begin(_EVALUATION)

    @harmless
    def on_validation_batch_end(self, *_: Any, **__: Any) -> None:
        """Note progress of the evaluation."""
        self._run.heartbeat()

    @harmless
    def on_validation_end(self, *_: Any) -> None:
        """Leave the section of the evaluation."""
        self._run.end(_EVALUATION)

    def on_train_end(self, trainer: Trainer, *_: Any) -> None:
        """Decide on the last steps, and note that the training has finished, if it has."""
        if self._numerics is not None:
            self._numerics.finish()
        self._note_end(trainer)

    def state_dict(self) -> dict[str, Any]:
        """The statistics of `numerics`, which Lightning writes into its checkpoint."""
        return {} if self._numerics is None else self._numerics.state_of_all()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from these statistics."""
        if self._numerics is not None:
            self._numerics.load_state_dict(state_dict)

    @harmless
    def _note_end(self, trainer: Trainer) -> None:
        self._run.end_all()
        if self._autoresume and trainer.is_global_zero and _is_finished(trainer):
            place = self._finished_mark(trainer)
            os.makedirs(os.path.dirname(place), exist_ok=True)
            with open(place, "wb") as file:
                file.write(msgspec.json.encode({"step": trainer.global_step, "at": time.time_ns()}))

    @harmless
    def teardown(self, *_: Any, **__: Any) -> None:
        """Release what `setup` and `on_fit_start` have made."""
        self._run.end_all()
        if self._unwrap is not None:
            self._unwrap()
            self._unwrap = None
        local, self._local = self._local, None
        if local is not None:
            local.close()

    @harmless
    def _note_step(self, trainer: Trainer) -> None:
        self._run.end_all()
        if trainer.global_step == self._step:  # gradients are accumulated
            self._run.heartbeat()
            return
        self._step = trainer.global_step
        self._run.step(self._step)
        self._metrics.show(trainer.callback_metrics)

    @harmless
    def _save_in_memory(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._local is not None and self._step % self._local_every == 0:
            state = _live_state(trainer, pl_module, self._numerics)
            self._local.save(self._step, state, to_root=False)

    def _restore_local(
        self, saves: Checkpointer, trainer: Trainer, pl_module: LightningModule
    ) -> None:
        """Restore the newest state in memory, unless there is a file that is as new."""
        latest = saves.latest()
        connector = trainer._checkpoint_connector  # noqa: SLF001 - Lightning has no public name
        file = connector._loaded_checkpoint  # noqa: SLF001
        if latest is None or latest.step <= file.get("global_step", -1):
            return
        if saves.restore(_live_state(trainer, pl_module, self._numerics)) is not None:
            connector._loaded_checkpoint = {}  # noqa: SLF001 - else the older file replaces it

    def _save(self, trainer: Trainer) -> None:
        path = os.path.join(self._folder(trainer), f"everstep-step={self._step}{_SUFFIX}")
        trainer.save_checkpoint(path)
        wait = getattr(trainer.strategy.checkpoint_io, "wait", None)
        if wait is not None and trainer.is_global_zero:
            wait()

    def _save_and_stop(self, trainer: Trainer) -> None:
        self._save(trainer)
        trainer.should_stop = True
        trainer.limit_val_batches = 0  # the time until the node is gone is for the save
        # Otherwise the training would go on until these are reached.
        trainer.fit_loop.epoch_loop.min_steps = trainer.fit_loop.min_epochs = None

    def _folder(self, trainer: Trainer) -> str:
        callback = trainer.checkpoint_callback
        own = self._dirpath or getattr(callback, "dirpath", None) or trainer.default_root_dir
        return os.path.abspath(own)

    def _finished_mark(self, trainer: Trainer) -> str:
        return os.path.join(self._folder(trainer), _FINISHED)

    def _measure_saves(self, trainer: Trainer) -> None:
        """Have each save of the strategy, from wherever it is called, be in a section."""
        strategy = trainer.strategy
        plain = strategy.save_checkpoint

        def save_checkpoint(*given: Any, **named: Any) -> None:
            self._run.begin(_CHECKPOINT)
            try:
                plain(*given, **named)
            finally:
                self._run.end(_CHECKPOINT)

        def unwrap() -> None:
            strategy.save_checkpoint = plain

        strategy.save_checkpoint = save_checkpoint
        self._unwrap = unwrap


def _numerics(run: FrameworkSession, policy: "NumericsPolicy") -> "LightningNumerics":
    from trainer_sdk.integrations.lightning_numerics import LightningNumerics

    return LightningNumerics(run, policy)


class _Progress:
    """Loops and schedulers of a Trainer, and its statistics, as one value of a state."""

    def __init__(self, trainer: Trainer, numerics: "LightningNumerics | None") -> None:
        self._trainer = trainer
        self._numerics = numerics

    def state_dict(self) -> dict[str, Any]:
        """The progress of loops, and the states of schedulers."""
        schedulers = [each.scheduler.state_dict() for each in self._trainer.lr_scheduler_configs]
        whole = {"loop": self._trainer.fit_loop.state_dict(), "lr": schedulers}
        if self._numerics is not None:
            whole["numerics"] = self._numerics.state_dict()
        return {"whole": (whole,)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from this progress."""
        (whole,) = state["whole"]
        self._trainer.fit_loop.load_state_dict(whole["loop"])
        for config, saved in zip(self._trainer.lr_scheduler_configs, whole["lr"], strict=True):
            config.scheduler.load_state_dict(saved)
        if self._numerics is not None:
            self._numerics.load_state_dict(whole.get("numerics", {}))


def _live_state(
    trainer: Trainer, pl_module: LightningModule, numerics: "LightningNumerics | None"
) -> dict[str, Any]:
    """The objects that have the state of a training on this rank."""
    optimizers = {f"optimizer_{number}": each for number, each in enumerate(trainer.optimizers)}
    return {"model": pl_module, "progress": _Progress(trainer, numerics), **optimizers}


def _warn_of_devices(trainer: Trainer) -> None:
    local, whole = (int(environ.get(name, "1")) for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"))
    warn_once(
        f"no states are kept in memory: Everstep runs {whole} ranks, and Lightning's Trainer has "
        f"{trainer.world_size}, so each rank trains by itself: give "
        f"Trainer(devices={local}, num_nodes={whole // max(local, 1)})"
    )


def _total_steps(trainer: Trainer) -> int | None:
    total = trainer.max_steps if trainer.max_steps > 0 else trainer.estimated_stepping_batches
    return int(total) if total and total != float("inf") else None


def _is_finished(trainer: Trainer) -> bool:
    """Whether the last step or epoch is done, so that a restart would train no further."""
    steps, epochs = trainer.max_steps, trainer.max_epochs
    made = trainer.fit_loop.epoch_progress.current.processed
    return (steps > 0 and trainer.global_step >= steps) or ((epochs or -1) > 0 and made >= epochs)


def newest_for_all(folder: "str | os.PathLike[str]") -> str | None:
    """The newest verified `.ckpt` of a folder, by its last step, for `Trainer.fit(ckpt_path=…)`."""
    return resume.newest_for_all(folder, prefix="", suffix=_SUFFIX)
