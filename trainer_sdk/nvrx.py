"""The calls of NVRx's `RankMonitorClient`, for a training that makes them already.

    from trainer_sdk.nvrx import RankMonitorClient

replaces `from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient`. Two things differ.
The agent learns the limits, so calls that calculate or keep limits have no effect. And no call
raises: where NVRx raises an error, this client warns once and ignores the call.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from trainer_sdk.pauses import Pause
from trainer_sdk.rank_session import session
from trainer_sdk.sdk_log import warn_once

_STEP = "step"


class RankMonitorClientError(Exception):
    """For `except` clauses; it is never raised."""


class WorkloadAction(Enum):
    """The actions that a training may request."""

    Continue = 0
    ExcludeThisNode = 1
    ShutdownWorkload = 2


class WorkloadControlRequest:
    """A requested action, and its reason."""

    def __init__(self, action: WorkloadAction, description: str = "<not set>") -> None:
        self.action = action
        self.description = description


@dataclass
class HeartbeatTimeouts:
    """None: not known in the training."""

    initial: float | None = None
    subsequent: float | None = None
    were_calculated: bool | None = False

    @property
    def are_valid(self) -> bool:
        """Whether they are known."""
        return self.initial is not None and self.subsequent is not None


@dataclass
class SectionTimeouts:
    """None: not known in the training."""

    section: Mapping[str, float | None] = field(default_factory=dict)
    out_of_section: float | None = None
    calculated_sections: Collection[str] = field(default_factory=set)
    is_out_of_section_calculated: bool = False

    @property
    def were_calculated(self) -> bool:
        """Whether the training has calculated all of them."""
        return set(self.calculated_sections) == set(self.section) and (
            self.is_out_of_section_calculated
        )

    @property
    def are_valid(self) -> bool:
        """Whether they are known."""
        are_known = all(limit is not None for limit in self.section.values())
        return are_known and self.out_of_section is not None


@dataclass
class FaultToleranceConfig:
    """The configuration of NVRx's launcher; nothing of it applies here."""

    initial_rank_heartbeat_timeout: float | None = None
    rank_heartbeat_timeout: float | None = None
    rank_section_timeouts: Mapping[str, float | None] = field(default_factory=dict)
    rank_out_of_section_timeout: float | None = None
    safety_factor: float = 5.0


class RankMonitorClient:
    """Passes its calls to the session. A section `step` counts steps, unless the script does."""

    CURRENT_TIMEOUTS_STATE_KEY = "current_timeouts"

    def __init__(self) -> None:
        self.is_initialized = False
        self.cfg: FaultToleranceConfig | None = None
        self.hb_timeouts: HeartbeatTimeouts | None = None
        self.section_timeouts: SectionTimeouts | None = None
        self._state: Mapping[str, Any] = {}
        self._session = session()
        self._open: list[str] = []
        self._ended: set[str] = set()
        self._counted = self._session.steps_made
        self._rest: Pause | None = None

    def init_workload_monitoring(self, num_warmup_iters: int | None = None) -> None:
        """Begin; all other calls come after it. `num_warmup_iters` first steps may take long."""
        if self.is_initialized:
            warn_once("init_workload_monitoring was called twice; the second call is ignored")
            return
        self.is_initialized = True
        if num_warmup_iters is not None:
            self._session.warm_up(num_warmup_iters)
        self.cfg = FaultToleranceConfig()
        self.hb_timeouts, self.section_timeouts = HeartbeatTimeouts(), SectionTimeouts()
        if self._rest is not None:
            self._rest.end()
            self._rest = None

    def shutdown_workload_monitoring(self) -> None:
        """Stop the monitoring of this rank."""
        if not self.is_initialized:
            return
        self.end_all_sections()
        self.is_initialized = False
        self._rest = self._session.pause(reason="shutdown_workload_monitoring")

    def send_heartbeat(self) -> None:
        """Report progress."""
        if self._is_ready("send_heartbeat"):
            self._session.heartbeat()

    def start_section(self, section: str) -> None:
        """Enter a section; if it is open already, its missing end is added first."""
        if not self._is_ready("start_section"):
            return
        if section in self._open:
            warn_once(f"section {section!r} was started twice without an end; it starts again")
            self._leave(section)
        self._open.append(section)
        self._session.begin(section)

    def end_section(self, section: str) -> None:
        """Leave a section; sections that began after it stay open."""
        if not self._is_ready("end_section"):
            return
        if section not in self._open:
            warn_once(f"section {section!r} was ended, but had not been started, or had ended")
            return
        self._leave(section)
        if section == _STEP and self._session.steps_made == self._counted:
            self._counted = self._session.step()

    def end_all_sections(self) -> None:
        """Leave every section."""
        for section in reversed(self._open.copy()):
            self.end_section(section)

    def calculate_and_set_hb_timeouts(self, skip_if_not_ready: bool = False) -> bool:  # noqa: ARG002
        """Everstep learns limits itself; true once monitoring has begun."""
        return self._is_ready("calculate_and_set_hb_timeouts")

    def calculate_and_set_section_timeouts(
        self,
        selected_sections: Collection[str] | None = None,
        calc_out_of_section: bool = True,  # noqa: ARG002
        skip_if_not_ready: bool = False,  # noqa: ARG002
    ) -> bool:
        """Everstep learns limits itself; true if each of these sections has ended once."""
        ready = self._is_ready("calculate_and_set_section_timeouts")
        wanted = self._ended if selected_sections is None else set(selected_sections)
        return ready and bool(self._ended) and wanted <= self._ended

    def state_dict(self) -> Mapping[str, Any]:
        """The state that was loaded; there is no other state."""
        return {self.CURRENT_TIMEOUTS_STATE_KEY: {}, **self._state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Keep a state that NVRx has saved, only to return it from `state_dict`."""
        self._state = dict(state)

    def send_workload_control_request(self, req: WorkloadControlRequest) -> None:
        """Ask that this node be excluded from the next round, or that the job be stopped."""
        action = getattr(req.action, "name", "")  # an integration may still import NVRx's own
        if action == WorkloadAction.ExcludeThisNode.name:
            self._session.request("exclude", req.description)
        elif action == WorkloadAction.ShutdownWorkload.name:
            self._session.request("stop", req.description)

    def _leave(self, section: str) -> None:
        place = self._open.index(section)
        inner = self._open[place + 1 :]
        self._session.end(section)
        for inner_section in inner:  # they ended with it: open them again
            self._session.begin(inner_section)
        del self._open[place]
        self._ended.add(section)

    def _is_ready(self, call: str) -> bool:
        if not self.is_initialized:
            warn_once(f"{call} was called before init_workload_monitoring, and is ignored")
        return self.is_initialized
