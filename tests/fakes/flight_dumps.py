"""Dumps shaped as NCCL's flight recorder writes them, of jobs with known faults.

A job is a list of what each rank calls, in order. The generator plays it: a collective of a group
is over when all members have called it alike; a rank goes on after a call at once if the call is
asynchronous, else when it is over. What can go no further when all stand still is pending, as in
a real hang.
"""

import itertools
import json
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

START_NS = 1_700_000_000_000_000_000
STEP_NS = 20_000_000
HANG_NS = 600_000_000_000


@dataclass(frozen=True)
class Group:
    """A process group."""

    name: str
    description: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Call:
    """One call of a collective."""

    group: Group
    operation: str = "all_reduce"
    sizes: tuple[tuple[int, ...], ...] = ((1024, 64),)
    dtype: str = "Float"


@dataclass
class Job:
    """What each rank calls, and what goes wrong."""

    world: int
    groups: Sequence[Group]
    calls: dict[int, list[Call]]
    unstarted: set[tuple[int, str, int]] = field(default_factory=set)
    """`(rank, group, sequence)` that a device does not start."""
    endless: set[tuple[str, int]] = field(default_factory=set)
    """`(group, sequence)` that all start and that does not end."""
    without_dump: set[int] = field(default_factory=set)
    ring: int = 2000
    version: str = "2.10"


def three_dimensions(data: int, tensor: int, pipeline: int) -> list[Group]:
    """The groups of a job with data, tensor and pipeline parallelism, and the default one."""
    world = data * tensor * pipeline
    number = itertools.count(1)

    def groups(kind: str, lists: Iterable[Iterable[int]]) -> list[Group]:
        return [Group(str(next(number)), f"{kind}", tuple(ranks)) for ranks in lists]

    return [
        Group("0", "default_pg", tuple(range(world))),
        *groups("tensor", (range(a, a + tensor) for a in range(0, world, tensor))),
        *groups(
            "data",
            (
                range(p * data * tensor + t, (p + 1) * data * tensor, tensor)
                for p in range(pipeline)
                for t in range(tensor)
            ),
        ),
    ]


def steady(groups: Sequence[Group], world: int, steps: int) -> Job:
    """A job that calls every group's collectives in each step."""
    calls: dict[int, list[Call]] = {rank: [] for rank in range(world)}
    for group in groups:
        if group.description == "default_pg":
            continue
        for rank in group.ranks:
            calls[rank] += [
                Call(group, "_all_gather_base" if group.description == "tensor" else "all_reduce")
            ]
    whole = next(one for one in groups if one.description == "default_pg")
    per_step = {
        rank: [*sorted_calls, Call(whole, "all_reduce", ((1,),))]
        for rank, sorted_calls in calls.items()
    }
    return Job(world, groups, {rank: one * steps for rank, one in per_step.items()})


def leave(job: Job, rank: int, at: int) -> None:
    """The rank makes no call from its `at`-th on: it is busy or stuck elsewhere."""
    job.calls[rank] = job.calls[rank][:at]


def skip(job: Job, rank: int, at: int) -> None:
    """The rank leaves one call out."""
    job.calls[rank] = [*job.calls[rank][:at], *job.calls[rank][at + 1 :]]


def swap(job: Job, rank: int, at: int) -> None:
    """The rank makes two calls in the other order."""
    one, two = job.calls[rank][at : at + 2]
    job.calls[rank][at : at + 2] = [two, one]


def change(job: Job, rank: int, at: int, **changes: Any) -> None:
    """The rank makes a call otherwise."""
    job.calls[rank][at] = replace(job.calls[rank][at], **changes)


@dataclass
class _Played:
    call: Call
    sequence: int
    created_ns: int
    joined: int = 0
    state: str = "scheduled"


