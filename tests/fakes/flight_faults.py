"""Jobs with one or two faults, or none, drawn from a seed, with what an analyzer should say.

Each job has data, tensor and pipeline parallelism: per step and rank a transfer from the stage
before, two gathers of the tensor group, two reductions of the data group (one of them of several
tensors at once), a transfer to the next stage, and a reduction over all. Shape, steps, calls under
way, the size of the ring, the version and the backend's habits are drawn, too.
"""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tests.fakes import flight_dumps as fake

SHAPES = ((2, 2, 1), (4, 2, 1), (2, 4, 2), (4, 2, 2), (2, 8, 2), (2, 2, 4), (4, 8, 1))
"""Data, tensor and pipeline parallelism."""
VERSIONS = ("2.1", "2.4", "2.7", "2.9", "2.10")


@dataclass(frozen=True)
class Case:
    """A job, and the right answer."""

    fault: str
    job: fake.Job
    culprits: frozenset[int]
    """The ranks that caused it."""
    any_of: frozenset[int] = frozenset()
    """Where the dumps cannot tell which: naming all of these is right, too, as is silence."""
    most_calls: int | None = None
    """After how many calls the dumps are taken; None for when nothing moves any more."""
    age_ns: int = 600_000_000_000
    """How long after the last call."""


def draw(fault: str, seed: int) -> Case:
    """A case of this kind of fault."""
    chance = random.Random(f"{fault} {seed}")
    while True:
        case = FAULTS[fault](chance, _job(chance))
        if case is not None:
            return replace(case, fault=fault)


def dumps(case: Case, seed: int) -> dict[int, dict[str, Any]]:
    """One dump a rank."""
    return fake.play(case.job, seed=seed, most=case.most_calls)


def _job(chance: random.Random) -> fake.Job:
    data, tensor, pipeline = chance.choice(SHAPES)
    world = data * tensor * pipeline
    groups = fake.three_dimensions(data, tensor, pipeline)
    stages = [
        fake.Group(str(len(groups) + place), "pipeline", tuple(range(place, world, data * tensor)))
        for place in range(data * tensor)
    ]
    job = fake.Job(world, [*groups, *stages], {})
    of = {(rank, one.description): one for one in job.groups for rank in one.ranks}
    step = {rank: _step(rank, of, data * tensor, world) for rank in range(world)}
    steps = chance.randrange(3, 8)
    job.calls = {rank: step[rank] * steps for rank in range(world)}
    job.ahead = chance.choice((1, 1, 2, 4))
    job.starts_at_once = chance.random() < 0.7
    job.version = chance.choice(VERSIONS)
    job.ring = chance.choice((2000, 2000, 2000, 24))
    return job


def _step(
    rank: int, of: Mapping[tuple[int, str], fake.Group], stride: int, world: int
) -> list[fake.Call]:
    stages, whole = of[rank, "pipeline"], of[rank, "default_pg"]
    calls = []
    if rank - stride >= 0:
        calls.append(fake.Call(stages, "recv", ((8, 128),), peer=rank - stride))
    calls += [
        fake.Call(of[rank, "tensor"], "_all_gather_base", ((64, 32),)),
        fake.Call(of[rank, "data"], "all_reduce", ((512,),)),
        fake.Call(of[rank, "tensor"], "_all_gather_base", ((16, 32),)),
        fake.Call(of[rank, "data"], "all_reduce", ((256, 4),), parts=3),
    ]
    if rank + stride < world:
        calls.append(fake.Call(stages, "send", ((8, 128),), peer=rank + stride))
    return [*calls, fake.Call(whole, "all_reduce", ((1,),))]


def _collectives(job: fake.Job, rank: int, least: int = 2) -> list[int]:
    """Where a rank calls a collective with others, its first step left out."""
    calls = job.calls[rank]
    first = calls.index(calls[-1]) + 1
    return [
        at
        for at, one in enumerate(calls)
        if at >= first and one.peer is None and len(one.group.ranks) >= least
    ]


def _sequence(job: fake.Job, rank: int, at: int, group: fake.Group | None = None) -> int:
    """Which collective of its group, or of another one, a call is, or was the last before it."""
    group = group or job.calls[rank][at].group
    return sum(one.group is group and one.peer is None for one in job.calls[rank][: at + 1])


def _case(job: fake.Job, *culprits: int, any_of: frozenset[int] = frozenset()) -> Case:
    return Case("", job, frozenset(culprits), any_of)


def _never_joined(chance: random.Random, job: fake.Job) -> Case:
    rank = chance.randrange(job.world)
    fake.leave(job, rank, chance.choice(_collectives(job, rank)))
    return _case(job, rank)


def _never_joined_transfer(chance: random.Random, job: fake.Job) -> Case | None:
    rank = chance.randrange(job.world)
    transfers = [at for at, one in enumerate(job.calls[rank]) if one.peer is not None]
    if not transfers:
        return None
    fake.leave(job, rank, chance.choice(transfers))
    return _case(job, rank)


