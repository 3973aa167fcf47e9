"""Say how a training on a fleet will do: spares, interval between saves, goodput."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from statistics import fmean
from typing import TYPE_CHECKING, Any

import click

from everstep_services.cli.cells import Record, aligned, bar, counted, span
from everstep_services.cli.invocation import Invocation, with_common_options
from everstep_services.cli.output import print_report
from everstep_services.cli.times import SecondsParameter

if TYPE_CHECKING:
    from everstep_services.cli.fleet_plan.simulation import FailingNodes, Recovery, TimeSpent

_S, _SOME_S = SecondsParameter(), SecondsParameter(above_zero=True)
_SHARE = click.FloatRange(0, 1)
_RUNS = 20
_WITHIN = 0.001
"""More spares that raise goodput by less than this are not needed."""
_FAILURES_MOST = 20_000
"""Of one simulated training: the answer then takes about ten seconds."""


@click.command()
@click.option("--gpus", type=click.IntRange(1, 10**7), required=True, help="GPUs of the job.")
@click.option("--gpus-per-node", type=click.IntRange(1), default=8, show_default=True)
@click.option(
    "--mtbf",
    "mtbf_s",
    type=_SOME_S,
    default="264d",
    show_default=True,
    help="How long one node runs between two failures, on average.",
)
@click.option(
    "--shape",
    type=click.FloatRange(0.3, 1000),
    default=1.0,
    show_default=True,
    help="Weibull's shape of the times between failures; below 1, failures come in bursts.",
)
@click.option(
    "--repair",
    "repair_s",
    type=_SOME_S,
    default="1d",
    show_default=True,
    help="How long a failed node is away.",
)
@click.option(
    "--replaced",
    "replaced_ratio",
    type=_SHARE,
    default=1.0,
    show_default=True,
    help="The share of failures after which the node is away.",
)
@click.option("--spares", type=click.IntRange(0), help="Spare nodes (as many as are needed).")
@click.option(
    "--restart",
    "restart_s",
    type=_S,
    default="60s",
    show_default=True,
    help="From a failure to the next step, with a node at hand.",
)
@click.option(
    "--stall",
    "stall_s",
    type=_S,
    default="1s",
    show_default=True,
    help="How long a save holds up training.",
)
@click.option(
    "--durable",
    "durable_s",
    type=_S,
    default="60s",
    show_default=True,
    help="From the begin of a save until it can be restored.",
)
@click.option(
    "--interval",
    "interval_s",
    type=_SOME_S,
    help="Between two saves (the one that costs the least).",
)
@click.option(
    "--kept",
    "kept_ratio",
    type=_SHARE,
    default=0.0,
    show_default=True,
    help="The share of failures after which survivors go on with no step lost.",
)
@click.option(
    "--replicas",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Parts of the job that go on without each other.",
)
@click.option(
    "--rejoin",
    "rejoin_s",
    type=_S,
    default="0s",
    show_default=True,
    help="How long a failed replica is away after the restart.",
)
@click.option("--days", type=click.IntRange(1, 3650), default=30, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
@with_common_options
def command(  # noqa: PLR0913  an option each
    invocation: Invocation,
    *,
    gpus: int,
    gpus_per_node: int,
    mtbf_s: float,
    spares: int | None,
    interval_s: float | None,
    days: int,
    seed: int,
    **others: Any,
) -> None:
    """Simulate a training on many GPUs whose nodes fail.

    It answers how many spares it needs, how often to save, which goodput that gives, and what would
    raise it most. Needs no service; lengths of time are written 0.5s, 10m, 2h, 264d.
    """
    from everstep_services.cli.fleet_plan.simulation import DAY_S, FailingNodes, Recovery

    of_nodes = {name: others.pop(name) for name in ("shape", "repair_s", "replaced_ratio")}
    nodes = -(-gpus // gpus_per_node)
    fleet = FailingNodes(nodes=nodes, failures=DAY_S / mtbf_s, spares=spares or 0, **of_nodes)
    recovery = Recovery(interval_s=interval_s or 0.0, **others)
    expected = days * DAY_S / fleet.mttf_s
    if expected > _FAILURES_MOST:
        raise click.UsageError(
            f"{expected:.3g} failures in {days} days, one each {span(fleet.mttf_s)}, are too many "
            f"to simulate (at most {_FAILURES_MOST:,}): give fewer --days, or a longer --mtbf"
        )
    report = Planner(days, seed).report(fleet, recovery, are_spares_given=spares is not None)
    print_report(invocation, "plan", report, page(report))


class Planner:
    """Simulates one question's variants with the same failures."""

    def __init__(self, days: int, seed: int) -> None:
        self._days, self._seed = days, seed

    def runs(self, fleet: "FailingNodes", recovery: "Recovery") -> "list[TimeSpent]":
        from everstep_services.cli.fleet_plan.simulation import simulate

        return simulate(fleet, recovery, days=self._days, runs=_RUNS, seed=self._seed)

    def goodput(self, fleet: "FailingNodes", recovery: "Recovery") -> float:
        return fmean(spent.goodput for spent in self.runs(fleet, recovery))

    def report(
        self, fleet: "FailingNodes", recovery: "Recovery", *, are_spares_given: bool
    ) -> Record:
        """What to say of a fleet; spares and the interval are chosen where they are not given."""
        from everstep_services.cli.fleet_plan.simulation import expected_goodput, spares_needed

        recovery = _saving(fleet, recovery, self._days)
        needed = spares_needed(
            fleet, lambda count: self.goodput(replace(fleet, spares=count), recovery), _WITHIN
        )
        if not are_spares_given:
            fleet = replace(fleet, spares=needed)
        runs = self.runs(fleet, recovery)
        seconds = {
            name: fmean(getattr(spent, name) for spent in runs)
            for name in asdict(runs[0])
            if name != "failures"
        }
        return {
            "nodes": fleet.nodes, "spares": fleet.spares, "spares_needed": needed,
            "mttf_s": fleet.mttf_s, "interval_s": recovery.interval_s, "days": self._days,
            "failures": fmean(spent.failures for spent in runs),
            "goodput": fmean(spent.goodput for spent in runs), "worst": runs[0].goodput,
            "closed_form": expected_goodput(fleet, recovery), "seconds": seconds,
            "gains": self._gains(fleet, recovery, needed),
        }  # fmt: skip

    def _gains(
        self, fleet: "FailingNodes", recovery: "Recovery", needed: int
    ) -> Mapping[str, float]:
        """What goodput would be if one thing were better."""
        better = {
            "a restart takes half the time": replace(recovery, restart_s=recovery.restart_s / 2),
            "a save holds up half as long": replace(recovery, stall_s=recovery.stall_s / 2),
            "survivors keep their steps": replace(recovery, kept_ratio=1.0),
        }
        better = {name: other for name, other in better.items() if other != recovery}
        gains = {name: self.goodput(fleet, other) for name, other in better.items()}
        if fleet.spares < needed:
            more = replace(fleet, spares=needed)
            gains[f"there are {counted(needed, 'spare')}"] = self.goodput(more, recovery)
        return dict(sorted(gains.items(), key=lambda gain: -gain[1]))


