"""Rules for Prometheus and boards for Grafana: they fit the metrics that there are, and fire."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from docs.generators.metrics import families, name_of
from everstep_services.history.goodput.ledger import CLASSES
from everstep_services.history.job_metrics import COUNTERS, GAUGES

ROOT = Path(__file__).parents[3]
RULES = ROOT / "deploy" / "prometheus" / "everstep.rules.yaml"
BOARDS = sorted((ROOT / "deploy" / "grafana").glob("*.json"))
LABELS = {
    f"everstep_job_{name}{suffix}": {"job", *labels}
    for table, suffix in ((GAUGES, ""), (COUNTERS, "_total"))
    for name, (_, labels) in table.items()
}
METRIC = re.compile(r"\b((?:everstep|process)_[a-z0-9_]+)(\{[^}]*\})?")


def alerts() -> list[dict[str, Any]]:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def expressions() -> Iterator[str]:
    yield from (rule["expr"] for rule in alerts())
    for board in BOARDS:
        for panel in json.loads(board.read_text())["panels"]:
            yield from (target["expr"] for target in panel["targets"])


def test_every_metric_that_rules_and_boards_name_exists() -> None:
    """A11.5."""
    known = {name_of(family) for family in families()}
    named = {name for expression in expressions() for name, _ in METRIC.findall(expression)}
    assert named
    assert named <= known


def test_every_label_that_is_selected_exists() -> None:
    for expression in expressions():
        for name, selector in METRIC.findall(expression):
            labels = set(re.findall(r"([a-z_]+)\s*(?:=~|!~|!=|=)", selector))
            assert labels <= LABELS.get(name, set()), f"{name}{selector}"
            classes = set(re.findall(r'class!?="([a-z_]+)"', selector))
            assert classes <= set(CLASSES), f"{name}{selector}"


@pytest.mark.parametrize("rule", alerts(), ids=lambda rule: str(rule["alert"]))
def test_every_alert_links_a_runbook_and_says_what_is_wrong(rule: dict[str, Any]) -> None:
    """A11.5."""
    notes = rule["annotations"]
    assert (ROOT / notes["runbook_url"]).is_file()
    assert f"`{rule['alert']}`" in (ROOT / "docs" / "guides" / "monitoring.md").read_text()
    assert notes["summary"]
    assert notes["description"]
    assert rule["labels"]["severity"] in {"critical", "warning"}


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.stem)
def test_every_board_can_be_imported_and_its_panels_do_not_overlap(board: Path) -> None:
    shown = json.loads(board.read_text())
    assert shown["uid"] == board.stem
    taken: set[tuple[int, int]] = set()
    for panel in shown["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells
        assert panel["datasource"]["uid"] == "${DS_PROMETHEUS}"


@pytest.mark.skipif(shutil.which("promtool") is None, reason="there is no promtool (prometheus)")
def test_every_alert_fires_when_it_should_and_only_then(tmp_path: Path) -> None:
    """By Prometheus' own evaluation, on series that are written down in the next file (A11.5)."""
    cases = Path(__file__).with_name("alerts.test.yaml").read_text()
    covered = set(re.findall(r"alertname: (\w+)", cases))
    assert covered == {rule["alert"] for rule in alerts()}
    rules = yaml.safe_load(RULES.read_text())
    for group in rules["groups"]:
        for rule in group["rules"]:
            del rule["annotations"]  # which need not be written down a second time
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(rules))
    (tmp_path / "alerts.test.yaml").write_text(cases)
    done = subprocess.run(
        ["promtool", "test", "rules", "alerts.test.yaml"],
        cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
