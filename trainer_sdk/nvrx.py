"""The calls of NVRx's `RankMonitorClient`, for a training that makes them already.

    from trainer_sdk.nvrx import RankMonitorClient

replaces `from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient`. Two things differ.
Limits are learned by Everstep and not in the training, so that calls which calculate or keep them
change nothing. And nothing raises: what NVRx refuses with an error is said once and passed over.
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
    """For `except`; it is never raised."""


class WorkloadAction(Enum):
    """What a training may ask for."""

    Continue = 0
    ExcludeThisNode = 1
    ShutdownWorkload = 2


class WorkloadControlRequest:
    """What is asked for, and why."""

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
    """What NVRx's client knows of its launcher's configuration; none of it applies here."""

    initial_rank_heartbeat_timeout: float | None = None
    rank_heartbeat_timeout: float | None = None
    rank_section_timeouts: Mapping[str, float | None] = field(default_factory=dict)
    rank_out_of_section_timeout: float | None = None
    safety_factor: float = 5.0


class RankMonitorClient:
    """Speaks to this process's session. A section `step` counts steps, if nothing else does."""

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
        """Begin; every other call is to come after it. So many first steps may take long."""
        if self.is_initialized:
            warn_once("init_workload_monitoring was called twice; the second call changes nothing")
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
        """Judge this rank no more, whatever it does from here on."""
        if not self.is_initialized:
            return
        self.end_all_sections()
        self.is_initialized = False
        self._rest = self._session.pause(reason="shutdown_workload_monitoring")

    def send_heartbeat(self) -> None:
        """There is progress."""
        if self._is_ready("send_heartbeat"):
            self._session.heartbeat()

    def start_section(self, section: str) -> None:
        """Enter a section. One that is open is left first: its end was skipped."""
        if not self._is_ready("start_section"):
            return
        if section in self._open:
            warn_once(f"section {section!r} was started twice without an end; it begins anew")
            self._leave(section)
        self._open.append(section)
        self._session.begin(section)

    def end_section(self, section: str) -> None:
        """Leave a section, and none of those that began after it."""
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
        """Everstep learns limits by itself; true if there is anything to learn from."""
        return self._is_ready("calculate_and_set_hb_timeouts")

    def calculate_and_set_section_timeouts(
        self,
        selected_sections: Collection[str] | None = None,
        calc_out_of_section: bool = True,  # noqa: ARG002
        skip_if_not_ready: bool = False,  # noqa: ARG002
    ) -> bool:
        """Everstep learns limits by itself; true if each of these sections has ended once."""
        ready = self._is_ready("calculate_and_set_section_timeouts")
        wanted = self._ended if selected_sections is None else set(selected_sections)
        return ready and bool(self._ended) and wanted <= self._ended

    def state_dict(self) -> Mapping[str, Any]:
        """What was loaded: there is nothing else to keep."""
        return {self.CURRENT_TIMEOUTS_STATE_KEY: {}, **self._state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what NVRx may have kept, and give it back from `state_dict`; it applies no more."""
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
        for ended_with_it in inner:  # they ended with it, and go on
            self._session.begin(ended_with_it)
        del self._open[place]
        self._ended.add(section)

    def _is_ready(self, call: str) -> bool:
        if not self.is_initialized:
            warn_once(f"{call} comes before init_workload_monitoring, and changes nothing")
        return self.is_initialized
