"""Checkpoints that survive everything. Imports torch; nothing else of the SDK does."""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from trainer_sdk.checkpoint.checkpointer import Checkpointer
    from trainer_sdk.checkpoint.data import OfRank, PositionedSampler, Randomness
    from trainer_sdk.checkpoint.files import FileSaves, async_save, wait_for_files
    from trainer_sdk.checkpoint.quarantine import BadLossError
    from trainer_sdk.checkpoint.restore.errors import RestoreError
    from trainer_sdk.checkpoint.restore.restoring import Restored
    from trainer_sdk.checkpoint.save import Patience, SaveError

__all__ = [
    "BadLossError",
    "Checkpointer",
    "FileSaves",
    "OfRank",
    "Patience",
    "PositionedSampler",
    "Randomness",
    "RestoreError",
    "Restored",
    "SaveError",
    "async_save",
    "wait_for_files",
]

_HOMES = {
    "BadLossError": "quarantine",
    "Checkpointer": "checkpointer",
    "FileSaves": "files",
    "OfRank": "data",
    "Patience": "save",
    "PositionedSampler": "data",
    "Randomness": "data",
    "RestoreError": "restore.errors",
    "Restored": "restore.restoring",
    "SaveError": "save",
    "async_save": "files",
    "wait_for_files": "files",
}


def __getattr__(name: str) -> object:
    # The writer, agents and the catalog have parts of this package, and no torch.
    if name not in _HOMES:
        raise AttributeError(f"module 'trainer_sdk.checkpoint' has no attribute '{name}'")
    import importlib

    found = getattr(importlib.import_module(f"trainer_sdk.checkpoint.{_HOMES[name]}"), name)
    globals()[name] = found
    return found
