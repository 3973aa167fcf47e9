"""Dumps shaped as NCCL's flight recorder writes them, of jobs with known faults.

A job is a list of what each rank calls, in order. The generator plays it: a collective of a group
is over when all members have called it alike, a transfer when both ends have; a rank goes on as
long as fewer than `ahead` of its calls are not over. What can go no further when all stand still is
pending, as in a real hang. `flight_faults.py` draws jobs and faults from a seed.
"""

import itertools
import json
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

START_NS = 1_700_000_000_000_000_000
STEP_NS = 20_000_000


@dataclass(frozen=True)
class Group:
    """A process group."""

    name: str
    description: str
    ranks: tuple[int, ...]

    @cached_property
    def members(self) -> frozenset[int]:
        return frozenset(self.ranks)

    @cached_property
    def listed(self) -> str:
        """The ranks as dumps write them."""
        return str(list(self.ranks))


@dataclass(frozen=True)
class Call:
    """One call: a collective, a transfer, or several of either that are made together."""

    group: Group
    operation: str = "all_reduce"
    sizes: tuple[tuple[int, ...], ...] = ((1024, 64),)
    dtype: str = "Float"
    peer: int | None = None
    """The other rank of a `send` or `recv`."""
    parts: int = 1
    """Of how many collectives a coalesced call consists."""


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
    half_over: dict[tuple[str, int], frozenset[int]] = field(default_factory=dict)
    """On which ranks a collective does not end that is over on the others."""
    timed_out: set[int] = field(default_factory=set)
    """Ranks whose watchdog has given up their oldest collective."""
    ahead: int = 1
    """How many calls of a rank may be under way."""
    starts_at_once: bool = False
    """Whether a device starts a collective before all ranks have joined, as NCCL's kernels do."""
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
    rank: int
    call: Call
    sequence: int
    transfer: int
    """How many transfers the rank had begun in the group."""
    created_ns: int
    state: str = "scheduled"


@dataclass
class _Meeting:
    """A collective or a transfer, and who has come to it."""

    key: tuple[str, ...]
    members: frozenset[int]
    come: dict[int, _Played] = field(default_factory=dict)
    is_over: bool = False


