"""NVRx's local checkpoints for Lightning: when to save, and an IO that knows both kinds."""

import logging
import time
from abc import abstractmethod
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from trainer_sdk.checkpoint.rank_group import group_of_all

if TYPE_CHECKING:
    Callback = object

    class CheckpointIO:
        """Lightning's IO that wraps another."""

        checkpoint_io: Any

        def __init__(self, checkpoint_io: Any) -> None: ...

else:
    try:
        from lightning.pytorch import Callback
        from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO as CheckpointIO
    except ImportError:
        from pytorch_lightning import Callback
        from pytorch_lightning.plugins.io.wrapper import _WrappingCheckpointIO as CheckpointIO

_logger = logging.getLogger(__name__)
LOCAL_CKPT_OPTS_KEY = "local_checkpoint_options"


class LocalCheckpointCallback(Callback):
    """Saves local checkpoints, by steps or by time, through a `HierarchicalCheckpointIO`."""

    def __init__(
        self, every_n_train_steps: int | None = None, train_time_interval: timedelta | None = None
    ) -> None:
        if (every_n_train_steps is None) == (train_time_interval is None):
            raise ValueError("give either every_n_train_steps or train_time_interval")
        self.every_n_train_steps = every_n_train_steps
        self.train_time_interval = train_time_interval
        self._saved_at = time.monotonic()
        self._saved: int | None = None

    def on_train_batch_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        """Save, if a local checkpoint is due; rank 0's clock decides."""
        del args, kwargs
        step = trainer.global_step
        if step == self._saved or not self._is_due(step):
            return
        self._saved, self._saved_at = step, time.monotonic()
        options = {"ckpt_type": "local", "iteration": step, "is_async": None}
        trainer.save_checkpoint(f"local-{step}", storage_options={LOCAL_CKPT_OPTS_KEY: options})

    def _is_due(self, step: int) -> bool:
        if self.every_n_train_steps is not None:
            return bool(step) and step % self.every_n_train_steps == 0
        assert self.train_time_interval is not None
        has_passed = time.monotonic() - self._saved_at >= self.train_time_interval.total_seconds()
        return group_of_all().follow(has_passed, bool)


class HierarchicalCheckpointIO(CheckpointIO):
    """Passes local checkpoints to a local manager, and all others to the wrapped IO."""

    def __init__(
        self,
        wrapped_checkpoint_io: Any,
        local_ckpt_manager: Any,
        get_global_ckpt_iteration_fn: Callable[[Any], int],
        async_save: bool = False,
    ) -> None:
        super().__init__(wrapped_checkpoint_io)
        self.local_ckpt_manager = local_ckpt_manager
        self.get_global_ckpt_iteration_fn = get_global_ckpt_iteration_fn
        self.async_save = async_save

    @classmethod
    def get_partial_wrapper_constructor(
        cls, local_ckpt_manager: Any, get_global_ckpt_iteration_fn: Callable[[Any], int]
    ) -> Callable[..., "HierarchicalCheckpointIO"]:
        """A function that wraps an IO."""
        return partial(
            cls,
            local_ckpt_manager=local_ckpt_manager,
            get_global_ckpt_iteration_fn=get_global_ckpt_iteration_fn,
        )

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> Any:
        """Save; a local and asynchronous save returns its request, which the caller schedules."""
        options = (storage_options or {}).get(LOCAL_CKPT_OPTS_KEY)
        if options is None:
            return self.checkpoint_io.save_checkpoint(checkpoint, path, storage_options)
        if options.get("ckpt_type") != "local":
            raise ValueError(f"ckpt_type {options.get('ckpt_type')!r}: only 'local' is known")
        is_async = self.async_save if options.get("is_async") is None else options["is_async"]
        return self.local_ckpt_manager.save(
            self.to_tensor_aware_state_dict(checkpoint), options["iteration"], is_async=is_async
        )

    def load_checkpoint(self, path: Any, map_location: Any = None, **kwargs: Any) -> dict[str, Any]:
        """Load the local checkpoint, unless the global one is newer."""
        newest = self.local_ckpt_manager.find_latest()
        if newest >= 0:
            stored_at = self.get_global_ckpt_iteration_fn(path)
            kind = "local" if newest >= stored_at else "global"
            there = "Resuming from a %s checkpoint: iteration %d is stored locally, %d globally"
            _logger.info(there, kind, newest, stored_at)
            if kind == "local":
                state, _ = self.local_ckpt_manager.load()
                loaded: dict[str, Any] = self.from_tensor_aware_state_dict(state, **kwargs)
                return loaded
        stored: dict[str, Any] = self.checkpoint_io.load_checkpoint(
            path, map_location=map_location, **kwargs
        )
        return stored

    def remove_checkpoint(self, path: Any) -> None:
        """Remove a global checkpoint; the manager removes local ones itself."""
        self.checkpoint_io.remove_checkpoint(path)

    @abstractmethod
    def to_tensor_aware_state_dict(self, checkpoint: dict[str, Any]) -> Any:
        """The checkpoint as the local manager takes it."""

    @abstractmethod
    def from_tensor_aware_state_dict(self, tensor_aware_checkpoint: Any, **kwargs: Any) -> Any:
        """The checkpoint as Lightning takes it."""
