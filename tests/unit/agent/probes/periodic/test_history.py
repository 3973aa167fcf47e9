"""Several runs in a row decide whether a probe has failed; one run does not."""

import itertools

from everstep.messages import CheckResult
from everstep_services.agent.probes.periodic.history import SAY_AGAIN_S, ProbeChange, ProbeHistory
from everstep_services.agent.probes.settings import ProbeSettings

SETTINGS = ProbeSettings(failures=3, passes=2, policy="end_round")


def results(state: str) -> tuple[CheckResult, ...]:
    return (
        CheckResult(check="nic", state="ok", subject="mlx5_1"),
        CheckResult(check="nic", state=state, subject="mlx5_0", reason="it is down"),
    )


class Probe:
    def __init__(self, settings: ProbeSettings = SETTINGS) -> None:
        self.history = ProbeHistory({"nic": settings})
        self.now = 0.0

    def runs(self, *states: str, every_s: float = 10.0) -> list[ProbeChange]:
        changes = []
        for state in states:
            self.now += every_s
            changes.append(self.history.take("nic", results(state), self.now))
        return [change for change in changes if change is not None]


def test_a_probe_fails_with_the_last_of_enough_failures_in_a_row() -> None:
    probe = Probe()
    assert probe.runs("failed", "failed") == []
    (change,) = probe.runs("failed")
    assert (change.kind, change.runs, change.policy) == ("failed", 3, "end_round")
    assert change.reason == "mlx5_0: it is down"
    assert set(probe.history.failing) == {"nic"}


def test_one_pass_begins_the_count_anew() -> None:
    assert Probe().runs("failed", "failed", "ok", "failed", "failed", "warning", "failed") == []


def test_an_unknown_result_counts_neither_way() -> None:
    probe = Probe()
    assert probe.runs("failed", "unknown", "failed", "unknown") == []
    assert [change.kind for change in probe.runs("failed")] == ["failed"]
    assert probe.runs("ok", "unknown") == []
    assert [change.kind for change in probe.runs("ok")] == ["recovered"]


def test_a_recovery_takes_enough_passes_and_tells_how_long_it_had_failed() -> None:
    probe = Probe()
    probe.runs("failed", "failed", "failed")
    assert probe.runs("ok", "failed", "ok") == []
    (change,) = probe.runs("ok")
    assert (change.kind, change.runs, change.lasted_s) == ("recovered", 2, 40.0)
    assert probe.history.failing == {}


def test_a_lasting_failure_is_recorded_again_and_not_at_each_run() -> None:
    probe = Probe()
    changes = probe.runs(*["failed"] * 100)
    again = [change for change in changes if change.kind == "still_failing"]
    assert len(changes) == 1 + len(again)
    assert len(again) == int((1000 - 30) / SAY_AGAIN_S)


def test_a_probe_that_flaps_every_second_never_fails_and_is_recorded_once_an_hour() -> None:
    probe = Probe()
    states = itertools.islice(itertools.cycle(["failed", "ok"]), 3700)
    changes = probe.runs(*states, every_s=1.0)
    assert [change.kind for change in changes] == ["flapping", "flapping"]
    assert changes[0].results[0].state == "warning"
    assert probe.history.failing == {}


def test_beats_show_each_probe_with_its_failures_in_a_row() -> None:
    probe = Probe()
    (before,) = probe.history.beats
    assert (before.check, before.state, before.policy) == ("nic", "", "end_round")
    probe.runs("failed", "failed")
    (failing,) = probe.history.beats
    assert (failing.state, failing.failures, failing.failures_limit) == ("failed", 2, 3)
    assert not failing.has_failed
    probe.runs("unknown")
    (vague,) = probe.history.beats
    assert (vague.state, vague.failures) == ("unknown", 2)
    probe.runs("failed")
    (failed,) = probe.history.beats
    assert (failed.failures, failed.has_failed) == (3, True)
    probe.runs("ok")
    (passing,) = probe.history.beats
    assert (passing.state, passing.failures, passing.has_failed) == ("ok", 0, True)
    probe.history.take("nic", results("unsupported")[1:], probe.now)
    assert [beat.state for beat in probe.history.beats] == ["unsupported"]


def test_the_reason_of_a_failure_shows_no_password() -> None:
    """A site check writes what it likes: the console, logs and rounds show it masked."""
    history = ProbeHistory({"site:raid": ProbeSettings(failures=1)})
    failed = CheckResult(check="site:raid", state="failed", reason="degraded password=hunter2")
    change = history.take("site:raid", (failed,), 1.0)
    assert change is not None
    assert "degraded" in change.reason
    assert "hunter2" not in change.reason
