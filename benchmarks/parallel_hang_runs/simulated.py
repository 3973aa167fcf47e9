"""The same trainings without processes: `train.py` of all ranks in threads, over a made backend.

Its script is unchanged. What a rank calls waits as gloo or NCCL lets it wait, and is recorded as
their flight recorders do: gloo records neither transfers nor who is in a group, and each call waits
until it is over. With NCCL a whole step's calls are under way, and the rank waits for its loss. One
thread runs at a time, drawn by the seed, until no rank can go on; then the stacks are those of the
threads, with the arguments that py-spy would read. Cases are judged by all analyzers, with no other
evidence.
"""

import asyncio
import io
import itertools
import json
import random
import sys
import tempfile
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any
from unittest import mock

import torch

from benchmarks.parallel_hang_runs import train
from benchmarks.parallel_hang_runs.cases import drawn
from everstep.evidence.archive import ArchiveMember, pack
from tests.fakes import flight_dumps as fake
from tests.unit.attribution.cases import case
from tests.unit.attribution.evidence import judged

HANGS = (
    "other_branch", "other_norm", "alone_in_metrics", "compiles", "skips_sample",
    "waits_in_handler", "fewer_batches", "hung_kernel", "hung_kernel_locked", "wrong_split",
    "wrong_shape", "wrong_root", "wrong_peer",
)  # fmt: skip
"""The faults with which all ranks live on."""
ABORTS = frozenset({"wrong_split", "wrong_shape"})
"""Those that gloo ends by aborting a rank: only NCCL hangs."""
_DISTRIBUTED = "/opt/venv/lib/python3.12/site-packages/torch/distributed/distributed_c10d.py"
_MOST_STEPS = 9
"""A training that goes on after its fault has no hang."""
_LOCKED = "_launch_locked"


class _Over(BaseException):
    """Ends the thread of a rank."""


@dataclass(eq=False)
class _Work:
    """One call of one rank that its device has, or has had, to do."""

    rank: int
    played: fake._Played
    meeting: tuple[Any, ...]
    members: frozenset[int]
    alike: tuple[Any, ...]
    """What must agree between all ranks of a meeting."""
    pieces: list[tuple[int, int]] = field(default_factory=list)
    """The messages, from and to, one after the other, where a call is made of messages."""
    is_over: bool = False


@dataclass
class Simulated:
    """The evidence of a hang."""

    rank: int
    fault: str
    recorders: bytes
    stacks: bytes


