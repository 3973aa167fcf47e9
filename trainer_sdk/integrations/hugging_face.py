"""Everstep in Hugging Face's `Trainer`.

trainer = Trainer(…, callbacks=[HuggingFaceCallback()])
trainer.train(resume_from_checkpoint=newest_for_all(arguments.output_dir))
"""

import functools
import os
from typing import Any

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

__all__ = ["HuggingFaceCallback", "newest_for_all"]

_SETUP, _STEP, _CHECKPOINT, _EVALUATION = "setup", "step", "checkpoint", "evaluation"


class HuggingFaceCallback(TrainerCallback):  # type: ignore[misc]  # untyped where it is absent
    """Reports steps, sections and metrics; saves and ends when the training must stop.

    With `seals`, each checkpoint gets a seal, so that `newest_for_all` can verify it. A training
    that resumes at its last step ends at once.
    """

    def __init__(self, *, seals: bool = True) -> None:
        check_version("transformers", "5.20", "5.24")
        self._run = FrameworkSession("Hugging Face's Trainer")
        self._sealer = Sealer() if seals else None
        self._run.begin(_SETUP)
        _end_finished_trainings()

    @harmless
    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Note where the training begins, and where it ends."""
        del args, control
        self._run.begin(_SETUP)
        self._run.start_at(state.global_step, state.max_steps)

    @harmless
    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Enter the section of a step."""
        del args, state, control
        self._run.end_all()
        self._run.begin(_STEP)

    @harmless
    def on_substep_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Note progress within a step that accumulates gradients."""
        del args, state, control
        self._run.heartbeat()

    @harmless
    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Note a finished step; ask for a save, and for the end, where they are due."""
        del args
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
    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Note progress of an evaluation."""
        del args, state, control
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
        self._run.end(_CHECKPOINT)
        if self._sealer is not None and args.should_save:
            folder = os.path.join(args.output_dir, f"checkpoint-{state.global_step}")
            self._sealer.saved(folder, state.global_step)

    @harmless
    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        """Report the numbers of the Trainer's log."""
        del args, state, control
        for name, value in (logs or {}).items():
            if isinstance(value, (int, float)):
                self._run.session.report(name, value)

    @harmless
    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Seal the last checkpoint."""
        del args, state, control
        self._run.end_all()
        if self._sealer is not None:
            meet()  # the ranks have left their last save, and no step follows
            self._sealer.all_saved()
            self._sealer.close()

    def _enter_next(self, control: TrainerControl) -> None:
        if control.should_evaluate:
            self._run.begin(_EVALUATION)
        elif control.should_save:
            self._run.begin(_CHECKPOINT)


def _end_finished_trainings() -> None:
    """Have a `Trainer` with our callback train no step after its last one; once a process.

    A `Trainer` that resumes in the middle of an epoch looks at `max_steps` only after a step, and
    no callback can end it before.
    """
    plain = getattr(Trainer, "_run_epoch", None)
    if plain is None or hasattr(plain, "__wrapped__"):
        return

    @functools.wraps(plain)
    def run_epoch(self: Trainer, *given: Any, **named: Any) -> None:
        callbacks = self.callback_handler.callbacks
        is_ours = any(isinstance(callback, HuggingFaceCallback) for callback in callbacks)
        if is_ours and 0 < self.state.max_steps <= self.state.global_step:
            warn_once(
                f"the training has finished: it resumes at step {self.state.global_step}, and "
                f"max_steps is {self.state.max_steps}; raise max_steps to train on"
            )
            self.control.should_training_stop = True
            return
        plain(self, *given, **named)

    Trainer._run_epoch = run_epoch  # noqa: SLF001 - there is no public name
