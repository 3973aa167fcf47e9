"""A real Prometheus with the shipped rules and the shipped way to scrape."""

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import yaml

from tests.e2e.ports import free_port
from tests.e2e.processes import Process, environment
from tests.unit.deploy.test_monitoring import RULES
from tests.waiting import until

PROGRAM = shutil.which("prometheus")


class Prometheus:
    """Use `prometheus_of`."""

    def __init__(self, client: httpx2.Client) -> None:
        self._client = client

    def told(self, path: str, **asked: str) -> Any:
        answer = self._client.get(f"/api/v1/{path}", params=asked)
        answer.raise_for_status()
        return answer.json()["data"]

    def query(self, expression: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.told("query", query=expression)["result"]
        return found


@contextmanager
def prometheus_of(folder: Path, targets: Sequence[str], every: str = "1s") -> Iterator[Prometheus]:
    """One that scrapes these as deploy/prometheus/prometheus.yaml does its containers."""
    assert PROGRAM is not None
    config = yaml.safe_load((RULES.parent / "prometheus.yaml").read_text())
    config["global"] = {"scrape_interval": every, "evaluation_interval": every}
    config["rule_files"] = [str(RULES)]
    [scrape] = config["scrape_configs"]
    scrape["static_configs"] = [{"targets": list(targets)}]
    file = folder / "prometheus.yaml"
    file.write_text(yaml.safe_dump(config))
    port = free_port()
    command = [
        PROGRAM, f"--config.file={file}", f"--storage.tsdb.path={folder / 'tsdb'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]  # fmt: skip
    process = Process(command, environment(folder, "prometheus"), folder / "prometheus.log")
    try:
        with httpx2.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:
            until(
                lambda: client.get("/-/ready").status_code, "Prometheus is ready",
                holds=lambda status: status == 200, despite=httpx2.HTTPError,
            )  # fmt: skip
            yield Prometheus(client)
    finally:
        process.kill()
