"""Nodes on the screen: which checks are probes, and where the NVLink domain is shown."""

from typing import Any

from everstep_services.cli.pages.nodes import _shown, check_lines, node_page


def probe(check: str, failures: int = 0, **more: Any) -> dict[str, Any]:
    return {
        "check": check, "every_s": 30.0, "policy": "observe", "state": "ok", "failures": failures,
        "failures_limit": 3, "has_failed": False, **more,
    }  # fmt: skip


def node(*probes: dict[str, Any], **more: Any) -> dict[str, Any]:
    names = (
        "state", "state_reason", "job", "address", "device", "failure_domain", "strikes_limit",
        "is_suspect", "is_excluded", "is_healthy", "spared_reason", "joins", "losses", "refusals",
        "ranks_failed", "stalls", "standing", "standing_missing", "now", "last_check",
    )  # fmt: skip
    blank: dict[str, Any] = dict.fromkeys(names)
    return {
        **blank, "node": "n1", "topology": [], "strikes": 0, "nvlink_domain": None,
        "probes": list(probes), **more,
    }  # fmt: skip


def test_the_list_names_failed_probes_or_counts_them() -> None:
    assert _shown(node())["probes"] == ""
    assert _shown(node(probe("gpu"), probe("nic")))["probes"] == "2"
    assert _shown(node(probe("gpu"), probe("nic", 1)))["probes"] == "1 of 2 failing"
    failed = probe("nic", 3, has_failed=True)
    assert _shown(node(probe("gpu", 1), failed))["probes"] == "failed: nic"


def test_a_page_has_a_line_for_each_probe_with_its_limits() -> None:
    lines = list(node_page(node(probe("nic", 2, policy="exclude", state="failed"))))
    (line,) = (line for line in lines if line.strip().startswith("probe"))
    assert " ".join(line.split()) == (
        "probe nic failed every 30 s exclude 2 of 3 failures in a row"
    )


def test_a_wrong_clock_is_named_in_the_list_and_on_the_page() -> None:
    wrong = node(clock_offset_s=-12.3, is_clock_wrong=True, is_suspect=True, suspect_reason="slow")
    assert _shown(wrong)["reason"] == "its clock is 12.3 s behind; slow"
    assert any("its clock is 12.3 s behind" in line for line in node_page({**wrong, **OF_SUSPECT}))
    right = node(clock_offset_s=0.2, is_clock_wrong=False)
    assert "clock" not in _shown(right)["reason"]
    assert not any("clock" in line for line in node_page(right))


OF_SUSPECT = {"suspect_at": "2026-11-21T07:00:00Z", "suspect_class": ""}


def test_a_page_says_why_a_node_has_left() -> None:
    why = "ann drains n1: the fan is loud; the others continue without it"
    gone = node(state="left", state_at="2026-11-21T07:00:00Z", state_reason=why)
    assert f"  left  07:00:00: {why}" in [
        line.replace("2026-11-21 ", "") for line in node_page(gone)
    ]


def test_a_page_names_the_nvlink_domain() -> None:
    lines = list(node_page(node(nvlink_domain="nvlink-f2c1")))
    assert "  nvlink  nvlink-f2c1" in lines


def test_a_probe_among_the_checks_has_its_policy_and_its_failures() -> None:
    check = {
        "at": "2026-11-26T07:00:00Z", "occasion": "probe", "took_s": 0.1, "checks": ["nic"],
        "is_healthy": False, "results": [], "policy": "exclude", "failures": 3, "is_acted_on": True,
    }  # fmt: skip
    (line,) = check_lines(check)
    assert "(probe, policy exclude, failed 3 times in a row, ended a round, " in line
