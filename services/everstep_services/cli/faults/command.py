"""What `everstep inject` was asked for: listed, shown, or made."""

import asyncio
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from everstep_services.cli.errors import CliError, Exit
from everstep_services.cli.faults.scenario import PlannedFault, planned, read_scenario
from everstep_services.cli.invocation import Invocation
from everstep_services.cli.output import print_record, print_records
from trainer_sdk.inject.catalogue import FAULTS, FaultKind

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
        raise CliError("whose fault? Name the job with --job ID", Exit.USAGE)
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
    options = {
        "fault": asked.fault,
        "rank": asked.rank,
        "node": asked.node,
        "after_step": asked.after_step,
        "after_s": asked.after_s,
        "for_s": asked.for_s,
        "amount": asked.amount,
        "target": asked.target,
    }
    return asked.seed, [planned({k: value for k, value in options.items() if value is not None})]


def _row(fault: FaultKind) -> dict[str, Any]:
    return {
        "fault": fault.name,
        "in": fault.place,
        "what": fault.effect,
        "amount": f"{fault.amount} ({fault.default})" if fault.amount else "",
        "target": fault.target,
        "lasts": _lasting(fault),
        "also": ", ".join(fault.also),
    }


def _lasting(fault: FaultKind) -> str:
    if not fault.lasts:
        return "once"
    return "until the round ends" if fault.default_s is None else f"{fault.default_s:g} s"
