"""What people do with the command line."""

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.e2e.cluster import Cluster
from tests.e2e.control_planes import ControlPlane
from tests.e2e.processes import environment, python
from tests.waiting import WITHIN_S


def command(environ: Mapping[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        python("-m", "everstep_services.cli", *arguments),
        env=dict(environ),
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
        check=False,
    )


def ask(cluster: Cluster, *arguments: str) -> dict[str, Any]:
    """As somebody who knows the API and has a token."""
    plane, folder = cluster.plane, cluster.folder
    done = command(operator(plane, folder), *arguments, "--api", plane.api, "-o", "json")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def operator(plane: ControlPlane, folder: Path) -> dict[str, str]:
    token = folder / "operator.token"
    token.touch(0o600)
    token.write_text(plane.token)
    return environment(
        folder,
        "operator",
        EVERSTEP_STATE_DIR=str(folder / "nothing-here"),
        EVERSTEP_CLIENT__TOKEN_FILE=str(token),
    )
