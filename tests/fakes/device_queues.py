"""Dumps of a job with tensor, data and pipeline parallelism whose devices work in order.

`flight_dumps.py` has streams that do not wait for each other. Here a rank's collectives are one
queue of its device, transfers are queues of their own that collectives wait for, and the host runs
ahead. The dumps list only what is not over, without starts, as torch writes them when a watchdog
fires.
"""

import random
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

_Group = tuple[str, tuple[int, ...]]
_START_NS = 1_700_000_000_000_000_000


@dataclass(frozen=True)
class _Call:
    name: str
    group: _Group
    place: tuple[Any, ...]
    """The same for all calls that belong together."""
    after: tuple[int, ...]
    """The rank's own calls that must be over first."""
    peer: int | None = None


class _Program:
    """The calls of a rank, gathered one by one."""

    def __init__(self, job: "QueuedJob", rank: int) -> None:
        wide = job.tensor * job.data
        first = rank - rank % job.tensor
        self.calls: list[_Call] = []
        self.stage = rank // wide
        self.layer = "experts", tuple(range(self.stage * wide, (self.stage + 1) * wide))
        self._pair = "tensor", tuple(range(first, first + job.tensor))
        self._line = "pipeline", tuple(range(rank % wide, job.world, wide))
        self._rank, self._wide, self._stages = rank, wide, job.stages
        self._counts: Counter[Any] = Counter()
        self._last: dict[str, int] = {}

    def pass_through(self, direction: int) -> None:
        """A forward or backward pass of one microbatch."""
        if 0 <= self.stage - direction < self._stages:
            self.call("recv", self._line, self._rank - direction * self._wide)
        self.call("_all_gather_base", self._pair)
        self.call("all_to_all", self.layer)
        self.call("all_to_all", self.layer)
        self.call("_reduce_scatter_base", self._pair)
        if 0 <= self.stage + direction < self._stages:
            self.call("send", self._line, self._rank + direction * self._wide)

    def call(self, name: str, group: _Group, to: int | None = None) -> None:
        ends = () if to is None else ((self._rank, to) if name == "send" else (to, self._rank))
        self._counts[group, ends] += 1
        queue = "device" if to is None else f"{name} {to}"
        waits = {queue} if name == "recv" else {queue, "device"}
        after = [at for one, at in self._last.items() if one in waits]
        if to is None:
            after += [at for one, at in self._last.items() if one.startswith("recv")]
        self._last[queue] = len(self.calls)
        place = (group, ends, self._counts[group, ends])
        self.calls.append(_Call(name, group, place, tuple(after), to))


_Calls = Mapping[int, list[_Call]]
_Over = dict[int, set[int]]
_Ends = list[tuple[int, int]]


