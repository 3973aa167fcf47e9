"""NVRx's in-process restart: a failed function is run again on all ranks, in the same processes."""

from trainer_sdk.nvrx.inprocess import interruption as monitor_thread
from trainer_sdk.nvrx.inprocess import nested_restarter, plugins, rank_assignment, state
from trainer_sdk.nvrx.inprocess.compose import Compose
from trainer_sdk.nvrx.inprocess.state import FrozenState, Mode, State
from trainer_sdk.nvrx.inprocess.wrapper import CallWrapper, Wrapper

abort = completion = finalize = health_check = initialize = terminate = plugins
exception = state

__all__ = [
    "CallWrapper",
    "Compose",
    "FrozenState",
    "Mode",
    "State",
    "Wrapper",
    "abort",
    "completion",
    "exception",
    "finalize",
    "health_check",
    "initialize",
    "monitor_thread",
    "nested_restarter",
    "rank_assignment",
    "state",
    "terminate",
]
