"""What a check is: something that looks at this node and says what it found."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from everstep.messages import CheckResult
from everstep_services.agent.probes.settings import ChecksSettings


@dataclass(frozen=True, slots=True)
class Look:
    """What a check is given."""

    settings: ChecksSettings
    root: Path = Path("/")
    """Where `/sys`, `/proc` and `/dev` are looked for; another folder in tests."""
    memory: dict[str, Any] = field(default_factory=dict)
    """Its own notes: what it leaves here it finds at the next look on this node, also from
    another process. Plain JSON."""
    at: float = 0.0
    """The wall clock, for notes."""
    own_pids: frozenset[int] = frozenset()
    """Processes of this job: what they hold is not held by strangers."""

    def path(self, *parts: str) -> Path:
        """A path below the root: `path("sys/class/infiniband")`."""
        return self.root.joinpath(*(part.lstrip("/") for part in parts))


class Probe(Protocol):
    """A check. It may block: each runs in a thread of a child process that can be abandoned."""

    name: str
    """As in `everstep check <name>`."""
    about: str
    """One line for the help page."""
    beside_training: bool
    """It takes nothing away from ranks, and may run while they train."""

    def examine(self, look: Look) -> Iterable[CheckResult]:
        """What it found: one result for each part of the node, `ok` ones too.

        What the node does not have is `unsupported`, what could not be read is `unknown`. A
        generator tells what it has found so far even when it does not come to its end.
        """
        ...
