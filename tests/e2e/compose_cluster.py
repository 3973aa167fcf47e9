"""The running containers of compose.yaml, as tests see them."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import httpx2
import pytest

ROOT = Path(__file__).parents[2]
ONE_SHOT = {"setup", "bus-init"}
AGENTS = {"agent-1", "agent-2"}
OURS = {
    *("history", "rendezvous", "health", "catalog", "straggler", "attribution", "logins"),
    *AGENTS,
}
LASTING = {"nats", "postgres", *OURS}

NEEDS_CLUSTER = [
    pytest.mark.compose,
    pytest.mark.timeout(180),
    pytest.mark.skipif(
        "EVERSTEP_TEST_COMPOSE" not in os.environ,
        reason="needs a container engine and the running cluster: `make test-compose` starts it",
    ),
]


@cache
def compose_program() -> tuple[str, ...]:
    """`docker compose`, or the older program of its own."""
    asked = subprocess.run(["docker", "compose", "version"], capture_output=True, check=False)
    if asked.returncode == 0:
        return ("docker", "compose")
    program = shutil.which("docker-compose")
    assert program is not None, "neither `docker compose` nor docker-compose is installed"
    return (program,)


def call(*command: str) -> str:
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
    return done.stdout


def compose(*arguments: str) -> str:
    return call(*compose_program(), *arguments)


def inspect(service: str) -> dict[str, Any]:
    """The engine's own description of a service's container."""
    listed = call(
        *["docker", "ps", "-aq", "--filter", f"label=com.docker.compose.service={service}"],
        *["--filter", f"label=com.docker.compose.project={project()}"],
        *["--filter", "label=com.docker.compose.oneoff=False"],
    )
    described: list[dict[str, Any]] = json.loads(call("docker", "inspect", *listed.split()))
    (container,) = described
    return container


def project() -> str:
    return os.environ.get("COMPOSE_PROJECT_NAME", ROOT.name)


def address(service: str, port: int) -> str:
    return compose("port", service, str(port)).strip()


def in_container(service: str, *command: str) -> str:
    return call("docker", "exec", inspect(service)["Id"], *command)


def first_token() -> str:
    """The one that history has made for itself."""
    return in_container("history", "cat", "token").strip()


@contextmanager
def opened_api() -> Iterator[httpx2.Client]:
    """REST, asked with the first token."""
    headers = {"Authorization": f"Bearer {first_token()}"}
    url = f"http://{address('history', 7070)}/api/v1"
    with httpx2.Client(base_url=url, headers=headers, timeout=10) as client:
        yield client


@contextmanager
def opened_pages() -> Iterator[httpx2.Client]:
    """The dashboard, logged in with the first token."""
    url = f"http://{address('history', 7070)}"
    with httpx2.Client(base_url=url, timeout=10, follow_redirects=True) as client:
        logged_in = client.post("/login", data={"token": first_token()}, headers={"Origin": url})
        logged_in.raise_for_status()
        yield client