class _Net:
    """Threads, queues of devices, and the meetings of their calls."""

    def __init__(self, world: int, seed: int, *, is_gloo: bool) -> None:
        self.world, self.is_gloo = world, is_gloo
        self.works: dict[int, list[_Work]] = {rank: [] for rank in range(world)}
        self.queues: dict[int, deque[_Work]] = {rank: deque() for rank in range(world)}
        self.groups: list[fake.Group] = []
        self.frames: dict[int, FrameType] = {}
        self.arguments: dict[int, Mapping[str, int]] = {}
        self.chance = random.Random(seed)
        self.is_closing = False
        self.goes_on = False
        self._turns = {rank: threading.Semaphore(0) for rank in range(world)}
        self._back = threading.Semaphore(0)
        self._needs: dict[int, Callable[[], bool]] = {}
        self._done: set[int] = set()
        self._now = fake.START_NS

    def play(self, run: Callable[[int], None]) -> None:
        threads = [threading.Thread(target=self._run, args=(run, rank)) for rank in self.queues]
        for rank, thread in enumerate(threads):
            self._needs[rank] = lambda: True
            thread.start()
        while ready := [rank for rank, need in sorted(self._needs.items()) if need()]:
            self._let(self.chance.choice(ready))
        self.frames = {
            rank: sys._current_frames()[thread.ident or 0] for rank, thread in enumerate(threads)
            if rank not in self._done
        }  # fmt: skip

    def close(self) -> None:
        self.is_closing = True
        for rank in [*self._needs]:
            self._let(rank)

    def _let(self, rank: int) -> None:
        del self._needs[rank]
        self._turns[rank].release()
        self._back.acquire()

    def _run(self, run: Callable[[int], None], rank: int) -> None:
        self._turns[rank].acquire()
        try:
            if not self.is_closing:
                run(rank)
        except _Over:
            pass
        finally:
            self._done.add(rank)
            self._back.release()

    def wait(self, rank: int, need: Callable[[], bool]) -> None:
        """Let others run until this rank may go on."""
        self._needs[rank] = need
        self._back.release()
        self._turns[rank].acquire()
        if self.is_closing:
            raise _Over

    def tick(self) -> int:
        self._now += self.chance.randrange(1, 400_000)
        return self._now

    def begin(self, work: _Work) -> None:
        self.works[work.rank].append(work)
        self.queues[work.rank].append(work)
        moved = {work.rank}
        while moved:
            moved = {it for rank in sorted(moved) for it in self._advance(rank)}

    def _heads(self, members: frozenset[int], meeting: tuple[Any, ...]) -> list[_Work]:
        heads = [self.queues[rank][0] for rank in members if self.queues[rank]]
        return [head for head in heads if head.meeting == meeting]

    def _advance(self, rank: int) -> set[int]:
        """End what can end at the head of a rank's queue; who may go on because of that."""
        if not self.queues[rank]:
            return set()
        head = self.queues[rank][0]
        head.played.state = "started" if not self.is_gloo else "scheduled"
        if head.pieces:
            return self._exchange(head)
        here = self._heads(head.members, head.meeting)
        if len(here) < len(head.members) or len({it.alike for it in here}) > 1:
            return set()
        return {it for work in here for it in self._end(work)}

    def _exchange(self, head: _Work) -> set[int]:
        """Messages of a collective that is made of them meet one by one."""
        while head.pieces:
            source, target = head.pieces[0]
            other = target if source == head.rank else source
            meet = self._heads(frozenset({other}), head.meeting)
            if not meet or head.pieces[0] not in meet[0].pieces[:1]:
                return set()
            del head.pieces[0], meet[0].pieces[0]
            if not meet[0].pieces:
                return self._end(meet[0]) | ({head.rank} if head.pieces else self._end(head))
        return self._end(head)

    def _end(self, work: _Work) -> set[int]:
        work.is_over, work.played.state = True, "completed"
        self.queues[work.rank].popleft()
        return {work.rank, *work.members}


class _Group(SimpleNamespace):
    fake: fake.Group

    def size(self) -> int:
        return len(self.fake.ranks)


