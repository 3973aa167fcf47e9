"""The network file systems that are mounted here, from a table: none of them is touched."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from everstep_services.agent.probes.base import Look

_NETWORK = frozenset(
    [
        *["9p", "afs", "beegfs", "ceph", "cifs", "glusterfs", "gpfs", "lustre", "nfs", "nfs4"],
        *["orangefs", "panfs", "pvfs2", "smb3", "virtiofs", "wekafs"],
    ]
)
_OCTAL = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True, slots=True)
class Mount:
    """A mounted file system."""

    path: Path
    kind: str
    has_become_read_only: bool
    """Mounted for writing, and read-only nevertheless: the kernel's answer to errors."""


def network_mounts(look: Look) -> tuple[Mount, ...]:
    """File systems whose servers are elsewhere; of several over one path, the topmost."""
    mounts: dict[Path, Mount] = {}
    for mount in _mounts(look.path("proc/self/mountinfo").read_text(errors="replace")):
        mounts.pop(mount.path, None)
        if is_network(mount.kind):
            mounts[mount.path] = mount
    return tuple(mounts.values())


def kind_of(path: Path, table: str) -> str:
    """The kind of the file system of a path; empty if the table does not show it."""
    there = [mount for mount in _mounts(table) if path.is_relative_to(mount.path)]
    return (
        there[max(range(len(there)), key=lambda at: (len(there[at].path.parts), at))].kind
        if there
        else ""
    )


def is_network(kind: str) -> bool:
    """Whether its servers are elsewhere."""
    return kind.removeprefix("fuse.") in _NETWORK


def _mounts(table: str) -> Iterator[Mount]:
    """Each line: ID parent device root PATH OPTIONS [more…] - KIND source SUPER-OPTIONS."""
    for line in table.splitlines():
        left, _, right = line.partition(" - ")
        before, after = left.split(), right.split()
        if len(before) < 6 or len(after) < 2:
            continue
        wanted, actual = before[5].split(","), after[-1].split(",")
        path = Path(_OCTAL.sub(lambda found: chr(int(found[1], 8)), before[4]))
        yield Mount(path, after[0], "rw" in wanted and "ro" in actual)
