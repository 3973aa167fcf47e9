"""Which faults are made, in which order and where: from options or a file, with a seed."""

import random
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from everstep.evidence.files import read_regular
from everstep_services.cli.errors import CliError, Exit
from trainer_sdk.inject.catalog import BadFaultError, FaultRequest, fault_request

RANDOM = "random"
_FIELDS = {
    "fault": str,
    "rank": int | str,
    "node": str,
    "after_step": int,
    "after_s": int | float,
    "for_s": int | float,
    "amount": int,
    "target": str,
}


@dataclass(frozen=True, slots=True)
class PlannedFault:
    """One fault, and when."""

    wish: FaultRequest
    rank: str = ""
    """A number, or `random`; empty for random, or where a node is meant."""
    node: str = ""
    after_step: int | None = None
    after_s: float = 0.0


@dataclass(frozen=True, slots=True)
class FaultPlace:
    """Where a fault is made."""

    rank: int | None
    node: str

    def __str__(self) -> str:
        return self.node if self.rank is None else f"rank {self.rank} on {self.node}"


@dataclass(frozen=True, slots=True)
class RankMap:
    """Which nodes run which ranks."""

    job: str
    nodes: Mapping[str, range]

    def node_of(self, rank: int) -> str:
        """Where a rank runs."""
        for node, ranks in self.nodes.items():
            if rank in ranks:
                return node
        last = sum(len(ranks) for ranks in self.nodes.values()) - 1
        raise CliError(f"{self.job} has no rank {rank}: it has 0 to {last}", Exit.NOT_FOUND)


def planned(fields: Mapping[str, Any]) -> PlannedFault:
    """One fault as it is asked for. `CliError` if it cannot be."""
    try:
        wished = fault_request(
            fields["fault"],
            for_s=fields.get("for_s"),
            amount=fields.get("amount"),
            target=fields.get("target", ""),
        )
    except BadFaultError as error:
        raise CliError(str(error), Exit.USAGE) from error
    rank, node = str(fields.get("rank", "")), fields.get("node", "")
    if rank and wished.fault.place == "agent":
        text = f"{wished.fault.name} happens to an agent: name its --node, not a rank"
        raise CliError(text, Exit.USAGE)
    if node and wished.fault.place != "agent":
        raise CliError(f"{wished.fault.name} happens to a rank: name it by --rank", Exit.USAGE)
    if rank and rank != RANDOM and not rank.isdecimal():
        raise CliError(f"{rank!r} is not a rank: give a number, or {RANDOM}", Exit.USAGE)
    return PlannedFault(
        wished, rank, node, fields.get("after_step"), float(fields.get("after_s") or 0.0)
    )


def read_scenario(path: Path) -> tuple[int | None, list[PlannedFault]]:
    """The seed, if the file has one, and its faults in the order of their times."""
    try:
        table = tomllib.loads(read_regular(path).decode())
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise CliError(f"{path} cannot be read as TOML: {why}", Exit.USAGE) from error
    unknown = table.keys() - {"seed", "faults"}
    faults = table.get("faults")
    if unknown or not isinstance(faults, list) or not faults:
        problem = f"has {', '.join(sorted(unknown))}" if unknown else "has no [[faults]]"
        raise CliError(f"{path} {problem}: write a seed, and a [[faults]] for each", Exit.USAGE)
    seed = table.get("seed")
    if seed is not None and type(seed) is not int:
        raise CliError(f"{path}: seed is {seed!r}: give a whole number", Exit.USAGE)
    planned_faults = [_read(f"{path}, fault {n}", fault) for n, fault in enumerate(faults, start=1)]
    return seed, sorted(planned_faults, key=lambda fault: fault.after_s)


def _read(where: str, fields: object) -> PlannedFault:
    if not isinstance(fields, dict) or "fault" not in fields:
        raise CliError(f"{where}: it needs a `fault`", Exit.USAGE)
    for name, value in fields.items():
        kind = _FIELDS.get(name)
        if kind is None:
            names = ", ".join(_FIELDS)
            raise CliError(f"{where}: there is no field {name!r}: there are {names}", Exit.USAGE)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise CliError(f"{where}: {name} cannot be {value!r}", Exit.USAGE)
    try:
        return planned(fields)
    except CliError as error:
        raise CliError(f"{where}: {error}", error.code) from error


def settled(
    faults: Iterable[PlannedFault], here: RankMap, seed: int
) -> list[tuple[PlannedFault, FaultPlace]]:
    """Where each is made. The same seed picks the same on a job of the same shape."""
    picks = random.Random(seed)  # noqa: S311 - to be repeated, not to be secret
    return [(fault, _place(fault, here, picks)) for fault in faults]


def _place(fault: PlannedFault, here: RankMap, picks: random.Random) -> FaultPlace:
    if fault.wish.fault.place == "agent":
        node = fault.node if fault.node not in {"", RANDOM} else picks.choice(sorted(here.nodes))
        if node not in here.nodes:
            nodes = ", ".join(sorted(here.nodes))
            raise CliError(f"{here.job} has no node {node}: it runs on {nodes}", Exit.NOT_FOUND)
        return FaultPlace(None, node)
    if fault.rank in {"", RANDOM}:
        rank = picks.choice([rank for ranks in here.nodes.values() for rank in ranks])
    else:
        rank = int(fault.rank)
    return FaultPlace(rank, here.node_of(rank))