def _saving(fleet: "FailingNodes", recovery: "Recovery", days: int) -> "Recovery":
    """With an interval; never shorter than a save, nor longer than the training."""
    from everstep_services.cli.fleet_plan.simulation import DAY_S, best_interval_s

    if recovery.interval_s:
        return recovery
    least_s = max(1.0, recovery.stall_s, recovery.durable_s)
    best_s = max(least_s, best_interval_s(fleet, recovery))
    return replace(recovery, interval_s=min(best_s, days * DAY_S))


_NAMES = {
    "productive_s": "productive",
    "saves_s": "saves",
    "lost_steps_s": "steps made again",
    "restarts_s": "restarts",
    "waits_s": "no node at hand",
    "reduced_s": "replicas away",
}


def page(report: Record) -> Iterator[str]:
    """The answer as a person reads it."""
    nodes, spares = counted(report["nodes"], "node"), counted(report["spares"], "spare")
    yield f"{nodes} and {spares}, {report['days']} days"
    yield (
        f"a failure each {span(report['mttf_s'])}, {report['failures']:.0f} in all; "
        f"a save each {span(report['interval_s'])}"
    )
    yield f"goodput {report['goodput']:.2%}; the worst of {_RUNS} trainings {report['worst']:.2%}"
    yield ""
    seconds = report["seconds"]
    wall_s = sum(seconds.values())
    yield from aligned(
        (name, span(seconds[key]), f"{seconds[key] / wall_s:.2%}", bar(seconds[key], wall_s))
        for key, name in _NAMES.items()
        if seconds[key] > 0
    )
    yield ""
    yield from aligned(
        (f"if {name}", f"{goodput:.2%}") for name, goodput in report["gains"].items()
    )
