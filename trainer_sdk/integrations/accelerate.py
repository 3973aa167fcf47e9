"""Everstep in a training with Hugging Face's `Accelerator`.

everstep = AccelerateRun(accelerator, "/ckpt")
step = everstep.resume()
for batch in batches:
    …
    step = everstep.step()
    if everstep.should_stop:
        everstep.save()
        break
"""

import os
import re
from typing import Any

from accelerate import Accelerator

from trainer_sdk.checkpoint import arguments
from trainer_sdk.integrations import seals
from trainer_sdk.integrations.framework_session import FrameworkSession, check_version
from trainer_sdk.integrations.resume import meet, newest_for_all
from trainer_sdk.integrations.sealer import Sealer

_CHECKPOINT, _PREFIX = "checkpoint", "checkpoint_"
_AUTOMATIC = re.compile(_PREFIX + r"(\d+)")


class AccelerateRun:
    """Steps, sections and verified checkpoints of a training with an `Accelerator`.

    Each `accelerator.save_state` gets a section and a seal, also one that the script calls itself;
    `accelerator.load_state` refuses a damaged checkpoint. Checkpoints are `FOLDER/checkpoint_STEP`.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        folder: "str | os.PathLike[str]",
        *,
        total_steps: int | None = None,
    ) -> None:
        check_version("accelerate", "1.10", "1.16")
        self._accelerator = accelerator
        self._folder = os.path.abspath(arguments.path("folder", folder))
        self._total = total_steps
        self._run = FrameworkSession("Accelerate")
        self._sealer = Sealer()
        self._step = 0
        accelerator.register_save_state_pre_hook(self._before_save)
        accelerator.register_load_state_pre_hook(self._before_load)
        self._plain_save = accelerator.save_state
        accelerator.save_state = self._save_state

    @property
    def should_stop(self) -> bool:
        """Whether the training must save and end; true on all ranks after the same step."""
        return self._run.should_stop

    @property
    def should_save(self) -> bool:
        """Whether a person has asked for a save; true on all ranks after the same step."""
        return self._run.should_save

    def resume(self) -> int:
        """Load the newest verified checkpoint; returns its step, and 0 if there is none."""
        path = newest_for_all(self._folder, _PREFIX)
        if path is not None:
            self._accelerator.load_state(path)
            self._step = seals.step_of(path) or 0
            settings = self._accelerator.project_configuration
            if settings.automatic_checkpoint_naming:
                settings.iteration = self._step + 1  # else it writes the same number again
        self._run.start_at(self._step, self._total)
        return self._step

    def step(self, number: int | None = None) -> int:
        """Note a finished step on this rank; returns its number, the given one or the next."""
        self._step = self._step + 1 if number is None else arguments.whole("number", number)
        self._run.end_all()
        self._run.step(self._step)
        self._sealer.all_saved()
        return self._step

    def save(self) -> str:
        """Save the state of the last step as `FOLDER/checkpoint_STEP`; all ranks call it."""
        path = os.path.join(self._folder, f"{_PREFIX}{self._step}")
        self._accelerator.save_state(path)
        return path

    def close(self) -> None:
        """Seal the last checkpoint; all ranks call it at the end of the training."""
        self._run.end_all()
        meet()
        self._sealer.all_saved()
        self._sealer.close()

    def _save_state(self, *given: Any, **named: Any) -> Any:
        self._run.begin(_CHECKPOINT)
        try:
            return self._plain_save(*given, **named)
        finally:
            self._run.end(_CHECKPOINT)

    def _before_save(self, models: list[Any], weights: list[Any], folder: str) -> None:
        del models, weights
        if self._accelerator.is_main_process:
            seals.unseal(folder)
            match = _AUTOMATIC.fullmatch(os.path.basename(os.path.normpath(folder)))
            self._sealer.saved(folder, int(match[1]) if match else self._step)

    def _before_load(self, models: list[Any], folder: str) -> None:
        del models
        checkpoint = seals.check(folder)
        if checkpoint.state == "damaged":
            raise ValueError(
                f"{folder} is damaged: {checkpoint.reason}; load the one that resume() finds"
            )
