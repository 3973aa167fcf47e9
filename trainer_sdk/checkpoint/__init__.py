"""Saves and restores of a training's state. The only part of the SDK that imports torch."""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from trainer_sdk.checkpoint.checkpointer import Checkpointer
    from trainer_sdk.checkpoint.data import PerRank, PositionedSampler, RngState
    from trainer_sdk.checkpoint.file_saver import FileSaver, async_save, wait_for_files
    from trainer_sdk.checkpoint.restore.errors import RestoreError
    from trainer_sdk.checkpoint.restore.quarantine import BadLossError
    from trainer_sdk.checkpoint.restore.restore import Restored
    from trainer_sdk.checkpoint.restore.restorer import Latest
    from trainer_sdk.checkpoint.save.request import SaveError, SaveHandle, Timeouts

__all__ = [
    "BadLossError",
    "Checkpointer",
    "FileSaver",
    "Latest",
    "PerRank",
    "PositionedSampler",
    "RestoreError",
    "Restored",
    "RngState",
    "SaveError",
    "SaveHandle",
    "Timeouts",
    "async_save",
    "wait_for_files",
]

_HOMES = {
    "BadLossError": "restore.quarantine",
    "Checkpointer": "checkpointer",
    "FileSaver": "file_saver",
    "Latest": "restore.restorer",
    "PerRank": "data",
    "Timeouts": "save.request",
    "PositionedSampler": "data",
    "RngState": "data",
    "RestoreError": "restore.errors",
    "Restored": "restore.restore",
    "SaveError": "save.request",
    "SaveHandle": "save.request",
    "async_save": "file_saver",
    "wait_for_files": "file_saver",
}


def __getattr__(name: str) -> object:
    # The writer, the agent and the catalog import parts of this package, and have no torch.
    if name not in _HOMES:
        raise AttributeError(f"module 'trainer_sdk.checkpoint' has no attribute '{name}'")
    import importlib

    value = getattr(importlib.import_module(f"trainer_sdk.checkpoint.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