class _Dist:
    """What `train.py` calls of torch.distributed."""

    def __init__(self, net: _Net, rank: int, groups: dict[tuple[Any, ...], fake.Group]) -> None:
        self.net, self.rank, self._groups = net, rank, groups
        self._made = 0
        self._counts: dict[Any, int] = {}
        self.ProcessGroup = _Group

    def init_process_group(self, *_: Any, **__: Any) -> None:
        self._default = self._group("default_pg", tuple(range(self.net.world)))

    def get_rank(self) -> int:
        return self.rank

    def new_group(
        self, ranks: Sequence[int] = (), *, group_desc: str = "undefined", **_: Any
    ) -> _Group:
        return self._group(group_desc, tuple(ranks) or tuple(range(self.net.world)))

    def _group(self, description: str, ranks: tuple[int, ...]) -> _Group:
        number, self._made = self._made, self._made + 1
        key = (number, ranks)
        if key not in self._groups:
            self._groups[key] = fake.Group(str(number), description, ranks)
            self.net.groups.append(self._groups[key])
        return _Group(fake=self._groups[key])

    def all_reduce(self, tensor: torch.Tensor, group: _Group | None = None) -> None:
        self._collective("all_reduce", tensor, group)

    def barrier(self) -> None:
        self._collective("all_reduce_barrier", torch.ones(1), None)

    def all_to_all_single(
        self, output: torch.Tensor, _: torch.Tensor, outputs: list[int], __: list[int],
        group: _Group,
    ) -> None:  # fmt: skip
        ranks = group.fake.ranks
        own = ranks.index(self.rank)
        # Sizes agree where what a rank expects of each is what that one sends.
        even = outputs == [output.numel() // len(ranks)] * len(ranks)
        self._collective("all_to_all", output, group, alike="even" if even else f"of {own}")

    def broadcast(self, tensor: torch.Tensor, src: int, group: _Group) -> None:
        root = group.fake.ranks.index(src)
        pieces = _tree(group.fake.ranks, root, self.rank) if self.net.is_gloo else ()
        self._collective("broadcast", tensor, group, alike=root, pieces=pieces, group_src=root)
        if not self.net.is_gloo:  # as `loss.item()` does
            self.net.wait(self.rank, lambda: not self.net.queues[self.rank])
        if self._counts[group.fake.name] > _MOST_STEPS:
            self.net.goes_on = True
            raise _Over

    def send(self, tensor: torch.Tensor, dst: int) -> None:
        self._transfer("send", tensor, dst, {"dst": dst, "group_dst": dst})

    def recv(self, tensor: torch.Tensor, src: int) -> None:
        self._transfer("recv", tensor, src, {"src": src})

    def _transfer(
        self, operation: str, tensor: torch.Tensor, peer: int, arguments: Mapping[str, int]
    ) -> None:
        ends = (self.rank, peer) if operation == "send" else (peer, self.rank)
        number = self._counts[ends] = self._counts.get(ends, 0) + 1
        call = fake.Call(self._default.fake, operation, ((tensor.numel(),),), peer=peer)
        self._begin(call, ("transfer", *ends, number), frozenset(ends), (), (), arguments)

    def _collective(
        self, operation: str, tensor: torch.Tensor, group: _Group | None, alike: Any = None,
        pieces: Sequence[tuple[int, int]] = (), **arguments: int,
    ) -> None:  # fmt: skip
        own = (group or self._default).fake
        self._counts[own.name] = self._counts.get(own.name, 0) + 1
        call = fake.Call(own, operation, ((tensor.numel(),),))
        same = (operation, tensor.numel(), alike)
        meeting = (own.name, self._counts[own.name])
        self._begin(call, meeting, own.members, same, pieces, arguments)

    def _begin(
        self, call: fake.Call, meeting: tuple[Any, ...], members: frozenset[int],
        alike: tuple[Any, ...], pieces: Sequence[tuple[int, int]], arguments: Mapping[str, int],
    ) -> None:  # fmt: skip
        transfers = sum(it.played.call.peer is not None for it in self.net.works[self.rank])
        played = fake._Played(
            self.rank, call, self._counts.get(call.group.name, 0), transfers, self.net.tick()
        )
        work = _Work(self.rank, played, meeting, members, alike, [*pieces])
        self.net.arguments[self.rank] = arguments
        self.net.begin(work)
        if self.net.is_gloo:
            self.net.wait(self.rank, lambda: work.is_over)


def _tree(ranks: Sequence[int], root: int, rank: int) -> list[tuple[int, int]]:
    """The messages of a rank in gloo's broadcast: a binomial tree, its root's first."""
    size, own = len(ranks), ranks.index(rank)
    virtual, messages = (own - root) % size, []
    bits = (size - 1).bit_length()
    mask = (1 << bits) - 1
    for bit in reversed(range(bits)):
        mask ^= 1 << bit
        other = virtual ^ (1 << bit)
        if virtual & mask or other >= size:
            continue
        peer = ranks[(other + root) % size]
        messages.append((peer, rank) if virtual & (1 << bit) else (rank, peer))
    return messages


def simulated(
    seed: int, shape: tuple[int, int, int], fault: str, *, is_gloo: bool
) -> Simulated | None:
    """The evidence of a training whose fault the seed draws; None if it does not hang."""
    drawn_case, world = drawn(seed, shape, fault), shape[0] * shape[1] * shape[2]
    net, groups = _Net(world, seed, is_gloo=is_gloo), dict[tuple[Any, ...], fake.Group]()
    own = threading.local()

    def run(rank: int) -> None:
        own.dist = _Dist(net, rank, groups)
        train.ParallelTraining(shape, drawn_case, folder).run()

    def stand() -> None:
        net.wait(drawn_case.rank, lambda: False)

    with tempfile.TemporaryDirectory() as name, _patched(own, stand):
        folder = Path(name)
        net.play(run)
        content = None
        if net.frames and not net.goes_on:
            locked = drawn_case.rank if fault == "hung_kernel_locked" else None
            content = Simulated(
                drawn_case.rank, fault, _recorders(net, locked), _stacks(net, locked)
            )
        net.close()
    return content


def outcome(seed: int, shape: tuple[int, int, int], fault: str, *, is_gloo: bool) -> str:
    """Right, hedged, silent or wrong; empty where the training does not hang.

    Hedged: the rank is one of at most four that are named.
    """
    with redirect_stdout(io.StringIO()):
        made = simulated(seed, shape, fault, is_gloo=is_gloo)
    if made is None:
        return ""
    contents = {"flight_recorder": made.recorders, "stacks": made.stacks}
    ranks = shape[0] * shape[1] * shape[2] // 2
    found = asyncio.run(judged(case(nodes=2, ranks=ranks, trigger="rank_stalled"), contents))
    if found.is_inconclusive or not found.ranks:
        return "silent"
    if found.ranks == (made.rank,):
        return "right"
    return "hedged" if made.rank in found.ranks and len(found.ranks) <= 4 else "wrong"


def score(
    runs: int, first: int, shape: tuple[int, int, int], *, is_gloo: bool, fault: str | None = None
) -> dict[str, Counter[str]]:
    """The outcomes of this number of hangs by fault, drawn as often as the cases say."""
    scores: dict[str, Counter[str]] = {}
    for seed in itertools.count(first):
        drawn_fault = drawn(seed, shape, fault).fault
        if drawn_fault not in HANGS or (is_gloo and drawn_fault in ABORTS):
            continue
        if said := outcome(seed, shape, drawn_fault, is_gloo=is_gloo):
            scores.setdefault(drawn_fault, Counter())[said] += 1
        if sum(one.total() for one in scores.values()) >= runs:
            return scores
    raise AssertionError


@contextmanager
def _patched(own: Any, stand: Callable[[], None]) -> Iterator[None]:
    def launch() -> None:
        stand()

    with (
        mock.patch.object(train, "dist", _PerThread(own)),
        mock.patch.object(train, "_compile_graph", partial(_wait_for_child, stand)),
        mock.patch.object(train, "_launch", launch),
        mock.patch.object(train, _LOCKED, launch),
    ):
        yield


def _wait_for_child(stand: Callable[[], None]) -> None:
    stand()


class _PerThread:
    def __init__(self, own: Any) -> None:
        self._own = own

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own.dist, name)


