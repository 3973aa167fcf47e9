"""What is in deploy/kubernetes, as text: rights, secrets, probes, examples.

Acceptance: A12.4. The real kubectl, Helm and schemas are in tests/e2e/test_kubernetes_manifests.py.
"""

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from everstep import __version__
from everstep_services.cli.group import everstep
from everstep_services.cli.settings_sections import section_class
from tests.restricted_pods import complaints, pod_specs

ROOT = Path(__file__).parents[3]
KUBERNETES = ROOT / "deploy/kubernetes"
FILES = sorted(path for path in KUBERNETES.rglob("*.yaml") if path.name != "kustomization.yaml")
TOY = f"everstep kubernetes job --job toy --namespace training --image registry.example/everstep-agent:{__version__} --cpu 1 --memory 2Gi --shared-memory 1Gi --disk 2Gi --volume checkpoints:/checkpoints --grace 60"  # noqa: E501
RUN = "--nnodes 2 --spares 1 -m everstep_services.cli.demonstration.train /checkpoints 1000000 0.1"
RACKS = "--kind jobset --pods-per-rack 3 --rack-label example.com/rack"


def objects(*paths: Path) -> Iterator[dict[str, Any]]:
    for path in paths:
        for document in yaml.safe_load_all(path.read_text()):
            if document:
                yield document


ALL = list(objects(*FILES))
PODS = [(each["metadata"]["name"], each["kind"], pod) for each in ALL for pod in pod_specs(each)]


@pytest.mark.parametrize(("name", "kind", "pod"), PODS, ids=[f"{n}-{k}" for n, k, _ in PODS])
def test_every_pod_passes_the_restricted_profile(name: str, kind: str, pod: Any) -> None:
    """No root, no privilege, no writable root, no secret in the environment (A12.4)."""
    assert complaints(pod) == []


@pytest.mark.parametrize("options", ["", RACKS], ids=["job", "jobset"])
def test_the_examples_are_what_the_command_writes(options: str) -> None:
    words = shlex.split(f"{TOY} {options} -- {RUN}")[1:]
    done = CliRunner().invoke(everstep, words)
    assert done.exit_code == 0, done.output
    path = KUBERNETES / "training" / ("jobset.yaml" if options else "job.yaml")
    assert path.read_text() == done.output


def test_the_guide_writes_a_manifest_and_names_files_that_exist() -> None:
    guide = (ROOT / "docs/guides/kubernetes.md").read_text()
    commands = [line.removeprefix("$ ") for line in guide.splitlines() if line.startswith("$ ")]
    (written,) = [line for line in commands if line.startswith("everstep kubernetes job")]
    words = shlex.split(written.replace("--write llama.yaml ", ""))[1:]
    done = CliRunner().invoke(everstep, words)
    assert done.exit_code == 0, done.output
    (job,) = [each for each in yaml.safe_load_all(done.output) if each["kind"] == "Job"]
    assert job["spec"]["completions"] == 5
    for command in commands:
        for word in shlex.split(command):
            if word.startswith("deploy/"):
                assert (ROOT / word).exists(), word


def test_only_the_node_watcher_has_rights_and_only_to_read_nodes() -> None:
    """Least rights: no wildcard, no secret, no cluster-admin (A12.4)."""
    roles = [each for each in ALL if each["kind"] in {"Role", "ClusterRole"}]
    assert [role["rules"] for role in roles] == [
        [{"apiGroups": [""], "resources": ["nodes"], "verbs": ["get", "list", "watch"]}]
    ]
    with_token = [name for name, _, pod in PODS if pod["automountServiceAccountToken"]]
    assert with_token == ["everstep-node-watcher"]
    assert not [each for each in ALL if each["kind"] == "CustomResourceDefinition"]


def test_probes_ask_what_is_served_and_without_the_bus_nobody_is_restarted() -> None:
    for _, kind, pod in PODS:
        for container in pod["containers"] if kind == "StatefulSet" else []:
            live = container["livenessProbe"]["httpGet"]["path"]
            ready = container["readinessProbe"]
            assert live in {"/livez", "/healthz?js-enabled-only=true"}
            if container["name"] == "history":
                assert ready["tcpSocket"] == {"port": "api"}, "REST answers without the bus"
            else:
                assert ready["httpGet"]["path"].startswith("/healthz")
            names = {port["name"] for port in container["ports"]}
            assert {container["livenessProbe"]["httpGet"]["port"]} <= names


def test_every_setting_in_an_environment_exists() -> None:
    for _, _, pod in PODS:
        for container in pod["containers"]:
            for variable in container["env"]:
                prefix, _, key = variable["name"].partition("__")
                if key:
                    section = section_class(prefix.removeprefix("EVERSTEP_").lower())
                    assert key.lower() in section.__struct_fields__, variable["name"]


def test_every_selector_has_its_pods_and_every_account_exists() -> None:
    labels = [
        template["metadata"]["labels"]
        for each in ALL
        if (template := each["spec"].get("template") if "spec" in each else None)
    ]
    for each in ALL:
        if each["kind"] == "Service" and each["metadata"]["name"] != "toy":
            selector = each["spec"]["selector"]
            assert any(selector.items() <= each_labels.items() for each_labels in labels)
    accounts = {each["metadata"]["name"] for each in ALL if each["kind"] == "ServiceAccount"}
    assert {pod["serviceAccountName"] for _, _, pod in PODS} <= accounts


def test_pods_have_more_time_to_end_than_their_hooks_take() -> None:
    for _, _, pod in PODS:
        assert pod["terminationGracePeriodSeconds"] >= 30
