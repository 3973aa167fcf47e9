"""The commands of the guide for Kubernetes, in their order: real kubectl, an emulated API server.

Acceptance: A12.4. `make test-all` installs kubectl.
"""

import os
import shlex
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.processes import ROOT, environment
from tests.e2e.test_kubernetes_manifests import PROGRAMS
from tests.fakes.kubernetes_objects import EmulatedObjects
from tests.restricted_pods import pod_specs

pytestmark = [
    pytest.mark.variant,
    pytest.mark.skipif(
        not (PROGRAMS / "kubectl").exists(),
        reason="the dependency group `kubernetes` is not installed: see make test-all",
    ),
]
GUIDE = ROOT / "docs/guides/kubernetes.md"
NEEDS_MORE = {
    "helm install": "Helm's engine has tests of its own, and kustomize installs here",
    "exec everstep-history-0": "no pod runs behind an emulator",
    "everstep bus login": "no bus runs here; its file is written by the test",
}


@pytest.fixture
def server() -> Iterator[EmulatedObjects]:
    server = EmulatedObjects()
    with server.running():
        yield server


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where a person stands: a checkout, and files of their own."""
    (tmp_path / "deploy").symlink_to(ROOT / "deploy")
    (tmp_path / "bus.creds").write_text("a login")
    return tmp_path


def commands() -> list[str]:
    lines = GUIDE.read_text(encoding="utf-8").splitlines()
    told = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    return [line for line in told if not any(word in line for word in NEEDS_MORE)]


def run(folder: Path, server: EmulatedObjects, command: str) -> None:
    program, *words = shlex.split(command)
    if program != "kubectl":
        done(folder, program, *words)
    elif "secret" in words:  # kubectl would send it as protobuf, which the emulator cannot read
        made = done(folder, program, *words, "--dry-run=client", "-o", "json")
        (folder / "secret.json").write_text(made)
        run(folder, server, "kubectl apply -f secret.json")
    else:
        more = ["--validate=false"] if "apply" in words else []  # it has no schemas
        done(folder, program, f"--server={server.url}", *words, *more)


def done(folder: Path, *words: str) -> str:
    """What a command prints, once it has succeeded."""
    environ = {**environment(folder, folder.name), "PATH": f"{PROGRAMS}:{os.environ['PATH']}"}
    ended = subprocess.run(
        words, cwd=folder, env=environ, text=True, capture_output=True, check=False, timeout=120
    )
    assert ended.returncode == 0, f"{words}: {ended.stderr}"
    return ended.stdout


def test_the_commands_of_the_guide_make_a_complete_cluster(
    folder: Path, server: EmulatedObjects
) -> None:
    """In the order of the page, nothing that a pod mounts or runs as is missing."""
    told = commands()
    assert sum(line.startswith("kubectl") for line in told) >= 9
    for command in told:
        if "delete pod" in command:
            name = shlex.split(command)[-1]
            server.objects["Pod", "training", name] = {"kind": "Pod", "metadata": {"name": name}}
        run(folder, server, command)
    assert server.of_kind("Pod") == []
    pods = [
        (each["metadata"]["namespace"], pod)
        for each in [each for kind in ("StatefulSet", "Deployment", "Job")
                     for each in server.of_kind(kind)]
        for pod in pod_specs(each)
    ]  # fmt: skip
    assert len(pods) >= 3
    for namespace, pod in pods:
        assert missing(server, namespace, pod) == []


def missing(server: EmulatedObjects, namespace: str, pod: Mapping[str, Any]) -> list[str]:
    """What the kubelet would wait for in vain, besides claims."""
    account = pod["serviceAccountName"]
    absent = []
    if server.get("ServiceAccount", namespace, account) is None:
        absent.append(f"account {account}")
    for volume in pod.get("volumes", []):
        for kind, source, key in (
            ("Secret", volume.get("secret"), "secretName"),
            ("ConfigMap", volume.get("configMap"), "name"),
        ):
            if source is None or source.get("optional"):
                continue
            found = server.get(kind, namespace, source[key])
            wanted = {item["key"] for item in source.get("items", [])}
            if found is None or wanted - found.get("data", {}).keys():
                absent.append(f"{kind} {source[key]} {sorted(wanted)}")
    return absent


def test_what_is_missing_would_be_found(server: EmulatedObjects, folder: Path) -> None:
    """Without the step that makes the secrets the cluster is not complete."""
    for command in commands():
        if "create secret" not in command and "delete pod" not in command:
            run(folder, server, command)
    (job,) = server.of_kind("Job")
    (pod,) = pod_specs(job)
    assert missing(server, "training", pod) == ["Secret everstep-bus-llama ['bus.creds']"]


def test_kubectl_applies_the_example_of_a_job(server: EmulatedObjects, folder: Path) -> None:
    for name in ("namespace", "job"):
        run(folder, server, f"kubectl apply -f deploy/kubernetes/training/{name}.yaml")
    assert [each["metadata"]["name"] for each in server.of_kind("Job")] == ["toy"]
    with pytest.raises(AssertionError, match="no matches for kind"):
        run(folder, server, "kubectl apply -f deploy/kubernetes/training/jobset.yaml")
