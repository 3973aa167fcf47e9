"""A real Prometheus scrapes the services, loads the rules, and finds every metric that is used."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.e2e.cluster import Cluster
from tests.e2e.control_planes import Up
from tests.e2e.prometheus import PROGRAM, Prometheus, prometheus_of
from tests.unit.deploy.test_monitoring import METRIC, RULES, alerts, expressions
from tests.waiting import until

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="there is no prometheus (Debian has it)")


@pytest.fixture
def prometheus(shared_up: Up, tmp_path: Path) -> Iterator[Prometheus]:
    with prometheus_of(tmp_path, [shared_up.running.observe.removeprefix("http://")]) as running:
        yield running


def test_a_real_prometheus_finds_every_metric_of_rules_and_boards(
    prometheus: Prometheus, cluster: Cluster
) -> None:
    """A11.5: what a rule or a board names is scraped from running services, under its name."""
    cluster.steady()
    cluster.until_stepping(1)
    named = {name for expression in expressions() for name, _ in METRIC.findall(expression)}

    def unseen() -> set[str]:
        seen = set(prometheus.told("metadata"))
        return {
            name for name in named if name not in seen and name.removesuffix("_total") not in seen
        }

    until(lambda: unseen() or {"none"}, "all are there", holds=lambda left: left == {"none"})
    running = f'everstep_job_info{{job="{cluster.job}"}}'
    until(
        lambda: prometheus.told("query", query=running)["result"], "the job has its own label",
    )  # fmt: skip
    groups = prometheus.told("rules")["groups"]
    loaded = {rule["name"] for group in groups for rule in group["rules"]}
    assert loaded == {rule["alert"] for rule in alerts()}
    until(
        lambda: [rule["health"] for group in prometheus.told("rules")["groups"]
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
