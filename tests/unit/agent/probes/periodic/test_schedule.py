"""When probes run, and the share of a core that they may take."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from everstep_services.agent.probes.periodic.schedule import ProbeSchedule
from everstep_services.agent.probes.settings import ProbeSettings


def schedule(share: float = 0.01, node: str = "n1", **every_s: float) -> ProbeSchedule:
    probes = {name: ProbeSettings(every_s=seconds) for name, seconds in every_s.items()}
    return ProbeSchedule(probes, share, node, now=0.0)


def run(
    probes: ProbeSchedule, until: float, cpu_s: float = 0.0, took_s: float = 0.0
) -> list[float]:
    """The times at which the only probe starts."""
    now, starts = 0.0, []
    while (wake_at := probes.wake_at) is not None and wake_at < until:
        now = max(now, wake_at)
        (name,) = probes.due(now, 1)
        starts.append(now)
        probes.started(name, now)
        now += took_s
        probes.ended(name, now, cpu_s)
    return starts


def test_a_probe_runs_at_its_interval_give_or_take_a_tenth() -> None:
    starts = run(schedule(nic=30), until=3000)
    gaps = [after - before for before, after in itertools.pairwise(starts)]
    assert all(27 <= gap <= 33 for gap in gaps)
    assert len({round(gap, 3) for gap in gaps}) > 10, "the jitter is another one each time"
    assert 0 <= starts[0] <= 30


def test_nodes_begin_at_different_moments() -> None:
    firsts = {run(schedule(node=f"n{n}", nic=30), until=31)[0] for n in range(50)}
    assert len(firsts) == 50
    assert max(firsts) - min(firsts) > 20


def test_a_costly_probe_runs_less_often() -> None:
    probes = schedule(share=0.01, storage=10)
    probes.due(10, 1)
    probes.started("storage", 10)
    assert probes.ended("storage", 11, cpu_s=0.5) == 50.0
    assert probes.wake_at == 60.0


def test_a_costly_probe_does_not_slow_the_others() -> None:
    probes = schedule(share=0.02, storage=10, nic=10)
    for name in probes.due(10, 2):
        probes.started(name, 10)
        probes.ended(name, 10.1, cpu_s=5.0 if name == "storage" else 0.001)
    assert probes.due(30, 2) == ["nic"]
    assert probes.due(500, 2) == ["nic"]
    assert set(probes.due(511, 2)) == {"nic", "storage"}


@settings(deadline=None)
@given(
    cpu_s=st.floats(0, 3),
    every_s=st.floats(1, 60),
    took_s=st.floats(0, 5),
    share=st.floats(0.001, 1),
)
def test_probes_never_take_more_than_their_share_but_for_one_run(
    cpu_s: float, every_s: float, took_s: float, share: float
) -> None:
    probes = schedule(share=share, nic=every_s)
    starts = run(probes, until=2000, cpu_s=cpu_s, took_s=took_s)
    assert probes.cpu_s <= share * (2000 - starts[0]) + cpu_s * 1.001 if starts else True


def test_only_as_many_start_as_there_is_room_for_the_longest_overdue_first() -> None:
    probes = schedule(a=5, b=50, c=500)
    assert len(probes.due(1000, 2)) == 2
    assert probes.due(1000, 0) == []
    assert sorted(probes.due(1000, 9)) == ["a", "b", "c"]


def test_a_probe_that_takes_longer_than_its_interval_does_not_run_twice_at_once() -> None:
    probes = schedule(nic=2)
    probes.started("nic", 2)
    assert probes.due(100, 1) == []
    assert probes.wake_at is None
    probes.ended("nic", 100, 0.0)
    assert probes.due(100, 1) == ["nic"]


def test_the_cost_includes_the_processes_in_which_probes_run() -> None:
    probes = schedule(nic=10)
    probes.workers_started(0.3)
    probes.started("nic", 10)
    probes.ended("nic", 10, 0.2)
    assert probes.cpu_ratio(50) == 0.01