def play(job: Job, *, hang_ns: int = HANG_NS, seed: int = 0) -> dict[int, dict[str, Any]]:
    """Each rank's dump when nothing moves any more (JSON's shape)."""
    chance = random.Random(seed)
    at = dict.fromkeys(range(job.world), 0)
    counts: dict[tuple[int, str], int] = {}
    played: dict[int, list[_Played]] = {rank: [] for rank in range(job.world)}
    meetings: dict[tuple[Group, int], dict[int, _Played]] = {}
    now = START_NS
    moving = list(range(job.world))
    while moving:
        chance.shuffle(moving)
        woken: list[int] = []
        for rank in moving:
            if at[rank] >= len(job.calls[rank]):
                continue
            call = job.calls[rank][at[rank]]
            at[rank] += 1
            sequence = counts[rank, call.group.name] = counts.get((rank, call.group.name), 0) + 1
            now += chance.randrange(1, STEP_NS // job.world + 2)
            entry = _Played(call, sequence, now)
            played[rank].append(entry)
            meeting = meetings.setdefault((call.group, sequence), {})
            meeting[rank] = entry
            woken += _settle(job, call.group, sequence, meeting)
        moving = woken
    return {
        rank: _dump(job, rank, played[rank], now, hang_ns)
        for rank in range(job.world)
        if rank not in job.without_dump
    }


def _settle(job: Job, group: Group, sequence: int, meeting: Mapping[int, _Played]) -> list[int]:
    """Who can go on now that somebody has come to a meeting."""
    if len(meeting) < len(group.ranks):
        return []
    idle = {r for r in group.ranks if (r, group.name, sequence) in job.unstarted}
    for rank, entry in meeting.items():
        entry.state = "scheduled" if rank in idle else "started"
    are_alike = len({(e.call.operation, e.call.sizes, e.call.dtype) for e in meeting.values()}) == 1
    if idle or not are_alike or (group.name, sequence) in job.endless:
        return []
    for entry in meeting.values():
        entry.state = "completed"
    return list(meeting)


def _dump(job: Job, rank: int, played: Sequence[_Played], now: int, hang_ns: int) -> dict[str, Any]:
    del now, hang_ns
    first = max(0, len(played) - job.ring)
    return {
        "version": job.version,
        "comm_lib_version": "2.27.3",
        "nccl_comm_state": {},
        "pg_config": {
            one.name: {"name": one.name, "desc": one.description, "ranks": str(list(one.ranks))}
            for one in job.groups
            if rank in one.ranks
        },
        "pg_status": _statuses(job, played),
        "entries": [_entry(job, number, one) for number, one in enumerate(played)][first:],
    }


def _statuses(job: Job, played: Sequence[_Played]) -> dict[str, Any]:
    statuses: dict[str, Any] = {}
    for one in played:
        status = statuses.setdefault(
            str(_number(job, one.call.group)),
            {
                "last_enqueued_collective": 0,
                "last_started_collective": -1,
                "last_completed_collective": -1,
            },
        )
        status["last_enqueued_collective"] = one.sequence
        if one.state != "scheduled":
            status["last_started_collective"] = one.sequence
        if one.state == "completed":
            status["last_completed_collective"] = one.sequence
    return statuses


def _number(job: Job, group: Group) -> int:
    return next(number for number, one in enumerate(job.groups) if one is group)


def _entry(job: Job, number: int, one: _Played) -> dict[str, Any]:
    sizes = [list(size) for size in one.call.sizes]
    is_over = one.state == "completed"
    return {
        "record_id": number,
        "pg_id": _number(job, one.call.group),
        "process_group": [one.call.group.name, one.call.group.description],
        "collective_seq_id": one.sequence,
        "p2p_seq_id": 0,
        "op_id": one.sequence,
        "profiling_name": f"nccl:{one.call.operation}",
        "time_created_ns": one.created_ns,
        "input_sizes": sizes,
        "input_dtypes": [one.call.dtype] * len(sizes),
        "output_sizes": sizes,
        "output_dtypes": [one.call.dtype] * len(sizes),
        "state": one.state,
        "time_discovered_started_ns": one.created_ns + 1000 if one.state != "scheduled" else None,
        "time_discovered_completed_ns": one.created_ns + 2000 if is_over else None,
        "retired": is_over,
        "timeout_ms": 600_000,
        "is_p2p": False,
    }


def write(dumps: Mapping[int, Mapping[str, Any]], folder: Path, prefix: str = "_dump_") -> None:
    """One JSON file a rank."""
    folder.mkdir(parents=True, exist_ok=True)
    for rank, dump in dumps.items():
        (folder / f"{prefix}{rank}.json").write_text(json.dumps(dump))
