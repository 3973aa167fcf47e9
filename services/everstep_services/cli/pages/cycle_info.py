"""The rounds of a job as NVRx's cycle-info files: one JSON a round, and a link to the newest.

    cycle_info.<job>.<attempt>.<cycle>     cycle_info.<job>.current

An attempt is an allocation (a start by the scheduler); a cycle is a round in it, from 0.
"""

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec

from everstep.messages.facts.rounds import Member
from everstep_services.cli.api.client import Api, Params, job_path
from everstep_services.cli.cells import cell
from everstep_services.cli.errors import CliError
from everstep_services.cli.invocation import Invocation
from everstep_services.cli.output import echo, print_json, schema

_NUMBERED = re.compile(r"(.*?)(\d+)")
_UNSAFE = re.compile(r"[^A-Za-z0-9_-]")


def node_range(nodes: Iterable[str]) -> str:
    """Names of nodes as Slurm writes them: `gpu[01-03,07],login1`."""
    numbered: dict[tuple[str, int], list[int]] = {}
    plain: list[str] = []
    for node in sorted(set(nodes)):
        match = _NUMBERED.fullmatch(node)
        if match is None:
            plain.append(node)
        else:
            numbered.setdefault((match[1], len(match[2])), []).append(int(match[2]))
    parts = []
    for (prefix, width), numbers in numbered.items():
        if len(numbers) == 1:
            parts.append(f"{prefix}{numbers[0]:0{width}d}")
        else:
            parts.append(f"{prefix}[{','.join(_spans(sorted(numbers), width))}]")
    return ",".join(sorted([*parts, *plain]))


def cycle_documents(
    job: str,
    allocations: Sequence[Mapping[str, Any]],
    rounds: Sequence[Mapping[str, Any]],
    formed: Sequence[Mapping[str, Any]],
) -> dict[str, dict[str, Any]]:
    """The documents by the names of their files, the oldest first.

    `rounds` and `allocations` are of REST, `formed` are the bodies of `round_formed`.
    """
    starts = {row["allocation"]: row for row in allocations}
    members = {body["round"]: body for body in formed}
    cycles: dict[tuple[str, int], int] = {}
    documents = {}
    for row in sorted(rounds, key=lambda row: int(row["round"])):
        allocation = starts.get(row["allocation"], {})
        job_id = _UNSAFE.sub("_", str(allocation.get("scheduler_job") or job))
        attempt = max(0, int(allocation.get("attempt") or 0))
        cycle = cycles.get((job_id, attempt), 0)
        cycles[job_id, attempt] = cycle + 1
        body = members.get(row["round"], {})
        documents[f"cycle_info.{job_id}.{attempt}.{cycle}"] = {
            "job_id": job_id,
            "attempt_index": attempt,
            "cycle_number": cycle,
            "cycle_start_time": _moment(row["formed_at"]),
            "cycle_end_time": _moment(row["ended_at"]),
            "cycle_log_file": f"{job}_cycle{cycle}.log",
            "active_nodes": node_range(_nodes(body.get("members", ()))),
            "standby_nodes": node_range(body.get("spares", ())),
            "active_ranks": row["world_size"],
            "generation": row["round"],
        }
    return documents


def write_cycle_info(invocation: Invocation, api: Api, job: str, folder: Path) -> None:
    """Write the files of a job into a folder; files of an earlier export are replaced."""
    place = job_path(job)
    allocations = api.get(place)["allocations"]
    rounds = list(api.pages(f"{place}/rounds", {"limit": 1000}, most=None))
    asked: Params = {"job": job, "kind": "round_formed", "limit": 1000}
    formed = [fact["body"] for fact in api.pages("facts", asked, most=None)]
    documents = cycle_documents(job, allocations, rounds, formed)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, document in documents.items():
            _replace(folder / name, json.dumps(document, indent=2) + "\n")
        for job_id, names in groupby(documents, key=lambda name: name.split(".")[1]):
            _link(folder / f"cycle_info.{job_id}.current", list(names)[-1])
    except OSError as error:
        raise CliError(f"{folder} cannot be written: {error.strerror}") from error
    if invocation.output in {"json", "jsonl"}:
        print_json({"schema": schema("cycle-info"), "folder": str(folder), "files": [*documents]})
        return
    echo(f"{cell(folder)}: {len(documents)} files of NVRx's cycle info")


def _nodes(members: object) -> Iterable[str]:
    return (member.node for member in msgspec.convert(members, tuple[Member, ...], strict=False))


def _spans(numbers: Sequence[int], width: int) -> Iterable[str]:
    first = last = numbers[0]
    for number in [*numbers[1:], None]:
        if number == last + 1:
            last = number
            continue
        yield f"{first:0{width}d}" + ("" if first == last else f"-{last:0{width}d}")
        if number is not None:
            first = last = number


def _moment(text: str | None) -> str | None:
    """ISO 8601 in UTC with a Z, as REST has it already."""
    return None if text is None else text.replace("+00:00", "Z")


def _replace(path: Path, text: str) -> None:
    fresh = path.with_name(f".{path.name}.new")
    fresh.write_text(text)
    fresh.replace(path)


def _link(path: Path, target: str) -> None:
    fresh = path.with_name(f".{path.name}.new")
    with suppress(FileNotFoundError):
        fresh.unlink()
    os.symlink(target, fresh)
    fresh.replace(path)