def _watchdog(chance: random.Random, job: fake.Job) -> Case:
    """Some of the ranks that wait have given up, and say that their collective is over."""
    case = _never_joined(chance, job)
    (culprit,) = case.culprits
    waiting = [rank for rank in range(job.world) if rank != culprit]
    job.timed_out = set(chance.sample(waiting, chance.randrange(1, len(waiting))))
    return case


def _overflow(chance: random.Random, job: fake.Job) -> Case:
    job.ring = chance.randrange(6, 12)
    return _never_joined(chance, job)


def _missing_culprit(chance: random.Random, job: fake.Job) -> Case:
    case = _never_joined(chance, job)
    job.without_dump = set(case.culprits)
    return case


def _missing_others(chance: random.Random, job: fake.Job) -> Case:
    """Some dumps are missing, and not of who caused it: nobody can tell these ranks apart."""
    case = _never_joined(chance, job)
    (culprit,) = case.culprits
    others = [rank for rank in range(job.world) if rank != culprit]
    job.without_dump = set(chance.sample(others, max(1, job.world // 16)))
    return case


def _differs(chance: random.Random, job: fake.Job, **changes: Any) -> Case | None:
    rank = chance.randrange(job.world)
    places = _collectives(job, rank, least=3)
    if not places:
        return None
    fake.change(job, rank, chance.choice(places), **changes)
    return _case(job, rank)


def _operation(chance: random.Random, job: fake.Job) -> Case | None:
    return _differs(chance, job, operation="reduce_scatter_tensor_coalesced", parts=1)


def _size(chance: random.Random, job: fake.Job) -> Case | None:
    return _differs(chance, job, sizes=((77, 3),))


def _dtype(chance: random.Random, job: fake.Job) -> Case | None:
    return _differs(chance, job, dtype="BFloat16")


def _order(chance: random.Random, job: fake.Job) -> Case | None:
    """Two calls of the same group in the other order."""
    rank = chance.randrange(job.world)
    places = _collectives(job, rank, least=3)
    calls = job.calls[rank]
    pairs = [(a, b) for a in places for b in places if a < b and calls[a].group is calls[b].group]
    pairs = [(a, b) for a, b in pairs if calls[a] != calls[b] and b - a < 4]
    if not pairs:
        return None
    a, b = chance.choice(pairs)
    calls[a], calls[b] = calls[b], calls[a]
    return _case(job, rank)


def _skipped(chance: random.Random, job: fake.Job) -> Case | None:
    rank = chance.randrange(job.world)
    places = _collectives(job, rank, least=3)
    places = [at for at in places if job.calls[rank][at].group.description != "default_pg"]
    if not places:
        return None
    fake.skip(job, rank, chance.choice(places))
    return _case(job, rank)


def _transfer_size(chance: random.Random, job: fake.Job) -> Case | None:
    rank = chance.randrange(job.world)
    transfers = [at for at, one in enumerate(job.calls[rank]) if one.peer is not None]
    if not transfers:
        return None
    at = chance.choice(transfers)
    peer = job.calls[rank][at].peer
    fake.change(job, rank, at, sizes=((9, 128),))
    return _case(job, rank, any_of=frozenset({rank, int(peer or 0)}))


def _ring_of_receives(chance: random.Random, job: fake.Job) -> Case:
    """All ranks of a group receive from the one before, and nobody sends."""
    group = chance.choice([one for one in job.groups if 3 <= len(one.ranks) <= 16] or job.groups)
    for place, rank in enumerate(group.ranks):
        call = fake.Call(group, "recv", ((4,),), peer=group.ranks[place - 1])
        job.calls[rank].insert(len(job.calls[rank]) // 2, call)
    job.ahead = 1
    return Case("", job, frozenset(group.ranks), frozenset(group.ranks))


def _circle(chance: random.Random, job: fake.Job) -> Case | None:
    """One rank calls the collectives of two groups in the other order, and waits in between."""
    job.ahead = 1
    rank = chance.randrange(job.world)
    calls = job.calls[rank]
    pairs = [
        at
        for at in _collectives(job, rank, least=3)
        if at + 1 < len(calls)
        and calls[at + 1].peer is None
        and calls[at + 1].group is not calls[at].group
        and len(calls[at + 1].group.ranks) >= 3
    ]
    if not pairs:
        return None
    fake.swap(job, rank, chance.choice(pairs))
    # The others may get by: then it is not a fault.
    is_stuck = any(made < len(job.calls[one]) for one, made in fake.reached(job).items())
    return _case(job, rank) if is_stuck else None


def _not_started(chance: random.Random, job: fake.Job) -> Case | None:
    rank = chance.randrange(job.world)
    places = _collectives(job, rank)
    if not places:
        return None
    at = chance.choice(places)
    job.unstarted = {(rank, job.calls[rank][at].group.name, _sequence(job, rank, at))}
    return _case(job, rank)


def _half_completed(chance: random.Random, job: fake.Job) -> Case | None:
    rank = chance.randrange(job.world)
    places = _collectives(job, rank, least=3)
    if not places:
        return None
    at = chance.choice(places)
    key = (job.calls[rank][at].group.name, _sequence(job, rank, at))
    job.half_over = {key: frozenset({rank})}
    return _case(job, rank)


def _device_stuck(chance: random.Random, job: fake.Job) -> Case | None:
    """A device ends nothing any more: collectives of several groups that it is in hang at once."""
    job.ahead = 4
    rank = chance.randrange(job.world)
    steps = _collectives(job, rank)
    groups = {job.calls[rank][at].group.name for at in steps}
    groups = {name for name in groups if name != "0"}
    if len(groups) < 2:
        return None
    at = chance.choice(steps[: len(steps) // 2])
    job.endless = set()
    for name in groups:
        next_at = next(a for a in steps if a >= at and job.calls[rank][a].group.name == name)
        job.endless.add((name, _sequence(job, rank, next_at)))
    return _case(job, rank)


def _endless(chance: random.Random, job: fake.Job) -> Case:
    """All ranks of a group have joined and started, and it does not end: any of them, or a link."""
    rank = chance.randrange(job.world)
    call_at = chance.choice(_collectives(job, rank))
    group = job.calls[rank][call_at].group
    job.endless = {(group.name, _sequence(job, rank, call_at))}
    return _case(job, rank, any_of=group.members)


def _two(chance: random.Random, job: fake.Job) -> Case | None:
    """Two ranks leave in the same step; both are waited for."""
    one, other = chance.sample(range(job.world), 2)
    step = len(job.calls[one]) - 1 - chance.randrange(len(job.calls[one]) // 2)
    share = step / len(job.calls[one])
    whole = {rank: list(calls) for rank, calls in job.calls.items()}
    for rank in (one, other):
        places = _collectives(job, rank)
        fake.leave(job, rank, min(places, key=lambda at: abs(at / len(job.calls[rank]) - share)))
    made = fake.reached(job)
    is_met = all(_is_missed(job, whole, rank, made) for rank in (one, other))
    return _case(job, one, other) if is_met else None


def _is_missed(
    job: fake.Job, whole: Mapping[int, list[fake.Call]], rank: int, made: Mapping[int, int]
) -> bool:
    """Whether a rank came as far as to leave, and somebody has called what it did not."""
    left_at = len(job.calls[rank])
    if made[rank] < left_at:
        return False
    group = whole[rank][left_at].group
    own = _sequence(job, rank, left_at - 1, group)
    return any(_sequence(job, one, made[one] - 1, group) > own for one in group.ranks)


def _two_kinds(chance: random.Random, job: fake.Job) -> Case | None:
    """One rank leaves, and in another group a rank calls something else."""
    case = _differs(chance, job, operation="broadcast")
    if case is None:
        return None
    (odd,) = case.culprits
    at = next(a for a, one in enumerate(job.calls[odd]) if one.operation == "broadcast")
    group = job.calls[odd][at].group
    others = sorted(set(range(job.world)) - group.members)
    if not others:
        return None
    gone = chance.choice(others)
    whole = {rank: list(calls) for rank, calls in job.calls.items()}
    fake.leave(job, gone, min(_collectives(job, gone), key=lambda a: abs(a - at)))
    made = fake.reached(job)
    number = _sequence(job, odd, at)
    is_met = all(_sequence(job, one, made[one] - 1, group) >= number for one in group.ranks)
    return _case(job, odd, gone) if is_met and _is_missed(job, whole, gone, made) else None


def _healthy_ended(chance: random.Random, job: fake.Job) -> Case:
    del chance
    return _case(job)


def _healthy_running(chance: random.Random, job: fake.Job) -> Case:
    """The dumps are taken in the middle, a moment after the last call."""
    calls = sum(map(len, job.calls.values()))
    most = chance.randrange(calls // 3, calls)
    return Case("", job, frozenset(), most_calls=most, age_ns=chance.randrange(900_000_000))


def _healthy_missing(chance: random.Random, job: fake.Job) -> Case:
    """It runs, and some dumps are missing."""
    job.without_dump = set(chance.sample(range(job.world), 1 + job.world // 8))
    return _healthy_running(chance, job)


FAULTS: Mapping[str, Callable[[random.Random, fake.Job], Case | None]] = {
    "never joined": _never_joined,
    "never joined a transfer": _never_joined_transfer,
    "never joined, watchdogs fired": _watchdog,
    "never joined, full rings": _overflow,
    "never joined, no dump of it": _missing_culprit,
    "never joined, no dumps of others": _missing_others,
    "another operation": _operation,
    "another size": _size,
    "another dtype": _dtype,
    "another order": _order,
    "a call left out": _skipped,
    "another size of a transfer": _transfer_size,
    "a ring of receives": _ring_of_receives,
    "a circle of groups": _circle,
    "stuck: not started": _not_started,
    "stuck: half completed": _half_completed,
    "stuck: a device in several groups": _device_stuck,
    "stuck: all have started": _endless,
    "two: both never joined": _two,
    "two: never joined, and operation": _two_kinds,
    "healthy: ended": _healthy_ended,
    "healthy: running": _healthy_running,
    "healthy: running, dumps missing": _healthy_missing,
}
