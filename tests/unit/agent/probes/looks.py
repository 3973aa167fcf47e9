"""A host made of files, for checks that read one."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from everstep.messages import CheckResult
from everstep_services.agent.probes.base import Look
from everstep_services.agent.probes.settings import ChecksSettings

BOOT = "proc/sys/kernel/random/boot_id"


def look_at(
    root: Path,
    files: dict[str, str],
    *,
    memory: dict[str, Any] | None = None,
    own_pids: Iterable[int] = (),
    **settings: Any,
) -> Look:
    """A look at these files; with the memory of an earlier one it is the next look."""
    for name, text in {BOOT: "boot-1\n", **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Look(
        settings=ChecksSettings(**settings),
        root=root,
        memory={} if memory is None else memory,
        own_pids=frozenset(own_pids),
    )


def states(results: Iterable[CheckResult]) -> dict[str, str]:
    return {one.subject: one.state for one in results}
