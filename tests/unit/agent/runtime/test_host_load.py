"""How overloaded a host is, as its agent's beats report."""

from datetime import UTC, datetime
from pathlib import Path

import pytest

from everstep.messages import NodeBeat
from everstep_services.agent.runtime.beat_sender import HostLoad

BEAT = NodeBeat(
    job="j", node="n1", sequence=1, at=datetime(2026, 3, 1, tzinfo=UTC), state="running"
)


def test_beats_report_tasks_and_lateness_of_the_last_ten_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    stat = tmp_path / "stat"
    load = HostLoad(stat)
    load.look(0.0)
    assert load.with_load(BEAT) == BEAT, "without the file, and before the second beat"
    stat.write_text("cpu 1 2\nprocs_running 21\nprocs_blocked 0\n")
    load.look(1.7)
    beat = load.with_load(BEAT)
    assert (beat.load_ratio, beat.late_s) == (5.0, 0.7)
    for number in range(10):
        load.look(2.7 + number)
    assert load.with_load(BEAT).late_s == 0.0, "it is over"
