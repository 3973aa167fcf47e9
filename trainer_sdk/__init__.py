"""The part of Everstep in the training process: progress, sections, preemption, checkpoints."""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from trainer_sdk.checkpoint.checkpointer import Checkpointer
    from trainer_sdk.device.gpu_state import GpuCheck, gpu_check
    from trainer_sdk.rank_session import Session, session
    from trainer_sdk.sections import Section

__all__ = ["Checkpointer", "GpuCheck", "Section", "Session", "gpu_check", "session"]

_HOMES = {
    "Checkpointer": "checkpoint.checkpointer",
    "GpuCheck": "device.gpu_state",
    "Section": "sections",
    "Session": "rank_session",
    "gpu_check": "device.gpu_state",
    "session": "rank_session",
}


def __getattr__(name: str) -> object:
    # Each rank imports this package before its script, and most scripts do not use it.
    if name not in _HOMES:
        raise AttributeError(f"module 'trainer_sdk' has no attribute '{name}'")
    import importlib

    value = getattr(importlib.import_module(f"trainer_sdk.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
