"""Everstep in torchtitan: a checkpoint manager, which is also its seam for fault tolerance.

In a configuration of torchtitan, `checkpoint=TitanCheckpointManager.Config(interval=500)` replaces
`CheckpointManager.Config(…)`. Everything else of it stays: names, intervals, retention, exports.
"""

import sys
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torchtitan.components.checkpointer.dcp import AsyncMode, CheckpointManager

from trainer_sdk.checkpoint import arguments
from trainer_sdk.integrations.dcp import DcpReader, DcpStager, DcpWriter, newest_verified
from trainer_sdk.integrations.framework_session import FrameworkSession, check_version
from trainer_sdk.integrations.torchtitan_numerics import NUMERICS, TitanLoadPlanner, TitanNumerics
from trainer_sdk.numerics.policy import NumericsPolicy
from trainer_sdk.sdk_log import warn

_NONE = -1


class TitanCheckpointManager(CheckpointManager):  # type: ignore[misc]  # untyped where it is absent
    """torchtitan's `CheckpointManager`, whose saves and loads go through Everstep.

    torchtitan calls `save` after each step: so it also reports the step, saves when a person or a
    preemption asks for it, and ends the training after a preemption. Exports to Hugging Face's
    format are those of torchtitan.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):  # type: ignore[misc]
        """The configuration of torchtitan's manager."""

        keep_memory: bool = False
        """Whether each save also stays in the memory of the nodes, as with `DcpWriter`."""

        numerics: NumericsPolicy | None = None
        """What is done about results that cannot be right; None: they are not looked at."""

    def __init__(self, config: Any, **parts: Any) -> None:
        check_version("torchtitan", "0.3", "0.4")
        self._run = FrameworkSession("torchtitan")
        self._own_stager: DcpStager | None = None
        self._is_forced = False
        self._keep_memory = arguments.truth("keep_memory", config.keep_memory)
        self._is_export = False
        self._numerics: TitanNumerics | None = None
        super().__init__(config, **parts)
        if self.enable and config.numerics is not None:
            self._numerics = TitanNumerics(
                self._run, config.numerics, self, parts["dataloader"], parts["model_parts"]
            )
            self.states[NUMERICS] = self._numerics
        if self.enable and self.async_mode == AsyncMode.ASYNC_WITH_PINNED_MEM:
            self.stager = self._stager()  # else torchtitan makes one of its own

    def dcp_save(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: Any,
        enable_garbage_collection: bool = False,
        to_hf: bool = False,
    ) -> Any:
        """Save through Everstep's writer; torchtitan waits for the result as for its own."""
        if to_hf:
            return super().dcp_save(
                state_dict, checkpoint_id, async_mode, enable_garbage_collection, to_hf
            )
        writer = DcpWriter(keep_memory=self._keep_memory and not self._is_export)
        if async_mode == AsyncMode.DISABLED:
            state_dict_saver.save(state_dict, checkpoint_id=checkpoint_id, storage_writer=writer)
            return None
        saving = state_dict_saver.async_save(
            state_dict,
            checkpoint_id=checkpoint_id,
            storage_writer=writer,
            async_stager=self._stager(),
            process_group=self.pg,
        )
        if async_mode == AsyncMode.ASYNC:
            return saving
        assert isinstance(saving, Future)
        staged: Future[None] = Future()  # the state is copied when `async_save` returns
        staged.set_result(None)
        return state_dict_saver.AsyncSaveResponse(
            staging_completion=staged, upload_completion=saving
        )

    def dcp_load(
        self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool
    ) -> None:
        """Load what Everstep has saved, verified; other formats as torchtitan does."""
        if from_hf or not DcpReader.is_there(checkpoint_id):
            state_dict.pop(NUMERICS, None)
            super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
            return
        self._load_verified(state_dict, checkpoint_id)

    def _load_verified(self, state_dict: dict[str, Any], checkpoint_id: str) -> None:
        reader = DcpReader(keep_memory=self._keep_memory)
        state_dict_loader.load(
            state_dict,
            checkpoint_id=checkpoint_id,
            storage_reader=reader,
            planner=TitanLoadPlanner(),
        )
        if "model" in self.states:
            self.states["model"].load_state_dict(state_dict)

    def _load_nearest(self) -> bool:
        """Load the newest state of all tiers; torchtitan itself looks for folders only."""
        step = newest_verified(self.folder, keep_memory=True)
        if step is None:
            return False
        self._load_verified(self._states_to_load(model_only=step == 0), self.folder)
        return True

    def _load(self, step: int = _NONE) -> bool:
        is_nearest = self.enable and self._keep_memory and step == _NONE
        is_loaded = (is_nearest and self._load_nearest()) or bool(super()._load(step))
        if self._numerics is not None:
            self._numerics.begin(self.states.get("train_state"), is_loaded=is_loaded)
        self._run.start_at(self._loaded_step() if is_loaded else 0, None)
        return is_loaded

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        if self._numerics is not None:
            self._numerics.step(curr_step, is_last=last_step)
        self._run.step(curr_step)
        must_stop = self._run.should_stop
        self._is_forced = must_stop or self._run.should_save
        try:
            is_saved = bool(super()._save(curr_step, last_step))
        finally:
            self._is_forced = False
        if must_stop and not last_step:
            self.maybe_wait_for_saving()
            warn(f"the training is preempted: it has saved step {curr_step}, and ends")
            sys.exit(0)
        if self._numerics is not None:
            self._numerics.pass_over()
        return is_saved

    def _save_last_step(self, curr_step: int) -> None:
        self._is_export = bool(self.last_save_model_only)
        try:
            super()._save_last_step(curr_step)
        finally:
            self._is_export = False

    def _should_save(self, curr_step: int, last_step: bool = False) -> bool:
        is_possible = self.enable and not self.load_only
        return (is_possible and self._is_forced) or bool(super()._should_save(curr_step, last_step))

    def _find_load_step(self, folder: str = "") -> int:
        if folder and folder != self.folder:
            return int(super()._find_load_step(folder))
        step = newest_verified(self.folder)
        return int(super()._find_load_step(folder)) if step is None else step

    def _create_checkpoint_id(self, step: int, folder: str = "") -> str:
        """The folder of a step, as Everstep names it, unless torchtitan has saved it."""
        of_titan = str(super()._create_checkpoint_id(step, folder))
        if DcpReader.is_there(of_titan):
            return f"{of_titan.removesuffix(str(step))}{step:09d}"
        return of_titan

    def _stager(self) -> DcpStager:
        if self._own_stager is None:
            self._own_stager = DcpStager()
        return self._own_stager

    def _loaded_step(self) -> int:
        return int(getattr(self.states.get("train_state"), "step", 0))
