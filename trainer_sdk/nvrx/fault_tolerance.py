"""NVRx's `fault_tolerance`: the client of its rank monitor, and what goes with it.

Limits that the training calculates are the numbers that NVRx would calculate; the agent does not
need them, because it learns limits itself. No call raises: where NVRx raises an error, this client
warns once and ignores the call.
"""

import dataclasses
import json
import logging
import signal
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import msgspec

from everstep.evidence.files import open_regular
from trainer_sdk import layout
from trainer_sdk.environment import environ
from trainer_sdk.nvrx.timeouts import (
    HeartbeatTimeouts,
    SectionAction,
    SectionTimeouts,
    TimeoutsCalc,
    TimeoutsCalcError,
)
from trainer_sdk.pauses import Pause
from trainer_sdk.rank_session import session
from trainer_sdk.sdk_log import warn_once

_STEP = "step"
_OF_HEARTBEATS = "heartbeat"
_OF_SECTIONS = "section"
_SPECIAL = {
    "first-step": "initial_rank_heartbeat_timeout",
    "heartbeat": "rank_heartbeat_timeout",
    "outside": "rank_out_of_section_timeout",
}
"""Limits of `everstep run` that are not of a section, and NVRx's names for them."""


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

    def __str__(self) -> str:
        return f"{self.action}: {self.description}"


@dataclass
class FaultToleranceConfig:
    """The configuration of NVRx's launcher. Limits are those that `everstep run` was given."""

    workload_check_interval: float = 5.0
    initial_rank_heartbeat_timeout: float | None = None
    rank_heartbeat_timeout: float | None = None
    rank_section_timeouts: Mapping[str, float | None] = field(default_factory=dict)
    rank_out_of_section_timeout: float | None = None
    node_health_check_interval: float = 5.0
    safety_factor: float = 5.0
    rank_termination_signal: signal.Signals = signal.SIGKILL
    log_level: int = logging.INFO
    restart_check_interval: float = 60.0
    enable_nic_monitor: bool = False
    enable_nic_healthcheck: bool = True
    enable_dist_storage_healthcheck: bool = False
    storage_healthcheck_path: str | None = None
    pci_topo_file: str | None = None
    link_down_path_template: str | None = None
    link_state_path_template: str | None = None
    skip_section_response: bool = True
    segment: int | None = None
    numa_bind_strict: bool = True
    gpu_memory_reclaim_timeout: float = 50.0
    gpu_memory_tolerance_mb: float = 512.0
    gpu_memory_poll_interval: float = 2.0
    check_remaining_processes: bool = False
    max_no_progress_cycles: int = 3
    min_progress_iterations: int = 1
    checkpoint_iteration_file: str | None = None
    install_exception_hook: bool = False
    num_warmup_iterations: int = 5
    attribution_endpoint: str | None = None
    attribution_stop_action: str | None = None
    attribution_export_url: str | None = None
    cycle_info_dir: str | None = None
    segment_health_check_dir: str | None = None

    @property
    def is_progress_tracking_enabled(self) -> bool:
        """True: steps are counted inside the ranks."""
        return True

    @staticmethod
    def from_kwargs(ignore_not_recognized: bool = True, **kwargs: Any) -> "FaultToleranceConfig":
        """A configuration with these values."""
        names = {each.name for each in dataclasses.fields(FaultToleranceConfig)}
        unknown = sorted(kwargs.keys() - names)
        if unknown and not ignore_not_recognized:
            raise ValueError(f"NVRx has no such keys: {', '.join(unknown)}")
        return FaultToleranceConfig(**{name: kwargs[name] for name in kwargs.keys() & names})

    @staticmethod
    def from_yaml_file(cfg_path: str, ignore_not_recognized: bool = True) -> "FaultToleranceConfig":
        """The values of the section `fault_tolerance`, wherever it is in the file; needs PyYAML."""
        with open_regular(cfg_path) as file:
            section = _section(msgspec.yaml.decode(file.read()))
        if section is None:
            raise ValueError(f"{cfg_path} has no section `fault_tolerance:`; add one")
        return FaultToleranceConfig.from_kwargs(ignore_not_recognized, **section)

    def to_yaml_file(self, cfg_path: str) -> None:
        """Write the values as the section `fault_tolerance` of a file; needs PyYAML."""
        values = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}
        with open(cfg_path, "wb") as file:
            file.write(msgspec.yaml.encode({"fault_tolerance": values}))


def _section(tree: Any) -> dict[str, Any] | None:
    """The first section `fault_tolerance` of a tree, the outermost ones first."""
    level = [tree]
    while level:
        for node in level:
            if isinstance(node, dict) and isinstance(node.get("fault_tolerance"), dict):
                section: dict[str, Any] = node["fault_tolerance"]
                return section
        level = [each for node in level if isinstance(node, dict) for each in node.values()]
    return None


