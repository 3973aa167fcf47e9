"""Plugins that log the phases of a restart in NVRx's form, for scripts that read such lines."""

import logging

from trainer_sdk.nvrx.inprocess.plugins import Abort, Completion, Initialize, Terminate
from trainer_sdk.nvrx.inprocess.state import FrozenState
from trainer_sdk.nvrx.logs import LogConfig


class NestedRestarterLogger:
    """Logs the lines to NVRx's logger."""

    def log_for_restarter(self, message: str) -> None:
        """Log a line."""
        logging.getLogger(LogConfig.name).info("%s", message)


class NestedRestarterCallback:
    """Logs a state, and a stage if there is one, on one rank."""

    restarter_state = ""
    restarter_stage: str | None = None

    def __init__(
        self,
        restarter_state: str | None = None,
        restarter_stage: str | None = None,
        logger: NestedRestarterLogger | None = None,
        special_rank: int = 0,
    ) -> None:
        self.restarter_state = restarter_state or type(self).restarter_state
        self.restarter_stage = restarter_stage or type(self).restarter_stage
        self.logger = logger or NestedRestarterLogger()
        self.special_rank = special_rank

    def __call__(self, state: FrozenState) -> FrozenState:
        """Log the line."""
        if state.initial_rank == self.special_rank:
            stage = "" if self.restarter_stage is None else f" stage={self.restarter_stage}"
            self.logger.log_for_restarter(
                f"[NestedRestarter] name=[InProcess] state={self.restarter_state}{stage}"
            )
        return state


class NestedRestarterHandlingCompleted(NestedRestarterCallback, Initialize):
    """Logs `initialize` at the first start, and that a restart is completed at each later one."""

    restarter_state = "initialize"

    def __init__(self, special_rank: int = 0) -> None:
        super().__init__(special_rank=special_rank)

    def __call__(self, state: FrozenState) -> FrozenState:
        """Log the line."""
        super().__call__(state)
        self.restarter_state, self.restarter_stage = "handling", "completed"
        return state


class NestedRestarterHandlingStarting(NestedRestarterCallback, Abort):
    """Logs that a restart begins."""

    restarter_state = "handling"
    restarter_stage = "starting"


class NestedRestarterFinalized(NestedRestarterCallback, Completion):
    """Logs that the function is completed."""

    restarter_state = "finalized"


class NestedRestarterAborted(NestedRestarterCallback, Terminate):
    """Logs that this rank restarts no more."""

    restarter_state = "aborted"
