"""What an examination comes to, and its forms, each read back as its readers read it."""

import re
from pathlib import Path

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from everstep.messages import CheckResult
from everstep_services.agent.probes import registry, reports
from everstep_services.agent.probes.settings import ChecksSettings
from everstep_services.agent.probes.verdicts import NodeExamination, code_of, state_of, worst_first

OK = CheckResult(check="host", state="ok", subject="memory")
NONE = CheckResult(check="gpu", state="unsupported", reason="no driver")
WARNING = CheckResult(check="host", state="warning", subject="clock", reason="2 s off | x=1")
FAILED = CheckResult(
    check="storage", state="failed", subject='/da"ta\\', reason="write: hangs", code="EIO"
)
UNKNOWN = CheckResult(check="site:raid", state="unknown", reason="did not end")
NEWER = CheckResult(check="x", state="melted")
ALL = (OK, NONE, WARNING, FAILED, UNKNOWN)


def done(*results: CheckResult) -> NodeExamination:
    return NodeExamination("operator", ("gpu", "host"), worst_first(results), 1.25)


@pytest.mark.parametrize(
    ("results", "state", "code"),
    [
        ((), "ok", 0),
        ((OK, NONE), "ok", 0),
        ((OK, UNKNOWN), "unknown", 3),
        ((NEWER,), "unknown", 3),
        ((UNKNOWN, WARNING, OK), "warning", 1),
        (ALL, "failed", 2),
    ],
)
def test_the_worst_is_the_exit_code(
    results: tuple[CheckResult, ...], state: str, code: int
) -> None:
    assert state_of(results) == state
    assert code_of(state) == code
    assert done(*results).is_healthy == (state != "failed")


def test_a_fact_holds_all_of_what_is_wrong_and_only_what_is_not_ok_otherwise() -> None:
    assert len(done(*ALL).worth_telling) == 5
    assert done(OK, NONE, WARNING).worth_telling == (WARNING, NONE)


def test_people_read_the_worst_first_in_columns() -> None:
    assert reports.human("n7", done(*ALL)) == [
        'FAILED       storage    /da"ta\\  write: hangs [EIO]',
        "warning      host       clock    2 s off | x=1",
        "unknown      site:raid           did not end",
        "unsupported  gpu                 no driver",
        "ok           host       memory",
        "n7: 1 failed, 1 warning, 1 unknown, 1 unsupported, 1 ok",
    ]
    assert reports.human("n7", done(OK, NONE, WARNING), quiet=True) == [
        "warning  host  clock  2 s off | x=1"
    ]
    assert reports.human("n7", done(OK), quiet=True) == []
    assert reports.human("n7", done()) == ["n7: nothing was checked"]


def test_nagios_finds_one_bar_and_figures_behind_it() -> None:
    first, *rest = reports.nagios("n7", done(*ALL))
    text, bar, figures = first.partition(" | ")
    assert text == 'EVERSTEP CRITICAL - n7: failed: storage /da"ta\\: write: hangs [EIO]'
    assert bar
    pattern = re.compile(r"([^=' ]+)=(-?[\d.]+)(s|%|B|c)?(?: |$)")
    assert pattern.sub("", figures) == ""
    assert {name: float(value) for name, value, _ in pattern.findall(figures)} == {
        "failed": 1,
        "warning": 1,
        "unknown": 1,
        "unsupported": 1,
        "ok": 1,
        "took": 1.25,
    }
    assert rest[1] == "warning: host clock: 2 s off / x=1"
    assert not any("|" in line for line in rest)
    assert reports.nagios("n7", done(OK))[0].startswith("EVERSTEP OK - n7: 1 ok | ")


def test_prometheus_reads_each_part_once() -> None:
    worse = msgspec.structs.replace(OK, state="warning")
    lines = reports.prometheus("n7", done(*ALL, worse))
    families = {one.name: one for one in text_string_to_metric_families("\n".join(lines) + "\n")}
    assert set(families) == {
        "everstep_check_code",
        "everstep_node_check_code",
        "everstep_node_check_seconds",
    }
    samples = {
        (one.labels["check"], one.labels["subject"]): (one.value, one.labels["state"])
        for one in families["everstep_check_code"].samples
    }
    assert samples == {
        ("storage", '/da"ta\\'): (2, "failed"),
        ("host", "clock"): (1, "warning"),
        ("host", "memory"): (1, "warning"),
        ("site:raid", ""): (3, "unknown"),
        ("gpu", ""): (0, "unsupported"),
    }
    assert families["everstep_node_check_code"].samples[0].value == 2
    assert families["everstep_node_check_seconds"].samples[0].value == 1.25


def test_programs_get_every_field() -> None:
    document = reports.document("n7", done(OK, FAILED))
    assert (document["schema"], document["state"], document["code"]) == (
        "everstep.check/v1",
        "failed",
        2,
    )
    assert msgspec.convert(document["items"], list[CheckResult]) == [FAILED, OK]


# -- the register ----------------------------------------------------------------------------


def test_each_check_says_of_itself_what_the_register_says() -> None:
    settings = ChecksSettings(site={"a": "/bin/true"}, daemon=Path("/run/daemon.sock"))
    names = registry.all_names(settings)
    parallel = registry.beside_training(settings)
    assert names[-1] == "site"
    for name in names[:-1]:
        probe = registry.find(name, settings)
        assert probe.name == name
        assert probe.about
        assert probe.beside_training == (name in parallel)
        assert registry.deadline_s(name, settings) > 0
    assert registry.find("site:a", settings).name == "site:a"


def test_what_is_no_check_is_refused_with_the_nearest() -> None:
    settings = ChecksSettings()
    assert registry.chosen(["host", "gpu", "host", "site:x"], settings) == ("host", "gpu", "site:x")
    with pytest.raises(
        registry.UnknownCheckError, match="'hots' is not a check; did you mean host"
    ):
        registry.chosen(["hots"], settings)
    with pytest.raises(registry.UnknownCheckError, match="see everstep check --list"):
        registry.chosen(["zzzz"], settings)
    with pytest.raises(registry.UnknownCheckError, match="'site:x' is not a check"):
        registry.find("site:x", settings)
