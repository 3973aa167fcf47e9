"""Manifests and chart with the real kubectl, kustomize and Helm engine, and published schemas.

Acceptance: A12.4. No cluster is needed; `make test-all` installs the programs.
"""

import importlib
import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.restricted_pods import complaints, pod_specs
from tools.render_chart import CHART, main, rendered

ROOT = Path(__file__).parents[2]
KUBERNETES = ROOT / "deploy/kubernetes"
OVERLAYS = ("bus-inside", "bus-outside", "small")
PROGRAMS = Path(sys.executable).parent
NEEDED = ("helm_python", "kubernetes_validate", "kubeflow_trainer_api")
VERSIONS = ("1.29", "1.33", "1.37")

pytestmark = [
    pytest.mark.variant,
    pytest.mark.skipif(
        not all(map(importlib.util.find_spec, NEEDED)) or not (PROGRAMS / "kubectl").exists(),
        reason="the dependency group `kubernetes` is not installed: see make test-all",
    ),
]


def run(program: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = [str(PROGRAMS / program), *words]
    return subprocess.run(command, text=True, capture_output=True, check=False, timeout=200)


def kustomized(overlay: str) -> str:
    done = run("kubectl", "kustomize", str(KUBERNETES / "overlays" / overlay))
    assert done.returncode == 0, done.stderr
    return done.stdout


def validate(path: Path, version: str) -> None:
    done = run("kubernetes-validate", "--strict", "--no-warn", "-k", version, str(path))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_overlays_build_and_are_valid(tmp_path: Path, overlay: str, version: str) -> None:
    file = tmp_path / "all.yaml"
    file.write_text(kustomized(overlay))
    validate(file, version)


@pytest.mark.parametrize("version", VERSIONS)
def test_the_example_of_a_job_is_valid(version: str) -> None:
    validate(KUBERNETES / "training/job.yaml", version)


def test_a_misspelt_field_would_be_found(tmp_path: Path) -> None:
    text = (KUBERNETES / "training/job.yaml").read_text()
    file = tmp_path / "job.yaml"
    file.write_text(text.replace("podFailurePolicy", "podFailurePolizy"))
    assert run("kubernetes-validate", "--strict", str(file)).returncode != 0


def test_a_job_set_has_only_fields_that_job_set_knows() -> None:
    """The models are generated from JobSet's published schema: unknown fields would get lost."""
    module = importlib.import_module("kubeflow_trainer_api.models.jobset_v1alpha2_job_set")
    documents = list(yaml.safe_load_all((KUBERNETES / "training/jobset.yaml").read_text()))
    (job_set,) = [each for each in documents if each["kind"] == "JobSet"]
    model = module.JobsetV1alpha2JobSet.from_dict(job_set)
    assert model.to_dict() == job_set
    job_set["spec"]["failurePolicy"]["maxRestart"] = 1
    assert module.JobsetV1alpha2JobSet.from_dict(job_set).to_dict() != job_set


def test_the_bus_outside_leaves_nothing_of_the_bus_inside() -> None:
    text = kustomized("bus-outside")
    names = [each["metadata"]["name"] for each in yaml.safe_load_all(text)]
    assert not [name for name in names if "bus" in name]
    assert "everstep-bus" not in text


def test_the_base_is_what_the_chart_renders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["render_chart", "--check"])
    assert main() == 0


def test_the_chart_has_no_complaints() -> None:
    report = importlib.import_module("helm_python").lint(CHART, strict=True)
    assert report["errors"] == []


SETS: list[dict[str, Any]] = [
    {},
    {"bus": {"url": "tls://nats.example:4222", "caSecret": "ca"}},
    {"bus": {"servers": 1, "copies": 1}},
    {"nodeWatcher": {"enabled": False}, "networkPolicy": {"enabled": False}},
    {"nodeWatcher": {"marks": "taint", "nodeSelector": "pool=gpu"}},
    {"catalogVolumes": [{"claim": "checkpoints", "path": "/checkpoints"}]},
    {
        "history": {
            "replicas": 2,
            "databaseUrl": "postgresql://everstep@db.example/everstep",
            "databaseSecret": "database",
        }
    },
    {"tolerations": [{"operator": "Exists"}], "nodeSelector": {"a": "b"}, "priorityClassName": "p"},
]


