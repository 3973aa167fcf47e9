"""A real Prometheus scrapes the services, loads the rules, and finds every metric that is used."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
import yaml

from tests.e2e.cluster import Cluster
from tests.e2e.control_planes import Up
from tests.e2e.ports import free_port
from tests.e2e.processes import Process, environment
from tests.unit.deploy.test_monitoring import METRIC, RULES, alerts, expressions
from tests.waiting import until

PROMETHEUS = shutil.which("prometheus")
pytestmark = pytest.mark.skipif(PROMETHEUS is None, reason="there is no prometheus (Debian has it)")


@pytest.fixture
def prometheus(shared_up: Up, tmp_path: Path) -> Iterator[httpx2.Client]:
    """One that scrapes `everstep up` as deploy/prometheus/prometheus.yaml does its containers."""
    assert PROMETHEUS is not None
    config = yaml.safe_load((RULES.parent / "prometheus.yaml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(RULES)]
    [scrape] = config["scrape_configs"]
    target = shared_up.running.observe.removeprefix("http://")
    scrape["static_configs"] = [{"targets": [target]}]
    file = tmp_path / "prometheus.yaml"
    file.write_text(yaml.safe_dump(config))
    port = free_port()
    command = [
        PROMETHEUS, f"--config.file={file}", f"--storage.tsdb.path={tmp_path / 'tsdb'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]  # fmt: skip
    process = Process(command, environment(tmp_path, "prometheus"), tmp_path / "prometheus.log")
    try:
        with httpx2.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:
            until(
                lambda: client.get("/-/ready").status_code, "Prometheus is ready",
                holds=lambda status: status == 200, despite=httpx2.HTTPError,
            )  # fmt: skip
            yield client
    finally:
        process.kill()


def told(prometheus: httpx2.Client, path: str, **asked: str) -> Any:
    answer = prometheus.get(f"/api/v1/{path}", params=asked)
    answer.raise_for_status()
    return answer.json()["data"]


def test_a_real_prometheus_finds_every_metric_of_rules_and_boards(
    prometheus: httpx2.Client, cluster: Cluster
) -> None:
    """A11.5: what a rule or a board names is scraped from running services, under its name."""
    cluster.steady()
    cluster.until_stepping(1)
    named = {name for expression in expressions() for name, _ in METRIC.findall(expression)}

    def unseen() -> set[str]:
        seen = set(told(prometheus, "metadata"))
        return {
            name for name in named if name not in seen and name.removesuffix("_total") not in seen
        }

    until(lambda: unseen() or {"none"}, "all are there", holds=lambda left: left == {"none"})
    running = f'everstep_job_info{{job="{cluster.job}"}}'
    until(
        lambda: told(prometheus, "query", query=running)["result"], "the job has its own label",
    )  # fmt: skip
    groups = told(prometheus, "rules")["groups"]
    loaded = {rule["name"] for group in groups for rule in group["rules"]}
    assert loaded == {rule["alert"] for rule in alerts()}
    until(
        lambda: [rule["health"] for group in told(prometheus, "rules")["groups"]
                 for rule in group["rules"]],
        "all rules were evaluated", holds=lambda health: set(health) == {"ok"},
    )  # fmt: skip
    cluster.finish()
    cluster.until_done()


@pytest.mark.skipif(shutil.which("promtool") is None, reason="there is no promtool (prometheus)")
def test_the_configuration_of_the_containers_is_valid() -> None:
    """Its targets are the services of compose.yaml that answer `/metrics`."""
    file = RULES.parent / "prometheus.yaml"
    done = subprocess.run(
        ["promtool", "check", "config", str(file)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    services = yaml.safe_load((RULES.parents[2] / "compose.yaml").read_text())["services"]
    watched = {
        name for name, service in services.items()
        if "everstep-healthy" in service.get("healthcheck", {}).get("test", ())
    }  # fmt: skip
    [scrape] = yaml.safe_load(file.read_text())["scrape_configs"]
    targets = {target.partition(":")[0] for target in scrape["static_configs"][0]["targets"]}
    assert targets == watched
    for name in watched:
        assert services[name]["environment"]["EVERSTEP_OBSERVE__HOST"] == "0.0.0.0"