def _launched_with(text: str) -> FaultToleranceConfig:
    """The configuration by the limits of `everstep run`, as the agent passes them on."""
    try:
        limits: dict[str, float] = json.loads(text or "{}")
    except ValueError:
        limits = {}
    named: dict[str, Any] = {
        _SPECIAL[name]: limits[name] for name in _SPECIAL.keys() & limits.keys()
    }
    sections = {name: limits[name] for name in sorted(limits.keys() - _SPECIAL.keys())}
    return FaultToleranceConfig.from_kwargs(**named, rank_section_timeouts=sections)


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
        self._calc = TimeoutsCalc()
        self._open: list[str] = []
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
        self.cfg = cfg = _launched_with(environ.get(layout.LIMITS_VARIABLE, ""))
        self.hb_timeouts = HeartbeatTimeouts(
            cfg.initial_rank_heartbeat_timeout, cfg.rank_heartbeat_timeout
        )
        self.section_timeouts = SectionTimeouts(
            dict(cfg.rank_section_timeouts), cfg.rank_out_of_section_timeout
        )
        self._calc = TimeoutsCalc(safety_factor=cfg.safety_factor)
        self._take_loaded()
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
            self._calc.update_on_heartbeat()
            self._session.heartbeat()

    def start_section(self, section: str) -> None:
        """Enter a section; if it is open already, its missing end is added first."""
        if not self._is_ready("start_section"):
            return
        if section in self._open:
            warn_once(f"section {section!r} was started twice without an end; it starts again")
            self._leave(section)
        self._open.append(section)
        self._calc.update_on_section_event(section, SectionAction.OPEN)
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

    def calculate_and_set_hb_timeouts(self, skip_if_not_ready: bool = False) -> bool:
        """Calculate `hb_timeouts`, on all ranks together; false if there is not enough data."""

        def calculate() -> None:
            self.hb_timeouts = self._calc.get_hb_timeouts(self.hb_timeouts)

        return self._calculate("calculate_and_set_hb_timeouts", calculate, skip_if_not_ready)

    def calculate_and_set_section_timeouts(
        self,
        selected_sections: Collection[str] | None = None,
        calc_out_of_section: bool = True,
        skip_if_not_ready: bool = False,
    ) -> bool:
        """Calculate `section_timeouts`, on all ranks together; false if there is not enough data.

        `selected_sections` are the sections to calculate; by default those that have ended once.
        """
        if calc_out_of_section:
            self._calc.maybe_bump_oos_time()

        def calculate() -> None:
            self.section_timeouts = self._calc.get_section_timeouts(
                selected_sections, calc_out_of_section, self.section_timeouts
            )

        return self._calculate("calculate_and_set_section_timeouts", calculate, skip_if_not_ready)

    def state_dict(self) -> Mapping[str, Any]:
        """The limits that were calculated, as JSON can have them; other loaded values stay."""
        limits: dict[str, Any] = {}
        beats, sections = self.hb_timeouts, self.section_timeouts
        if beats is not None and beats.are_valid and beats.were_calculated:
            limits[_OF_HEARTBEATS] = dataclasses.asdict(beats)
        if sections is not None and (
            sections.calculated_sections or sections.is_out_of_section_calculated
        ):
            names = sorted(sections.calculated_sections)
            limits[_OF_SECTIONS] = dataclasses.asdict(sections) | {"calculated_sections": names}
        if not self.is_initialized and not limits:
            limits = dict(self._state.get(self.CURRENT_TIMEOUTS_STATE_KEY) or {})
        return {**self._state, self.CURRENT_TIMEOUTS_STATE_KEY: limits}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take a state that this client or NVRx's has saved, before or after the beginning."""
        self._state = dict(state)
        if self.is_initialized:
            self._take_loaded()

    def send_workload_control_request(self, req: WorkloadControlRequest) -> None:
        """Ask that this node be excluded from the next round, or that the job be stopped."""
        action = getattr(req.action, "name", "")  # an integration may still import NVRx's own
        if action == WorkloadAction.ExcludeThisNode.name:
            self._session.request("exclude", req.description)
        elif action == WorkloadAction.ShutdownWorkload.name:
            self._session.request("stop", req.description)

    def _take_loaded(self) -> None:
        """Take the limits of the loaded state; one that is not of NVRx's form is ignored."""
        loaded = self._state.get(self.CURRENT_TIMEOUTS_STATE_KEY) or {}
        try:
            if loaded.get(_OF_HEARTBEATS):
                self.hb_timeouts = HeartbeatTimeouts(**loaded[_OF_HEARTBEATS])
            if loaded.get(_OF_SECTIONS):
                sections = SectionTimeouts(**loaded[_OF_SECTIONS])
                self.section_timeouts = dataclasses.replace(
                    sections, calculated_sections=set(sections.calculated_sections)
                )
        except (TypeError, AttributeError) as error:
            warn_once(f"load_state_dict got a state that is not of RankMonitorClient: {error}")

    def _calculate(self, call: str, calculate: Callable[[], None], skip: bool) -> bool:
        """Merge what the ranks have seen, and calculate; false if that is not possible."""
        if not self._is_ready(call):
            return False
        try:
            self._calc.synchronize_all()
            calculate()
        except TimeoutsCalcError as error:
            if not skip:
                warn_once(f"{call}: {error}; no limit has changed")
            return False
        except Exception as error:  # noqa: BLE001 - a process group may raise anything
            warn_once(f"{call}: the ranks could not agree: {error}; no limit has changed")
            return False
        return True

    def _leave(self, section: str) -> None:
        place = self._open.index(section)
        inner = self._open[place + 1 :]
        self._calc.update_on_section_event(section, SectionAction.CLOSE)
        self._session.end(section)
        for inner_section in inner:  # they ended with it: open them again
            self._session.begin(inner_section)
        del self._open[place]

    def _is_ready(self, call: str) -> bool:
        if not self.is_initialized:
            warn_once(f"{call} was called before init_workload_monitoring, and is ignored")
        return self.is_initialized
