"""What this node is called, and how other names become those that everything may carry."""

import re
import socket
from collections.abc import Mapping

_LONGEST = 128


def node_id(environ: Mapping[str, str]) -> str:
    """The node's id: Slurm's name for it, else the host name."""
    return safe_name(environ.get("SLURMD_NODENAME") or socket.gethostname(), "node")


def safe_name(text: str, otherwise: str) -> str:
    """The text, with what no job, node or file may be called replaced by `-`."""
    safe = re.sub(r"[^A-Za-z0-9_-]+", "-", text).strip("-_")[:_LONGEST]
    return safe or otherwise
