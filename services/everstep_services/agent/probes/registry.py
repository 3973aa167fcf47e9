"""The table of all checks; the module of a check is imported only when it is needed."""

import difflib
import importlib
import shlex
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from everstep.errors import EverstepError
from everstep.messages import CheckResult
from everstep_services.agent.probes.base import CheckState, Look, Probe
from everstep_services.agent.probes.program import Program
from everstep_services.agent.probes.settings import SITE_NAME, ChecksSettings

_STATES: Mapping[int, CheckState] = {0: "ok", 1: "warning", 2: "failed", 3: "unknown"}
_MARGIN_S = 0.2


def site_commands(settings: ChecksSettings) -> dict[str, tuple[str, ...]]:
    """Each check of the site by its name, with its command line; a named one wins.

    Files whose names have other characters (`x~`, `.x`) are skipped, as by run-parts.
    """
    commands: dict[str, tuple[str, ...]] = {}
    folder = settings.site_dir
    if folder is not None:
        commands |= {path.name: (str(path),) for path in folder.iterdir() if _is_check(path.name)}
    return commands | {name: tuple(shlex.split(line)) for name, line in settings.site.items()}


@dataclass(slots=True)
class SiteProbe:
    """A check of the site. The first line that it prints is the reason."""

    name: str
    command: Sequence[str]
    about: str = "a check of this site"
    beside_training: bool = True

    def examine(self, look: Look) -> list[CheckResult]:
        """One result, from its exit code; a code that Nagios does not know is `unknown`."""
        limit_s = look.settings.within_s
        program = self.command[0]
        try:
            ran = Program.start(self.command).wait(time.monotonic() + limit_s - _MARGIN_S)
        except OSError as error:
            why = f"{program} cannot be started: {error.strerror}; is it there, and executable?"
            return [self._said("unknown", why)]
        if ran.code is None:
            return [self._said("unknown", f"{program} did not end within {limit_s:g} s")]
        state = _STATES.get(ran.code, "unknown")
        if ran.code in _STATES and (ran.first_line or state == "ok"):
            return [self._said(state, ran.first_line)]
        return [self._said(state, f"{program} ended with code {ran.code}. {ran.first_line}")]

    def _said(self, state: CheckState, reason: str) -> CheckResult:
        return CheckResult(check=self.name, state=state, reason=reason.strip())


def _is_check(name: str) -> bool:
    return SITE_NAME.fullmatch(name) is not None


SITE = "site"
"""Stands for all checks of the site."""

_PACKAGE = "everstep_services.agent.probes"
_PLACES = {
    "daemon": "daemon:DaemonProbe",
    "gpu": "gpu.probe:GpuProbe",
    "gpu-selftest": "gpu.selftest:GpuSelfTestProbe",
    "host": "host.probe:HostProbe",
    "kernel": "kernel.log:KernelLogProbe",
    "nic": "network.nic:NicProbe",
    "nvlink": "gpu.nvlink:NvlinkProbe",
    "ptrace": "host.ptrace:PtraceProbe",
    "recorder": "host.flight_recorder:RecorderProbe",
    "storage": "storage.probe:StorageProbe",
}
_STORAGE_SAYS_WITHIN_S = 2.0
_TAKE_FROM_RANKS = frozenset({"gpu-selftest"})


class UnknownCheckError(EverstepError):
    """There is not a check of this name."""


def all_names(settings: ChecksSettings) -> tuple[str, ...]:
    """The names of all checks of this node; `site` stands for those of the site."""
    own = (SITE,) if settings.site or settings.site_dir is not None else ()
    return (*_PLACES, *own)


def beside_training(settings: ChecksSettings) -> tuple[str, ...]:
    """The checks that may run while ranks train; `daemon` only where there is one."""
    left_out = _TAKE_FROM_RANKS if settings.daemon is not None else _TAKE_FROM_RANKS | {"daemon"}
    return tuple(name for name in all_names(settings) if name not in left_out)


def chosen(names: Iterable[str], settings: ChecksSettings) -> tuple[str, ...]:
    """These checks, each once. Raises `UnknownCheckError`; `site:<name>` is looked up later."""
    names_known = all_names(settings)
    wanted = tuple(dict.fromkeys(names))
    for name in wanted:
        if name not in names_known and not name.startswith(f"{SITE}:"):
            near = difflib.get_close_matches(name, names_known, n=1)
            hint = f"did you mean {near[0]}?" if near else "see everstep check --list"
            raise UnknownCheckError(f"{name!r} is not a check; {hint}")
    return wanted


def site_probes(settings: ChecksSettings) -> list[SiteProbe]:
    """The checks of the site. Reads its folder: raises OSError."""
    return [
        SiteProbe(f"{SITE}:{name}", command)
        for name, command in sorted(site_commands(settings).items())
    ]


def find(name: str, settings: ChecksSettings) -> Probe:
    """The check of this name. Imports its module, and raises what that import raises."""
    if name in _PLACES:
        module, _, attribute = _PLACES[name].partition(":")
        probe: Probe = getattr(importlib.import_module(f"{_PACKAGE}.{module}"), attribute)()
        return probe
    for site_probe in site_probes(settings):
        if site_probe.name == name:
            return site_probe
    raise UnknownCheckError(f"{name!r} is not a check; see everstep check --list")


def deadline_s(name: str, settings: ChecksSettings) -> float:
    """How long a check may take."""
    match name:
        case "gpu-selftest":
            return settings.selftest_within_s
        case "daemon":
            return settings.daemon_within_s
        case "storage":  # it reports by itself what hangs, and needs the time to do so
            return settings.storage_within_s + _STORAGE_SAYS_WITHIN_S
        case _:
            return settings.within_s
