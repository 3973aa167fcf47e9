"""NVRx's module names, and the modules of Everstep that stand in for them."""

import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import PackageNotFoundError, version
from importlib.util import module_from_spec
from types import ModuleType

from trainer_sdk import layout
from trainer_sdk.environment import environ
from trainer_sdk.nvrx import VERSION
from trainer_sdk.sdk_log import warn_once

PACKAGE = "nvidia_resiliency_ext"
FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "path")
"""A folder for `sys.path`, with a package of NVRx's name."""
_OURS = "trainer_sdk.nvrx"
_ASYNC = "checkpointing.async_ckpt"
_LOCAL = "checkpointing.local"
MODULES: Mapping[str, str] = {
    "attribution": "",
    "attribution.straggler": "straggler",
    "attribution.straggler.reporting": "straggler_report",
    "attribution.straggler.statistics": "straggler_report",
    "attribution.straggler.straggler": "straggler",
    "checkpointing": "",
    "checkpointing.utils": "save_helpers",
    _ASYNC: "",
    f"{_ASYNC}.cached_metadata_filesystem_reader": "filesystem_async",
    f"{_ASYNC}.core": "async_calls",
    f"{_ASYNC}.filesystem_async": "filesystem_async",
    f"{_ASYNC}.state_dict_saver": "state_dict_saver",
    f"{_ASYNC}.torch_ckpt": "torch_ckpt",
    _LOCAL: "",
    f"{_LOCAL}.base_state_dict": "tensor_state",
    f"{_LOCAL}.basic_state_dict": "tensor_state",
    f"{_LOCAL}.ckpt_managers": "",
    f"{_LOCAL}.ckpt_managers.base_manager": "local_checkpoints",
    f"{_LOCAL}.ckpt_managers.local_manager": "local_checkpoints",
    f"{_LOCAL}.replication": "",
    f"{_LOCAL}.replication.group_utils": "rank_groups",
    f"{_LOCAL}.replication.strategies": "replication",
    "fault_tolerance": "fault_tolerance",
    "fault_tolerance.config": "fault_tolerance",
    "fault_tolerance.data": "fault_tolerance",
    "fault_tolerance.rank_monitor_client": "fault_tolerance",
    "fault_tolerance.timeouts_calc": "timeouts",
    "inprocess": "inprocess",
    "inprocess.abort": "inprocess.plugins",
    "inprocess.completion": "inprocess.plugins",
    "inprocess.compose": "inprocess.compose",
    "inprocess.exception": "inprocess.state",
    "inprocess.finalize": "inprocess.plugins",
    "inprocess.health_check": "inprocess.node_checks",
    "inprocess.initialize": "inprocess.plugins",
    "inprocess.monitor_thread": "inprocess.interruption",
    "inprocess.nested_restarter": "inprocess.nested_restarter",
    "inprocess.rank_assignment": "inprocess.rank_assignment",
    "inprocess.state": "inprocess.state",
    "inprocess.store": "inprocess.stores",
    "inprocess.terminate": "inprocess.plugins",
    "inprocess.wrap": "inprocess.wrapper",
    "ptl_resiliency": "ptl_resiliency",
    "ptl_resiliency.fault_tolerance_callback": "ptl_resiliency",
    "ptl_resiliency.fault_tolerance_sections_callback": "ptl_resiliency",
    "ptl_resiliency.local_checkpoint_callback": "ptl_checkpoints",
    "ptl_resiliency.straggler_det_callback": "ptl_straggler",
    "shared_utils": "",
    "shared_utils.inject_fault": "inject_fault",
    "shared_utils.job_metadata": "logs",
    "shared_utils.log_manager": "logs",
    "shared_utils.wait_daemon": "logs",
}
"""NVRx's modules, below its package, and ours below `trainer_sdk.nvrx`; empty for no names."""
_ELSEWHERE: Mapping[str, str] = {
    "attribution": "`everstep why` has verdicts, and the service attribution makes them",
    "attribution.mcp_integration": "`everstep mcp` is the MCP server",
    "attribution.postprocessing": "notifications and webhooks carry incidents to other systems",
    "attribution.restart_agent": "rendezvous decides about restarts, and attribution about causes: "
    "`everstep why`, and `everstep logs analyze` for a log alone",
    "attribution.straggler": "parts of `Detector`",
    "attribution.trace_analyzer": "`everstep fr analyze` reads dumps of the flight recorder",
    "checkpointing.local.replication": "parts of `GroupWrapper`",
    "fault_tolerance": "`everstep run` is the launcher, and its agent watches the ranks",
    "fault_tolerance.attribution_manager": "`everstep up` starts the service attribution",
    "fault_tolerance.control_plane": "`everstep up` starts the services",
    "fault_tolerance.cycle_info_writer": "rounds are in the record: `everstep facts`",
    "fault_tolerance.ft_rendezvous_barrier": "the service rendezvous forms rounds",
    "fault_tolerance.per_cycle_logs": "`everstep logs` has the lines of each rank and round",
    "fault_tolerance.progress_tracker": "`everstep run --no-progress-limit`",
    "fault_tolerance.segment_health_check": "the agent checks nodes: `everstep check`",
    "inprocess": "parts of `Wrapper`",
    "ptl_resiliency": "its names are in `ptl_resiliency`",
    "services": "the services of Everstep are started by `everstep up`",
    "shared_utils": "the agent checks nodes: `everstep check`; its log has what they find",
    "shared_utils.grpc_log_leaf_server": "`everstep logs` has the lines of all ranks",
    "shared_utils.grpc_log_server": "`everstep logs` has the lines of all ranks",
    "shared_utils.log_aggregator": "`everstep logs` has the lines of all ranks",
    "shared_utils.log_node_local_tmp": "`everstep logs` has the lines of all ranks",
    "shared_utils.memory": "the agent samples the memory of ranks and devices",
    "shared_utils.os_utils": "helpers of NVRx's own code",
    "shared_utils.profiling": "`everstep incidents show` has the times of each incident",
    "shared_utils.proto": "messages of Everstep are in its reference",
    "skills": "`everstep why` has verdicts, and `everstep mcp` the tools for assistants",
    "testing_utils": "`everstep inject` makes faults on purpose",
    "": "Everstep has no such part",
}
"""What to use instead of NVRx's other modules, by the beginning of their names."""


