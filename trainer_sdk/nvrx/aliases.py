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
    "attribution.straggler.reporting": "straggler",
    "attribution.straggler.statistics": "straggler",
    "attribution.straggler.straggler": "straggler",
    "checkpointing": "",
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
    "ptl_resiliency": "ptl_resiliency",
    "ptl_resiliency.fault_tolerance_callback": "ptl_resiliency",
    "ptl_resiliency.fault_tolerance_sections_callback": "ptl_resiliency",
    "ptl_resiliency.local_checkpoint_callback": "ptl_checkpoints",
    "ptl_resiliency.straggler_det_callback": "ptl_resiliency",
    "shared_utils": "",
    "shared_utils.inject_fault": "inject_fault",
    "shared_utils.job_metadata": "logs",
    "shared_utils.log_manager": "logs",
    "shared_utils.wait_daemon": "logs",
}
"""NVRx's modules, below its package, and ours below `trainer_sdk.nvrx`; empty for no names."""
_ELSEWHERE: Mapping[str, str] = {
    "attribution.trace_analyzer": "`everstep fr analyze` reads dumps of the flight recorder",
    "attribution": "`everstep why` has verdicts, and the service attribution makes them",
    "fault_tolerance": "`everstep run` is the launcher, and its agent watches the ranks",
    "inprocess": "a failed rank is restarted in its job, from a process that has imported torch; "
    "drop the wrapper",
    "services": "the services of Everstep are started by `everstep up`",
    "shared_utils": "the agent checks nodes: `everstep check`; its log has what they find",
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
        self,
        name: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        """The module of this name; an error with the remedy for a module without counterpart."""
        del path, target
        package, _, rest = name.partition(".")
        if package != PACKAGE or not rest:
            return None
        if rest not in MODULES:
            raise ModuleNotFoundError(_remedy(rest), name=name)
        return ModuleSpec(name, _AliasLoader(MODULES[rest]), is_package=True)


def _remedy(rest: str) -> str:
    begin = max(
        (begin for begin in _ELSEWHERE if f"{rest}.".startswith(f"{begin}.") or not begin), key=len
    )
    return f"{PACKAGE}.{rest} has no counterpart in Everstep: {_ELSEWHERE[begin]}"


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
