"""Checks of the site: any executable with the exit codes of Nagios."""

import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass

from everstep.messages import CheckResult
from everstep_services.agent.probes.base import Look
from everstep_services.agent.probes.program import Program
from everstep_services.agent.probes.settings import SITE_NAME, ChecksSettings

_STATES = {0: "ok", 1: "warning", 2: "failed", 3: "unknown"}
_MARGIN_S = 0.2


def site_commands(settings: ChecksSettings) -> dict[str, tuple[str, ...]]:
    """Each check of the site by its name, with its command line; a named one wins.

    Files whose names have other characters (`x~`, `.x`) are skipped, as by run-parts.
    """
    found: dict[str, tuple[str, ...]] = {}
    folder = settings.site_dir
    if folder is not None:
        found |= {path.name: (str(path),) for path in folder.iterdir() if _is_check(path.name)}
    return found | {name: tuple(shlex.split(line)) for name, line in settings.site.items()}


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

    def _said(self, state: str, reason: str) -> CheckResult:
        return CheckResult(check=self.name, state=state, reason=reason.strip())


def _is_check(name: str) -> bool:
    return SITE_NAME.fullmatch(name) is not None