class _Play:
    """Lets all ranks call what they call, in an order that the seed draws."""

    def __init__(self, job: Job, seed: int) -> None:
        self.job = job
        self.played: dict[int, list[_Played]] = {rank: [] for rank in range(job.world)}
        self._chance = random.Random(seed)
        self._at = dict.fromkeys(range(job.world), 0)
        self._under_way = dict.fromkeys(range(job.world), 0)
        self._counts: dict[tuple[object, ...], int] = {}
        self._meetings: dict[tuple[object, ...], _Meeting] = {}
        self._blocked: set[str] = set()
        """Groups in which nothing can end any more."""
        self._now = START_NS

    def run(self, most: int | None = None) -> None:
        """Until all stand still, or this number of calls were made."""
        moving, made = list(range(self.job.world)), 0
        while moving:
            self._chance.shuffle(moving)
            woken: set[int] = set()
            for rank in moving:
                if made == most:
                    return
                if self._can_call(rank):
                    made += 1
                    woken |= self._call(rank)
                    woken |= {rank} if self._can_call(rank) else set()
            moving = sorted(woken)

    def _can_call(self, rank: int) -> bool:
        has_more = self._at[rank] < len(self.job.calls[rank])
        return has_more and self._under_way[rank] < self.job.ahead

    def _call(self, rank: int) -> set[int]:
        call = self.job.calls[rank][self._at[rank]]
        self._at[rank] += 1
        self._now += self._chance.randrange(1, STEP_NS // self.job.world + 2)
        group, is_transfer = call.group.name, call.peer is not None
        collectives = self._counted(rank, group, "collectives", by=not is_transfer)
        transfers = self._counted(rank, group, "transfers", by=is_transfer)
        entry = _Played(rank, call, collectives, transfers, self._now)
        self.played[rank].append(entry)
        self._under_way[rank] += 1
        return self._come(self._meeting(entry), entry)

    def _counted(self, *what: object, by: int) -> int:
        self._counts[what] = self._counts.get(what, 0) + by
        return self._counts[what]

    def _meeting(self, entry: _Played) -> _Meeting:
        call = entry.call
        key: tuple[object, ...] = (call.group.name, entry.sequence)
        members = call.group.members
        if call.peer is not None:
            ends = (entry.rank, call.peer) if call.operation == "send" else (call.peer, entry.rank)
            number = self._counted(call.operation, call.group.name, *ends, by=1)
            key, members = (call.group.name, *ends, number), frozenset(ends)
        return self._meetings.setdefault(key, _Meeting(tuple(map(str, key)), members))

    def _come(self, meeting: _Meeting, entry: _Played) -> set[int]:
        """Who can go on now that somebody has come to a meeting."""
        meeting.come[entry.rank] = entry
        if len(meeting.come) < len(meeting.members):
            return set()
        group, key = entry.call.group.name, (entry.call.group.name, entry.sequence)
        is_transfer = entry.call.peer is not None
        idle = {r for r in meeting.members if (r, *key) in self.job.unstarted and not is_transfer}
        for rank, one in meeting.come.items():
            one.state = "scheduled" if rank in idle else "started"
        calls = [one.call for one in meeting.come.values()]
        operations = {"transfer" if is_transfer else one.operation for one in calls}
        are_alike = len({(one.sizes, one.dtype) for one in calls}) == len(operations) == 1
        if idle or not are_alike or key in self.job.endless or group in self._blocked:
            self._blocked |= set() if is_transfer else {group}
            return set()
        late = self.job.half_over.get(key, frozenset())
        self._blocked |= {group} if late else set()
        over = [one for rank, one in meeting.come.items() if rank not in late]
        for one in over:
            one.state = "completed"
            self._under_way[one.rank] -= 1
        return {one.rank for one in over}


def play(job: Job, *, seed: int = 0, most: int | None = None) -> dict[int, dict[str, Any]]:
    """Each rank's dump when nothing moves any more, or after `most` calls (JSON's shape)."""
    acted = _Play(job, seed)
    acted.run(most)
    for entries in acted.played.values():
        _show_starts(job, entries)
    return {
        rank: _dump(job, rank, acted.played[rank])
        for rank in range(job.world)
        if rank not in job.without_dump
    }


def reached(job: Job, *, seed: int = 0) -> dict[int, int]:
    """How many of its calls each rank makes before nothing moves any more."""
    acted = _Play(job, seed)
    acted.run()
    return {rank: len(entries) for rank, entries in acted.played.items()}


def _show_starts(job: Job, entries: Sequence[_Played]) -> None:
    """A group's collectives start one after the other; those that wait behind one have not."""
    seen: set[str] = set()
    for one in entries:
        if one.state == "completed" or one.call.peer is not None:
            continue
        group = one.call.group.name
        if group in seen:
            one.state = "scheduled"
        elif job.starts_at_once and (one.rank, group, one.sequence) not in job.unstarted:
            one.state = "started"
        seen.add(group)


def _dump(job: Job, rank: int, played: Sequence[_Played]) -> dict[str, Any]:
    listed = [entry for one in played for entry in _entries(job, one)]
    for number, entry in enumerate(listed):
        entry["record_id"] = number
    if rank in job.timed_out:
        _give_up(listed)
    return {
        "version": job.version,
        "comm_lib_version": "2.27.3",
        "nccl_comm_state": {},
        "pg_config": {
            one.name: {"name": one.name, "desc": one.description, "ranks": one.listed}
            for one in job.groups
            if rank in one.members
        },
        "pg_status": _statuses(job, played),
        "entries": listed[max(0, len(listed) - job.ring) :],
    }


def _give_up(entries: Sequence[dict[str, Any]]) -> None:
    """What some releases record when the watchdog of a rank fires: as if it had been over."""
    pending = (one for one in entries if one["state"] != "completed" and not one["is_p2p"])
    oldest = next(pending, None)
    if oldest is not None:
        began = oldest["time_discovered_started_ns"] or oldest["time_created_ns"]
        over_ns = began + oldest["timeout_ms"] * 1_000_000 + 1_000_000
        oldest |= {
            "state": "completed",
            "retired": True,
            "time_discovered_started_ns": began,
            "time_discovered_completed_ns": over_ns,
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
        # NCCL's watchdog writes whatever number its last work had, also that of a transfer.
        number = one.sequence if one.call.peer is None else one.transfer
        status["last_enqueued_collective"] = number
        if one.state != "scheduled":
            status["last_started_collective"] = number
        if one.state == "completed":
            status["last_completed_collective"] = number
    return statuses


def _number(job: Job, group: Group) -> int:
    return next(number for number, one in enumerate(job.groups) if one is group)


def _entries(job: Job, one: _Played) -> list[dict[str, Any]]:
    if one.call.parts == 1:
        return [_entry(job, one, one.call.operation)]
    parts = [_entry(job, one, one.call.operation) for _ in range(one.call.parts)]
    return [*parts, _entry(job, one, f"{one.call.operation}_coalesced")]


def _entry(job: Job, one: _Played, operation: str) -> dict[str, Any]:
    sizes = [list(size) for size in one.call.sizes]
    is_over = one.state == "completed"
    return {
        "record_id": 0,
        "pg_id": _number(job, one.call.group),
        "process_group": [one.call.group.name, one.call.group.description],
        "collective_seq_id": one.sequence,
        "p2p_seq_id": one.transfer,
        "op_id": one.sequence + one.transfer,
        "profiling_name": f"nccl:{operation}{_ends(one)}",
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
        "is_p2p": one.call.peer is not None,
    }


def _ends(one: _Played) -> str:
    if one.call.peer is None:
        return ""
    ranks = one.call.group.ranks
    arrow = "->" if one.call.operation == "send" else "<-"
    return f" {ranks.index(one.rank)}{arrow}{ranks.index(one.call.peer)}"


def lengthened(dump: Mapping[str, Any], per_step: int, steps: int) -> dict[str, Any]:
    """The dump of a rank that had taken `steps` more steps, each like its first, before it began.

    A step calls each of the rank's groups once. A long job need not be played: one rank's dump is
    made at a time.
    """
    entries = dump["entries"]
    earlier = [
        _moved(entry, step, step * per_step)
        for step in range(steps)
        for entry in entries[:per_step]
    ]
    later = [_moved(entry, steps, steps * per_step) for entry in entries]
    statuses = {
        group: {name: number + steps for name, number in status.items()}
        for group, status in dump["pg_status"].items()
    }
    return {**dump, "pg_status": statuses, "entries": [*earlier, *later]}


def _moved(entry: Mapping[str, Any], steps: int, records: int) -> dict[str, Any]:
    later_ns = steps * STEP_NS
    started, over = entry["time_discovered_started_ns"], entry["time_discovered_completed_ns"]
    return {
        **entry,
        "record_id": entry["record_id"] + records,
        "collective_seq_id": entry["collective_seq_id"] + steps,
        "op_id": entry["op_id"] + steps,
        "time_created_ns": entry["time_created_ns"] + later_ns,
        "time_discovered_started_ns": started and started + later_ns,
        "time_discovered_completed_ns": over and over + later_ns,
        "input_sizes": [[*one] for one in entry["input_sizes"]],
        "output_sizes": [[*one] for one in entry["output_sizes"]],
    }


def write(dumps: Mapping[int, Mapping[str, Any]], folder: Path, prefix: str = "_dump_") -> None:
    """One JSON file a rank."""
    folder.mkdir(parents=True, exist_ok=True)
    for rank, dump in dumps.items():
        (folder / f"{prefix}{rank}.json").write_text(json.dumps(dump))
