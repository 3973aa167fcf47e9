"""A simulated training loses what closed forms and published fleets lose."""

from dataclasses import replace
from statistics import fmean

import pytest

from everstep_services.cli.__main__ import main
from everstep_services.cli.fleet_plan.simulation import (
    DAY_S,
    FailingNodes,
    Recovery,
    best_interval_s,
    expected_goodput,
    simulate,
    spares_needed,
)

META = FailingNodes(nodes=2048, failures=0.00379, spares=50)
"""16 384 GPUs, and how often Llama 3's nodes failed."""
AT_98K = FailingNodes(nodes=12_250, failures=DAY_S / (12_250 * 18 * 60), spares=10**6, shape=1000)
"""A failure each 18 minutes, evenly."""


def goodput(fleet: FailingNodes, recovery: Recovery, runs: int = 10) -> float:
    return fmean(spent.goodput for spent in simulate(fleet, recovery, days=30, runs=runs))


def saving_best(fleet: FailingNodes, stall_s: float, restart_s: float) -> Recovery:
    recovery = Recovery(interval_s=1, stall_s=stall_s, restart_s=restart_s)
    return replace(recovery, interval_s=best_interval_s(fleet, recovery))


@pytest.mark.parametrize("nodes", [128, 2048, 4096])
@pytest.mark.parametrize(("stall_s", "restart_s"), [(60, 600), (5, 180), (5, 60), (0.5, 20)])
def test_it_agrees_with_the_closed_form(nodes: int, stall_s: float, restart_s: float) -> None:
    fleet = replace(META, nodes=nodes)
    recovery = saving_best(fleet, stall_s=stall_s, restart_s=restart_s)
    assert goodput(fleet, recovery) == pytest.approx(expected_goodput(fleet, recovery), rel=0.05)


@pytest.mark.parametrize("factor", [0.3, 3.0])
def test_the_interval_is_the_best(factor: float) -> None:
    recovery = saving_best(META, stall_s=60, restart_s=60)
    other = replace(recovery, interval_s=recovery.interval_s * factor)
    assert goodput(META, recovery) > goodput(META, other)


def test_all_replicas_stop_or_one_of_twelve_is_away_at_98_000_gpus() -> None:
    """FT-HSDP's two figures: 0.44 with a stall of 10 minutes, 0.80 with 3 and a replica away."""
    together = Recovery(restart_s=600, interval_s=DAY_S, kept_ratio=1)
    apart = replace(together, restart_s=180, replicas=12, rejoin_s=420)
    assert goodput(AT_98K, together, runs=1) == pytest.approx(0.44, abs=0.01)
    assert goodput(AT_98K, apart, runs=1) == pytest.approx(0.80, abs=0.01)


def test_9_600_gpus_of_a_platform_with_44_000_incidents_in_three_months() -> None:
    """ByteRobust's 97 %: 20 incidents for 1 000 nodes a day, 93 s each, saves in each step."""
    fleet = FailingNodes(nodes=1200, failures=0.0196, spares=60)
    assert goodput(fleet, Recovery(restart_s=93, interval_s=10, kept_ratio=1)) == pytest.approx(
        0.97, abs=0.006
    )


@pytest.mark.parametrize("spares", [0, 3])
@pytest.mark.parametrize("shape", [0.7, 1.0])
@pytest.mark.parametrize("replicas", [1, 4])
def test_each_second_is_in_one_class(spares: int, shape: float, replicas: int) -> None:
    fleet = FailingNodes(nodes=64, failures=0.1, spares=spares, shape=shape, replaced_ratio=0.7)
    recovery = Recovery(
        restart_s=600, interval_s=900, stall_s=20, durable_s=300, kept_ratio=0.5,
        replicas=replicas, rejoin_s=1000,
    )  # fmt: skip
    for spent in simulate(fleet, recovery, days=30, runs=5):
        assert spent.failures
        assert spent.wall_s == pytest.approx(30 * DAY_S)
        assert min(spent.productive_s, spent.lost_steps_s, spent.waits_s, spent.reduced_s) >= 0


def test_without_failures_only_saves_cost() -> None:
    fleet = FailingNodes(nodes=1, failures=1e-9)
    recovery = Recovery(restart_s=60, interval_s=90, stall_s=10)
    assert goodput(fleet, recovery) == pytest.approx(0.9)


def test_without_spares_a_job_waits_for_repairs() -> None:
    fleet = FailingNodes(nodes=10, failures=0.1, repair_s=DAY_S)
    (spent,) = simulate(fleet, Recovery(restart_s=0, interval_s=DAY_S), days=10_000, runs=1)
    assert 0.5 < spent.waits_s / spent.wall_s < 0.65  # half, and what fails while others wait


def test_spares_are_as_many_as_are_away() -> None:
    recovery = Recovery(restart_s=60, interval_s=300, stall_s=1)

    def with_spares(count: int) -> float:
        return goodput(replace(META, spares=count), recovery)

    needed = spares_needed(META, with_spares, within=0.001)
    away = META.nodes * META.failures
    assert away < needed < away + 5 * away**0.5
    assert with_spares(needed) > with_spares(needed // 2) + 0.001


def test_the_command_answers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--gpus", "1024", "--spares", "0", "--kept", "0.9"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("128 nodes and 0 spares, 30 days\n")
    assert "if there are 3 spares" in printed


@pytest.mark.parametrize(
    ("option", "answer"),
    [
        ("--mtbf=0s", "'0s' must be above 0"),
        ("--mtbf=9", "'9' is not a length of time: write 0.5s, 10m, 2h or 7d"),
        ("--mtbf=1s", "too many to simulate (at most 20,000): give fewer --days"),
    ],
)
def test_what_cannot_be_simulated(
    option: str, answer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--gpus", "1024", option]) == 2
    assert answer in capsys.readouterr().err
