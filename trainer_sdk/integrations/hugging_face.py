"""Everstep in Hugging Face's `Trainer`.

trainer = Trainer(…, callbacks=[HuggingFaceCallback()])
trainer.train(resume_from_checkpoint=newest_for_all(arguments.output_dir))
"""

import contextlib
import functools
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from transformers import (
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from trainer_sdk.integrations.framework_session import FrameworkSession, check_version, harmless
from trainer_sdk.integrations.resume import meet, newest_for_all
from trainer_sdk.integrations.sealer import Sealer
from trainer_sdk.sdk_log import warn_once

if TYPE_CHECKING:
    from trainer_sdk.integrations.hugging_face_numerics import TrainerNumerics
    from trainer_sdk.numerics.policy import NumericsPolicy

__all__ = ["HuggingFaceCallback", "newest_for_all"]

_SETUP, _STEP, _CHECKPOINT, _EVALUATION = "setup", "step", "checkpoint", "evaluation"


class HuggingFaceCallback(TrainerCallback):  # type: ignore[misc]  # untyped where it is absent
    """Reports steps, sections and metrics; saves and ends when the training must stop.

    With `seals`, each checkpoint gets a seal, so that `newest_for_all` can verify it. A training
    that resumes at its last step ends at once. With `numerics`, each step is looked at: its loss,
    its gradient norm, and whether replicas are equal.
    """

    def __init__(self, *, seals: bool = True, numerics: "NumericsPolicy | None" = None) -> None:
        check_version("transformers", "5.20", "5.24")
        self._run = FrameworkSession("Hugging Face's Trainer")
        self._sealer = Sealer() if seals else None
        self.numerics = None if numerics is None else self._looking(numerics)
        self._run.begin(_SETUP)
        _extend_trainers()

    @harmless
    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Note where the training begins, and where it ends."""
        del args, control
        self._run.begin(_SETUP)
        self._run.start_at(state.global_step, state.max_steps)

    @harmless
    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Enter the section of a step."""
        self._run.end_all()
        self._run.begin(_STEP)

    @harmless
    def on_substep_end(self, *_: Any, **__: Any) -> None:
        """Note progress within a step that accumulates gradients."""
        self._run.heartbeat()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Look at a finished step; ask for a save, and for the end, where they are due."""
        del args
        if self.numerics is not None:
            self.numerics.step(state.global_step)
        self._note_step(state, control)

    @harmless
    def _note_step(self, state: TrainerState, control: TrainerControl) -> None:
        self._run.end_all()
        self._run.step(state.global_step)
        if self._sealer is not None:
            self._sealer.all_saved()
        if self._run.should_stop:
            control.should_save = control.should_training_stop = True
            control.should_evaluate = False  # the time until the node is gone is for the save
        elif self._run.should_save:
            control.should_save = True
        self._enter_next(control)

    @harmless
    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Enter the section of what follows."""
        del args, state
        self._enter_next(control)

    @harmless
    def on_prediction_step(self, *_: Any, **__: Any) -> None:
        """Note progress of an evaluation."""
        self._run.heartbeat()

    @harmless
    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Leave the section of the evaluation."""
        del args, state
        self._run.end(_EVALUATION)
        if control.should_save:
            self._run.begin(_CHECKPOINT)

    @harmless
    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Leave the section of the save, and have the checkpoint sealed after the next step."""
        del control
        folder = os.path.join(args.output_dir, f"checkpoint-{state.global_step}")
        if self.numerics is not None:
            self.numerics.save(folder, args.process_index)
        self._run.end(_CHECKPOINT)
        if self._sealer is not None and args.should_save:
            self._sealer.saved(folder, state.global_step)

    @harmless
    def on_log(self, *_: Any, logs: dict[str, Any] | None = None, **__: Any) -> None:
        """Report the numbers of the Trainer's log."""
        for name, value in (logs or {}).items():
            if isinstance(value, (int, float)):
                self._run.session.report(name, value)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Decide on the last steps, and seal the last checkpoint."""
        if self.numerics is not None:
            self.numerics.finish()
        self._note_end()

    @harmless
    def _note_end(self) -> None:
        self._run.end_all()
        if self._sealer is not None:
            meet()  # the ranks have left their last save, and no step follows
            self._settle()

    def _settle(self) -> None:
        """Wait for the seals of all checkpoints; all ranks have left their saves."""
        if self._sealer is not None:
            self._sealer.all_saved()
            self._sealer.close()

    def _looking(self, policy: "NumericsPolicy") -> "TrainerNumerics":
        from trainer_sdk.integrations.hugging_face_numerics import TrainerNumerics

        return TrainerNumerics(self._run, policy, self._settle)

    def _enter_next(self, control: TrainerControl) -> None:
        if control.should_evaluate:
            self._run.begin(_EVALUATION)
        elif control.should_save:
            self._run.begin(_CHECKPOINT)


def _extend_trainers() -> None:
    """Have a `Trainer` with our callback do what no callback can do; once a process.

    One that resumes in the middle of an epoch looks at `max_steps` only after a step.
    """
    for name, extended in (("_inner_training_loop", _followed), ("_run_epoch", _unless_finished)):
        plain = getattr(Trainer, name, None)
        if plain is not None and not hasattr(plain, "__wrapped__"):
            setattr(Trainer, name, extended(plain))


def _followed(plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def train(self: Trainer, *given: Any, **named: Any) -> Any:
        with contextlib.ExitStack() as following:
            for callback in _callbacks_of(self):
                if callback.numerics is not None:
                    following.enter_context(callback.numerics.follow(self))
            return plain(self, *given, **named)

    return train


def _unless_finished(plain: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(plain)
    def run_epoch(self: Trainer, *given: Any, **named: Any) -> None:
        if _callbacks_of(self) and 0 < self.state.max_steps <= self.state.global_step:
            warn_once(
                f"the training has finished: it resumes at step {self.state.global_step}, and "
                f"max_steps is {self.state.max_steps}; raise max_steps to train on"
            )
            self.control.should_training_stop = True
            return
        plain(self, *given, **named)

    return run_epoch


def _callbacks_of(trainer: Trainer) -> list[HuggingFaceCallback]:
    callbacks = trainer.callback_handler.callbacks
    return [callback for callback in callbacks if isinstance(callback, HuggingFaceCallback)]