@dataclass
class QueuedJob:
    """What each rank calls, and what goes wrong from which of its calls on."""

    tensor: int = 2
    data: int = 2
    stages: int = 4
    batches: int = 5
    steps: int = 2
    ahead: int = 20
    host_stops: dict[int, int] = field(default_factory=dict)
    device_stops: dict[int, int] = field(default_factory=dict)
    unseen: dict[int, int] = field(default_factory=dict)
    """The rank does not notice that its work ends."""

    @property
    def world(self) -> int:
        return self.tensor * self.data * self.stages

    def calls(self, rank: int) -> list[_Call]:
        """What a rank calls: microbatches in the order 1F1B, and two sums at the end of a step."""
        program = _Program(self, rank)
        early = min(self.stages - 1 - program.stage, self.batches)
        for _ in range(self.steps):
            for _ in range(early):
                program.pass_through(1)
            for _ in range(self.batches - early):
                program.pass_through(1)
                program.pass_through(-1)
            for _ in range(early):
                program.pass_through(-1)
            program.call("all_reduce", program.layer)
            program.call("all_reduce", ("default_pg", tuple(range(self.world))))
        return program.calls

    def dumps(self) -> dict[int, dict[str, Any]]:
        """One dump a rank, taken when nothing moves any more."""
        calls = {rank: self.calls(rank) for rank in range(self.world)}
        ends: dict[Any, list[tuple[int, int]]] = defaultdict(list)
        for rank, own in calls.items():
            for at, one in enumerate(own):
                ends[one.place].append((rank, at))
        issued = dict.fromkeys(calls, 0)
        over: dict[int, set[int]] = {rank: set() for rank in calls}
        while self._issue(calls, issued, over) | self._run(calls, issued, over, ends.values()):
            pass
        return {rank: self._dump(rank, calls[rank][: issued[rank]], over[rank]) for rank in calls}

    def _issue(self, calls: _Calls, issued: dict[int, int], over: _Over) -> bool:
        """Have each host call what it may. Returns whether one did."""
        before = dict(issued)
        for rank, own in calls.items():
            most = min(len(own), self.host_stops.get(rank, len(own)))
            done = next((at for at in range(len(own)) if at not in over[rank]), len(own))
            issued[rank] = max(issued[rank], min(most, done + self.ahead))
        return issued != before

    def _run(
        self, calls: _Calls, issued: dict[int, int], over: _Over, places: Collection[_Ends]
    ) -> bool:
        """Have devices end what all have begun. Returns whether one did."""
        moves = False
        for ends in places:
            if ends[0][1] not in over[ends[0][0]] and all(
                at < min(issued[rank], self.device_stops.get(rank, at + 1))
                and over[rank].issuperset(calls[rank][at].after)
                for rank, at in ends
            ):
                moves = True
                for rank, at in ends:
                    over[rank].add(at)
        return moves

    def _dump(self, rank: int, calls: list[_Call], over: set[int]) -> dict[str, Any]:
        groups = sorted({one.group for one in self.calls(rank)}, key=_number)
        names = {group: str(_number(group)) for group in groups}
        seen = {at for at in over if at < self.unseen.get(rank, at + 1)}
        entries = []
        for at, one in enumerate(calls):
            if at in seen:
                continue
            number, arrow = one.place[2], "->" if one.name == "send" else "<-"
            own = one.group[1].index(rank)
            ends = "" if one.peer is None else f" {own}{arrow}{one.group[1].index(one.peer)}"
            entries.append(
                {
                    "record_id": at + 1000, "pg_id": groups.index(one.group),
                    "process_group": (names[one.group], one.group[0]),
                    "collective_seq_id": 0 if ends else number, "p2p_seq_id": number,
                    "profiling_name": f"nccl:{one.name}{ends}", "input_sizes": [[8]],
                    "input_dtypes": ["Float"], "output_sizes": [[8]], "output_dtypes": ["Float"],
                    "state": "scheduled", "time_created_ns": _START_NS + at * 1_000_000 + rank,
                    "time_discovered_started_ns": None, "time_discovered_completed_ns": None,
                    "retired": False, "timeout_ms": 600_000, "is_p2p": bool(ends),
                }
            )  # fmt: skip
        status = {}
        for number, group in enumerate(groups):
            own_calls = [at for at, one in enumerate(calls) if one.group == group]
            done = next((n for n, at in enumerate(own_calls) if at not in seen), len(own_calls))
            status[str(number)] = {
                "last_enqueued_collective": len(own_calls), "last_started_collective": -1,
                "last_completed_collective": done,
            }  # fmt: skip
        return {
            "version": "2.9",
            "pg_config": {
                names[group]: {"name": names[group], "desc": group[0], "ranks": str(list(group[1]))}
                for group in groups
            },
            "pg_status": status,
            "entries": entries,
        }


def _number(group: _Group) -> int:
    """Its place in the order in which the groups were made."""
    return 100 * ("default_pg", "tensor", "experts", "pipeline").index(group[0]) + group[1][0]


def drawn(fault: str, seed: int, culprits: int = 1) -> tuple[QueuedJob, frozenset[int]]:
    """A job with this fault, and the ranks that caused it."""
    chance = random.Random(f"{fault} {seed}")
    tensor, data, stages = chance.choice(((2, 2, 4), (2, 2, 2), (4, 2, 2), (2, 4, 4), (1, 4, 4)))
    job = QueuedJob(tensor, data, stages, chance.randrange(3, 7), ahead=chance.choice((6, 20, 60)))
    ranks = chance.sample(range(job.world), culprits)
    for rank in ranks:
        count = len(job.calls(rank))
        at = chance.randrange(count // 5, count * 4 // 5)
        if fault == "host stops":
            job.host_stops[rank] = at
        elif fault == "device stops":
            job.device_stops[rank] = at
        else:
            job.unseen[rank], job.device_stops[rank] = at, at + chance.randrange(3, 12)
    return job, frozenset(ranks)
