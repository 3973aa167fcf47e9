"""Names of nodes, jobs and files. It imports no bus: `everstep check` runs without one."""

import re
import socket
from collections.abc import Mapping

from everstep.ids import name_of_host

_LONGEST = 128


def node_id(environ: Mapping[str, str]) -> str:
    """The node's id: Slurm's or Kubernetes' name for it, else the host name."""
    if environ.get("KUBERNETES_SERVICE_HOST") and environ.get("NODE_NAME"):
        return name_of_host(environ["NODE_NAME"])
    return safe_name(environ.get("SLURMD_NODENAME") or socket.gethostname(), "node")


def safe_name(text: str, otherwise: str) -> str:
    """The text, with `-` for characters that names of jobs, nodes and files must not have."""
    safe = re.sub(r"[^A-Za-z0-9_-]+", "-", text).strip("-_")[:_LONGEST]
    return safe or otherwise