def _recorders(net: _Net, locked: int | None) -> bytes:
    job = fake.Job(net.world, net.groups, {})
    members = []
    for rank, works in net.works.items():
        if rank == locked:
            continue  # its answer needs the interpreter's lock
        dump = fake._dump(job, rank, [work.played for work in works])
        if net.is_gloo:
            dump |= {
                "entries": [_of_gloo(it) for it in dump["entries"] if not it["is_p2p"]],
                "pg_config": {"": {"desc": "", "name": "", "ranks": "[]"}},
            }
        members.append(ArchiveMember(rank, "json", json.dumps(dump).encode()))
    return pack(members, {})


def _of_gloo(entry: dict[str, Any]) -> dict[str, Any]:
    name = entry["profiling_name"].replace("nccl:", "gloo:")
    times = {"time_discovered_started_ns": 0, "time_discovered_completed_ns": 0}
    return {**entry, **times, "profiling_name": name, "state": "scheduled", "p2p_seq_id": 0}


def _stacks(net: _Net, locked: int | None) -> bytes:
    members: list[ArchiveMember] = []
    for rank, innermost in net.frames.items():
        frames: list[dict[str, Any]] = []
        frame: FrameType | None = innermost
        while frame is not None:
            code = frame.f_code
            if code.co_filename == train.__file__:
                frames.append(_frame(code.co_qualname, train.__file__, frame.f_lineno))
            elif code.co_name == "_wait_for_child":
                frames.append(_frame("Popen._wait", "/usr/lib/python3.12/subprocess.py", 2047))
            elif code.co_name == "launch":
                frames.append(_frame("_launch", train.__file__, 240))
            elif frame.f_locals.get("self").__class__ is _Dist and code.co_name[0] != "_":
                frames.append(_call(net, rank, code.co_name))
            frame = frame.f_back
        thread = {
            "pid": 7, "thread_id": 1, "thread_name": "MainThread", "os_thread_id": 7,
            "active": False, "owns_gil": rank == locked, "frames": frames,
        }  # fmt: skip
        members.append(ArchiveMember(rank, "json", json.dumps([thread]).encode()))
    return pack(members, {})


def _call(net: _Net, rank: int, name: str) -> dict[str, Any]:
    if not net.is_gloo:  # it waits for its device
        return _frame("synchronize", "/opt/venv/site-packages/torch/cuda/__init__.py", 1000)
    told = [{"name": key, "repr": str(value)} for key, value in net.arguments[rank].items()]
    return {**_frame(name, _DISTRIBUTED, 3252), "locals": told}


def _frame(name: str, file: str, line: int) -> dict[str, Any]:
    return {"name": name, "filename": file, "short_filename": None, "line": line, "module": None}
