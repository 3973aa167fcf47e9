"""The interface of a check: it looks at this node and reports results."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from everstep.messages import CheckResult
from everstep_services.agent.probes.settings import ChecksSettings

CheckState = Literal["ok", "unsupported", "unknown", "warning", "failed"]
"""The states of a part, as in `CheckResult.state`, from the best to the worst: an unknown state is
better than a known bad one.
"""

FailureClass = Literal["", "reset", "reboot", "replace", "drain", "watch", "report"]
"""What would help, as in `CheckResult.failure_class`."""


@dataclass(frozen=True, slots=True)
class Look:
    """The input of a check."""

    settings: ChecksSettings
    root: Path = Path("/")
    """The root of `/sys`, `/proc` and `/dev`; another folder in tests."""
    memory: dict[str, Any] = field(default_factory=dict)
    """The check's own notes, which it finds again at the next look on this node, also from another
    process. Plain JSON.
    """
    at: float = 0.0
    """The wall clock, for notes."""
    within_s: float = 10.0
    """How long the check may take before its result counts as `unknown`."""
    own_pids: frozenset[int] = frozenset()
    """Processes of this job: what they hold is not held by strangers."""

    def path(self, *parts: str) -> Path:
        """A path below the root: `path("sys/class/infiniband")`."""
        return self.root.joinpath(*(part.lstrip("/") for part in parts))


def finding(
    check: str,
    subject: str,
    state: CheckState = "ok",
    reason: str = "",
    failure_class: FailureClass = "",
    code: str = "",
) -> CheckResult:
    """The result of a check for one part of the node."""
    return CheckResult(
        check=check, subject=subject, state=state, reason=reason,
        failure_class=failure_class, code=code,
    )  # fmt: skip


class Probe(Protocol):
    """A check. It may block: each runs in a thread of a child process that can be abandoned."""

    name: str
    """The name, as in `everstep check <name>`."""
    about: str
    """One line for the help page."""
    beside_training: bool
    """The check takes nothing away from ranks, and may run while they train."""

    def examine(self, look: Look) -> Iterable[CheckResult]:
        """One result for each part of the node, also for `ok` ones.

        A part that the node lacks is `unsupported`, a part that cannot be read is `unknown`. A
        generator keeps the results so far even if it is ended early.
        """