@pytest.mark.parametrize("values", SETS, ids=range(len(SETS)))
def test_all_values_give_valid_and_restricted_pods(tmp_path: Path, values: dict[str, Any]) -> None:
    text = "\n---\n".join(rendered(values).values())
    file = tmp_path / "chart.yaml"
    file.write_text(text)
    validate(file, "1.33")
    for manifest in yaml.safe_load_all(text):
        for pod in pod_specs(manifest or {"kind": ""}):
            assert complaints(pod) == []


def test_the_right_to_patch_nodes_comes_with_marks_only() -> None:
    for marks, verbs in (("observe", ["get", "list", "watch"]), ("cordon", ["patch"])):
        text = rendered({"nodeWatcher": {"marks": marks}})["node-watcher.yaml"]
        (role,) = [each for each in yaml.safe_load_all(text) if each["kind"] == "ClusterRole"]
        assert role["rules"][0]["verbs"][-len(verbs) :] == verbs


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"history": {"replicas": 2}}, "several replicas cannot share SQLite"),
        ({"bus": {"copies": 5}}, "a stream has at most one copy on each server"),
        ({"nodeWacher": {}}, "nodeWacher"),
        ({"bus": {"url": "nats://user:password@bus"}}, "url"),
        ({"history": {"databaseUrl": "postgresql://u:password@db/x"}}, "databaseUrl"),
        ({"history": {"databaseUrl": "postgresql://u@db/x?password=secret"}}, "databaseUrl"),
        ({"history": {"databaseUrl": "sqlite:////tmp/history.db"}}, "databaseUrl"),
        ({"bus": {"memory": "5"}}, "memory"),
        ({"history": {"cpu": "1Gi"}}, "cpu"),
        ({"services": {"rendezvous": {"replicas": 0, "cpu": "1", "memory": "1Gi"}}}, "replicas"),
        ({"image": {"tag": '1"\n          privileged: true'}}, "tag"),
        ({"storageClass": "fast\n  x: y"}, "storageClass"),
        ({"serviceSecret": "a: b"}, "serviceSecret"),
        ({"catalogVolumes": [{"claim": "c", "path": "/var/lib/everstep"}]}, "path"),
        ({"user": 0}, "user"),
        ({"nodeWatcher": {"marks": "delete"}}, "marks"),
    ],
)
def test_wrong_values_are_refused(values: dict[str, Any], text: str) -> None:
    helm = importlib.import_module("helm_python")
    with pytest.raises(helm.HelmError, match=text):
        rendered(values)


@pytest.mark.parametrize("name", ["a" * 40, "team.everstep"])
def test_a_release_name_that_makes_no_names_of_services_is_refused(name: str) -> None:
    helm = importlib.import_module("helm_python")
    with pytest.raises(helm.HelmError, match="at most 39 characters and no dots"):
        rendered(name=name)
    assert rendered(name="a" * 39)


@pytest.mark.parametrize("servers", [1, 3])
def test_nats_accepts_its_configuration(tmp_path: Path, servers: int) -> None:
    """A real nats-server reads the configuration with that of `everstep bus setup`."""
    values = {"bus": {"servers": servers, "copies": servers}}
    (config,) = [
        each
        for each in yaml.safe_load_all(rendered(values)["bus.yaml"])
        if each["kind"] == "ConfigMap"
    ]
    for name in ("config", "secret"):
        (tmp_path / name).mkdir()
    (tmp_path / "config/nats.conf").write_text(config["data"]["nats.conf"])
    everstep = run(
        "everstep", "bus", "setup", "--keys", str(tmp_path / "keys"),
        "--write", str(tmp_path / "secret/nats.json"), "--store", str(tmp_path / "data"),
        "--monitor", "0.0.0.0:8222",
    )  # fmt: skip
    assert everstep.returncode == 0, everstep.stderr
    server = shutil.which("nats-server", path=str(PROGRAMS)) or shutil.which("nats-server")
    assert server is not None
    done = subprocess.run(
        [server, "-t", "--config", str(tmp_path / "config/nats.conf")],
        env={"POD_NAME": "everstep-bus-0"}, text=True, capture_output=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