def stand_in(name: str) -> None:
    """Make a freshly imported package of NVRx's name ours; or the real one, if there is one."""
    real = installed()
    if real is not None and environ.get(layout.STAND_IN_VARIABLE) != "always":
        _report(real)
        module = module_from_spec(real)
        sys.modules[name] = module
        assert real.loader is not None, "a regular package has a loader"
        real.loader.exec_module(module)
        return
    module = sys.modules[name]
    module.__path__ = []
    module.__dict__["__version__"] = VERSION
    module.__dict__["__everstep__"] = True
    if not any(isinstance(finder, AliasFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, AliasFinder())


def installed() -> ModuleSpec | None:
    """The real NVRx, if it is installed."""
    places = [place for place in sys.path if os.path.abspath(place or ".") != FOLDER]
    for finder in sys.meta_path:
        if finder is PathFinder:
            spec = PathFinder.find_spec(PACKAGE, places)
        else:
            spec = finder.find_spec(PACKAGE, None, None)
        if spec is not None and spec.origin is not None and not spec.origin.startswith(FOLDER):
            return spec
    return None


def _report(real: ModuleSpec) -> None:
    """Say that NVRx itself is used: once on a node."""
    try:
        release = version("nvidia-resiliency-ext")
    except PackageNotFoundError:
        release = "of an unknown release"
    if environ.get("LOCAL_RANK", "0") == "0":
        warn_once(
            f"NVRx {release} is installed ({os.path.dirname(real.origin or '')}), and its own "
            "modules are used; `everstep run --replace-nvrx` uses those of Everstep"
        )


class AliasFinder(MetaPathFinder):
    """Finds NVRx's modules as copies of ours, and names the remedy for those that we lack."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module of this name; an error with the remedy for a module without counterpart."""
        del path, target
        package, _, rest = name.partition(".")
        if package != PACKAGE or not rest:
            return None
        if rest not in MODULES:
            raise ModuleNotFoundError(
                f"{PACKAGE}.{rest} has no counterpart in Everstep: {instead_of(rest)}", name=name
            )
        return ModuleSpec(name, _AliasLoader(MODULES[rest]), is_package=True)


def instead_of(module: str) -> str:
    """What to use instead of a module without counterpart, below NVRx's package."""
    begin = max(
        (begin for begin in _ELSEWHERE if f"{module}.".startswith(f"{begin}.") or not begin),
        key=len,
    )
    return _ELSEWHERE[begin]


class _AliasLoader(Loader):
    """Fills a module with the names of ours."""

    def __init__(self, ours: str) -> None:
        self._ours = ours

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """None: a module as usual."""

    def exec_module(self, module: ModuleType) -> None:
        """Copy the names."""
        module.__path__ = []
        if not self._ours:
            return
        ours = importlib.import_module(f"{_OURS}.{self._ours}")
        module.__doc__ = ours.__doc__
        for name, value in vars(ours).items():
            if not name.startswith("__"):
                module.__dict__[name] = value
        module.__dict__["__getattr__"] = lambda name: getattr(ours, name)
