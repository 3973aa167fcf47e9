"""Make a fault on purpose, to see that the job survives it."""

import asyncio
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from everstep_services.cli.errors import CliError, Exit
from everstep_services.cli.faults.scenario import PlannedFault, planned, read_scenario
from everstep_services.cli.invocation import NAME, Invocation, NumberRange, with_common_options
from everstep_services.cli.output import print_record, print_records
from trainer_sdk.inject.catalog import FAULTS, FaultKind


@click.command()
@click.argument("fault", required=False)
@click.option(
    "--job", type=NAME, metavar="ID", help="The job; it was started with --allow-injection."
)
@click.option(
    "--rank",
    metavar="R|random",
    help="The global rank, or random; random without --rank and --node.",
)
@click.option("--node", type=NAME, metavar="ID|random", help="The node, for faults of an agent.")
@click.option(
    "--after-step", type=click.IntRange(min=0), metavar="S", help="Make the fault after this step."
)
@click.option(
    "--after",
    "after_s",
    type=NumberRange(min=0),
    metavar="SECONDS",
    help="Make the fault after this time.",
)
@click.option("--for", "for_s", type=float, metavar="SECONDS", help="How long it lasts.")
@click.option(
    "--amount", type=int, metavar="N", help="How strong the fault is; --list has the units."
)
@click.option(
    "--target",
    default="",
    metavar="NAME",
    help="What the fault applies to, as a section or a folder; see --list.",
)
@click.option(
    "--scenario",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Make all faults of this TOML file, each at its time.",
)
@click.option(
    "--seed", type=int, metavar="N", help="With `random`: the same seed makes the same choices."
)
@click.option("--dry-run", is_flag=True, help="Only print what would be done, and where.")
@click.option("--list", "wants_list", is_flag=True, help="Only list the faults.")
@with_common_options
def command(invocation: Invocation, /, **options: object) -> int:
    """Make a fault on purpose, to see that the job survives it.

    The job must have been started with `everstep run --allow-injection`. Each fault is recorded
    as `fault_injected` before it is made, and undone when its time is over. The command returns
    when all faults are made.

    Exit codes: 0 made, 1 refused, 3 no such job, rank or node, 4 no bus.
    """
    return inject(invocation, InjectOptions(**options))  # type: ignore[arg-type]


_OF_A_FAULT = ("fault", "rank", "node", "after_step", "after_s", "for_s", "amount", "target")
_COLUMNS = ("fault", "in", "what", "amount", "target", "lasts", "also")


@dataclass(frozen=True, slots=True, kw_only=True)
class InjectOptions:
    """The options as they were given."""

    fault: str | None
    job: str | None
    rank: str | None
    node: str | None
    after_step: int | None
    after_s: float | None
    for_s: float | None
    amount: int | None
    target: str
    scenario: Path | None
    seed: int | None
    dry_run: bool
    wants_list: bool


def inject(invocation: Invocation, asked: InjectOptions) -> int:
    """The exit code."""
    if asked.wants_list:
        print_records(invocation, "faults", map(_row, FAULTS.values()), _COLUMNS)
        return Exit.OK
    seed, faults = _wanted(asked)
    if not asked.job:
        raise CliError("name the job with --job ID", Exit.USAGE)
    if seed is None:
        seed = secrets.randbelow(1 << 31)
    from everstep_services.cli.faults.injection import FaultInjection

    ordering = FaultInjection(invocation, asked.job, seed)
    for done in asyncio.run(ordering.carry_out(faults, is_dry=asked.dry_run)):
        print_record(invocation, "injected", done, "id")
    return Exit.OK


def _wanted(asked: InjectOptions) -> tuple[int | None, list[PlannedFault]]:
    if (asked.fault is None) == (asked.scenario is None):
        raise CliError(
            "name one fault, or a file of them with --scenario; --list says which there are",
            Exit.USAGE,
        )
    if asked.scenario is not None:
        seed, faults = read_scenario(asked.scenario)
        return (seed if asked.seed is None else asked.seed), faults
    options = {name: getattr(asked, name) for name in _OF_A_FAULT}
    return asked.seed, [planned({k: value for k, value in options.items() if value is not None})]


def _row(fault: FaultKind) -> dict[str, Any]:
    return {
        "fault": fault.name,
        "in": fault.place,
        "what": fault.effect,
        "amount": f"{fault.amount} ({fault.default})" if fault.amount else "",
        "target": f"{fault.target} ({fault.default_target})"
        if fault.default_target
        else fault.target,
        "lasts": _lasting(fault),
        "also": ", ".join(fault.also),
    }


def _lasting(fault: FaultKind) -> str:
    if fault.repeats:
        return "once; with --for, each time"
    if not fault.lasts:
        return "once"
    return "until the round ends" if fault.default_s is None else f"{fault.default_s:g} s"
