"""The folder on a disk of this node in which states are kept; checked before anything starts."""

import logging
import os
from pathlib import Path

from everstep.errors import EverstepError
from everstep_services.agent.probes.storage.mounts import is_network, kind_of

log = logging.getLogger(__name__)

_IN_MEMORY = frozenset(["tmpfs", "ramfs", "hugetlbfs"])
_MOUNTS = Path("/proc/self/mountinfo")


class LocalRootError(EverstepError):
    """States cannot be kept in this folder."""

    def __init__(self, root: Path, problem: str) -> None:
        super().__init__(f"local_root {root}: {problem}")


def check_local_root(root: Path, mounts: Path = _MOUNTS) -> None:
    """Raise `LocalRootError`, one line, if states cannot be kept there."""
    if not root.is_dir():
        problem = "is not a folder" if root.exists() else "there is no such folder"
        raise LocalRootError(root, f"{problem}: make it, or mount the disk, on each node")
    try:
        kind = kind_of(root.resolve(), mounts.read_text(errors="replace"))
    except OSError:
        kind = ""
    if is_network(kind):
        raise LocalRootError(
            root, f"it is in {kind}, a network file system: give a folder on a disk of the node"
        )
    if not os.access(root, os.W_OK | os.X_OK):
        raise LocalRootError(root, f"user {os.getuid()} may not write there: change its mode")
    if kind in _IN_MEMORY:
        log.warning("local_root_in_memory root=%s kind=%s", root, kind)
