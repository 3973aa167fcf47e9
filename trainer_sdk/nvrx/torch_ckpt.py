"""NVRx's `TorchAsyncCheckpoint`: `torch.save` in the background."""

import os
from typing import Any

import torch

from trainer_sdk.checkpoint.file_saver import FileSaver
from trainer_sdk.checkpoint.rank_group import group_of_all
from trainer_sdk.checkpoint.save.request import SaveHandle
from trainer_sdk.nvrx.async_calls import failure


class TorchAsyncCheckpoint:
    """Writes single files through the writer process; `save` is `torch.save`, at once."""

    def __init__(self, persistent_queue: bool = True) -> None:
        del persistent_queue
        self.save = torch.save
        self._saver = FileSaver()
        self._handles: list[SaveHandle] = []
        self._refused: list[str] = []
        """Why saves were refused at their call; the other ranks do not know."""

    def async_save(self, state_dict: Any, *args: Any, **kwargs: Any) -> None:
        """Copy the state now, and write it later: `async_save(state, path)`.

        Further arguments of `torch.save` have no effect.
        """
        path = args[0] if args else kwargs.get("f")
        try:
            self._handles.append(self._saver.schedule(state_dict, _checked(path)))
        except Exception as error:
            self._refused.append(f"{type(error).__name__}: {error}")
            raise

    def finalize_async_save(
        self, blocking: bool = False, no_dist: bool = True, terminate: bool = False
    ) -> None:
        """Look for saves that are done, or wait for all; raises the error of one that failed.

        Without `no_dist`, all ranks call it together, and all raise if a save has failed on one,
        or was refused at its call.
        """
        self._saver.maybe_finalize(blocking)
        done = [handle for handle in self._handles if handle.durable or handle.error is not None]
        self._handles = [handle for handle in self._handles if handle not in done]
        errors = [handle.error for handle in done if handle.error is not None]
        if not no_dist:
            refused, self._refused = self._refused, []
            self._agree("; ".join([*refused, *map(str, errors)]))
        if errors:
            raise errors[0]
        if terminate:
            self.close()

    def close(self, abort: bool = False) -> None:
        """Wait for all saves, or abandon them."""
        self._saver.close(abort)

    @staticmethod
    def _agree(text: str) -> None:
        texts = group_of_all().gather(text, str)
        failed = {rank: each for rank, each in enumerate(texts) if each}
        if failed:
            raise failure("write", failed)


def _checked(path: object) -> "str | os.PathLike[str]":
    if isinstance(path, (str, os.PathLike)):
        return path
    raise TypeError(f"async_save writes to a path, and got {path!r}: use torch.save")
