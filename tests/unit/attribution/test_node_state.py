"""What the state of a node tells: its GPUs, its memory, its processes, and the pages of ranks."""

import json
from collections.abc import Mapping

import pytest
from msgspec.structs import replace

from everstep.evidence.archive import ArchiveMember, pack
from everstep.messages import RankEnd, Stall
from tests.unit.attribution.cases import case, end, lost_peer, raised
from tests.unit.attribution.evidence import ALL_REDUCE, HANG, KILLED, judged, stack


@pytest.mark.parametrize(
    ("state", "cause"), [("T (stopped)", "host"), ("t (tracing stop)", "user_code")]
)
async def test_a_rank_that_somebody_has_stopped_is_the_hosts(state: str, cause: str) -> None:
    """Its own stack looks as if it were busy, and others have stalled before it."""
    standing = (("step", "/home/ann/train.py", 40),)
    members = [ArchiveMember(rank, "json", stack(*ALL_REDUCE)) for rank in (0, 1, 2)]
    members.append(ArchiveMember(3, "json", stack(*standing)))
    status = f"Name:\tpython\nState:\t{state}\nTgid:\t7"
    processes = {"ranks": {"2": {"status": "State:\tS"}, "3": {"pid": "7", "status": status}}}
    contents = {"stacks": pack(members, {}), "process": json.dumps(processes).encode()}
    found = await judged(HANG, contents)
    assert (found.cause, found.ranks, found.nodes) == (cause, (3,), ())
    assert not found.is_inconclusive


async def test_a_rank_that_is_stopped_and_another_that_is_killed_are_both_culprits() -> None:
    processes = {"ranks": {"1": {"pid": "7", "status": "State:\tT (stopped)"}}}
    of = case(ends=(replace(KILLED, rank=2), lost_peer(3)))
    found = await judged(of, {"process": json.dumps(processes).encode()})
    assert (found.ranks, found.others, found.is_inconclusive) == ((1, 2), (), False)
    assert found.reason.endswith("rank 3 lost another rank"), "it may have lost either"
    assert found.retry == "unknown", "that of the killed rank"


def gpu_state(**reading: object) -> bytes:
    gpu = {"index": 3, "uuid": "GPU-3", "gone": None, **reading}
    return json.dumps({"said": [], "gpus": [gpu]}).encode()


@pytest.mark.parametrize(
    ("reading", "words"),
    [
        ({"gone": "GPU 3 is lost"}, "GPU 3 is lost"),
        ({"recovery_action": 1}, "it must be reset"),
        ({"has_remap_failed": True}, "no spare left"),
        ({"uncorrected": 2}, "2 uncorrectable memory errors"),
        ({"fabric": {"is_joined": True, "is_route_bad": True}}, "route through the NVLink fabric"),
    ],
)
async def test_a_gpu_in_a_bad_state_names_its_node(
    reading: Mapping[str, object], words: str
) -> None:
    ends = (lost_peer(0), lost_peer(1))
    found = await judged(case(ends=ends), {"gpu": gpu_state(**reading)})
    assert (found.cause, found.nodes, found.advice) == ("gpu", ("n1",), "restart_without")
    assert words in found.reason


async def test_a_gpu_that_is_slowed_ends_no_training() -> None:
    slow = gpu_state(slowed_by=["heat (hardware)"], temperature_c=92)
    found = await judged(case(ends=(lost_peer(0),)), {"gpu": slow})
    assert found.is_inconclusive
    root = raised(3, "ValueError", "bad batch")
    found = await judged(case(ends=(lost_peer(0), root)), {"gpu": slow})
    assert (found.cause, found.nodes) == ("user_code", ())


def groups(killed: int, used: int = 100, pressure: float = 0.0) -> bytes:
    files = {
        "memory.events": f"low 0\noom 3\noom_kill {killed}\noom_group_kill 0",
        "memory.current": str(used),
        "memory.max": "1000",
        "memory.pressure": f"some avg10={pressure:.2f} avg60=0.00 total=7\nfull avg10=0.00",
    }
    return json.dumps({"ranks": {}, "groups": {"/sys/fs/cgroup": files}, "host": {}}).encode()


WORKER = raised(3, "RuntimeError", "DataLoader worker (pid 71) is killed by signal: Killed. ")


@pytest.mark.parametrize(
    ("one", "group", "cause"),
    [
        (KILLED, groups(0, used=990), "unknown"),
        (KILLED, groups(1), "unknown"),  # as likely of long ago: its own end was not counted
        (KILLED, groups(1, used=980), "host"),
        (KILLED, groups(1, pressure=35.0), "host"),
        (WORKER, groups(0), "unknown"),
        (WORKER, groups(1), "host"),
        (raised(3, "ValueError", "bad batch"), groups(9, used=999), "user_code"),
    ],
)
async def test_a_kill_for_memory_is_the_hosts_where_the_kernel_counted_one(
    one: RankEnd, group: bytes, cause: str
) -> None:
    """No node is to blame for the memory that a rank takes."""
    found = await judged(case(ends=(lost_peer(0), one)), {"cgroup": group})
    assert (found.cause, found.ranks, found.nodes) == (cause, (3,), ())
    assert not found.is_inconclusive


def memory(total_gib: int, free_gib: int, shared_free: int = 90) -> bytes:
    meminfo = f"MemTotal: {total_gib << 20} kB\nMemFree: 1 kB\nMemAvailable: {free_gib << 20} kB"
    shared = {"size_bytes": 100, "free_bytes": shared_free}
    return json.dumps({"host": {"meminfo": meminfo}, "shared_memory": shared}).encode()


def refused(gib: int) -> RankEnd:
    text = f"DefaultCPUAllocator: can't allocate memory: you tried to allocate {gib << 30} bytes."
    return raised(3, "RuntimeError", text)


@pytest.mark.parametrize(
    ("one", "cause", "kind"),
    [
        (refused(8), "host", "host_oom"),
        (refused(100), "user_code", "absurd_size"),  # the node has 24 GiB
        (refused(1 << 22), "user_code", "absurd_size"),
        (raised(3, "MemoryError", ""), "host", "host_oom"),
    ],
)
async def test_memory_that_was_refused_while_some_was_free_is_told_as_that(
    one: RankEnd, cause: str, kind: str
) -> None:
    """A7.2: a limit of the process, or a wrong size, is no host without memory."""
    text = one.error_text or "MemoryError"
    log = pack([ArchiveMember(3, "txt", f"RuntimeError: {text}\n".encode())], {})
    found = await judged(case(ends=(lost_peer(0), one)), {"cgroup": memory(24, 20), "log": log})
    assert (found.cause, found.kind, found.ranks) == (cause, kind, (3,))
    assert "no memory left" not in found.reason
    assert any(weight < 0 for _, weight in found.evidence) == (cause == "host")
    short = await judged(case(ends=(lost_peer(0), one)), {"cgroup": memory(24, 1), "log": log})
    assert short.cause == cause
    assert found.confidence < short.confidence or cause != "host"
    assert found.confidence < 0.9 or cause != "host"


@pytest.mark.parametrize(("free", "cause"), [(90, "unknown"), (1, "host")])
async def test_a_bus_error_is_the_hosts_only_where_shared_memory_is_full(
    free: int, cause: str
) -> None:
    """A7.2: a file that is cut short under a mapping ends a rank in the same way."""
    of = case(ends=(end(3, how="signal", exit_code=None, signal="SIGBUS"), lost_peer(0)))
    log = pack([ArchiveMember(3, "txt", b"Fatal Python error: Bus error\n")], {})
    found = await judged(of, {"cgroup": memory(24, 20, shared_free=free), "log": log})
    assert (found.cause, found.kind, found.ranks, found.nodes) == (cause, "bus_error", (3,), ())
    assert ("/dev/shm is full" in found.reason) == (free == 1)
    assert not found.is_inconclusive


def pages(*phases: tuple[str, float], codes: Mapping[int, int] | None = None) -> bytes:
    ranks = {
        str(rank): {
            "page": {"phase": phase, "progress_s": at_s, "exit_code": (codes or {}).get(rank)}
        }
        for rank, (phase, at_s) in enumerate(phases)
    }
    return json.dumps({"now_s": 9.0, "ranks": ranks}).encode()


async def test_a_script_that_ended_well_before_the_others_lost_it_has_left_them() -> None:
    """Exit code 0 amid the training, where its process had not yet gone (A7.1)."""
    lost = (lost_peer(0), lost_peer(2), lost_peer(3))
    early = pages(("ended", 8.0), ("ended", 7.5), ("ended", 8.1), ("script", 7.9))
    found = await judged(case(ends=lost), {"page": early})
    assert (found.cause, found.kind, found.ranks) == ("user_code", "left_early", (1,))
    late = pages(("ended", 8.0), ("ended", 8.5), ("ended", 8.1), ("script", 7.9))
    assert (await judged(case(ends=lost), {"page": late})).kind != "left_early"
    # Rank 3 ended after its page was read: what the page tells is its last step.
    going_on = pages(("script", 7.0), ("ended", 7.5), ("script", 7.1), ("script", 7.2))
    assert (await judged(case(ends=lost), {"page": going_on})).kind == "left_early"
    root = raised(3, "ValueError", "batch 17 has no labels")
    found = await judged(case(ends=(lost_peer(0), root)), {"page": early})
    assert (found.kind, found.ranks) == ("python_exception", (3,))


@pytest.mark.parametrize(
    ("codes", "kind", "words"),
    [
        ({1: 0}, "left_early", "the script of rank 1 had ended with code 0 while others"),
        ({1: 1}, "exit_code", "the script of rank 1 had ended with code 1 while others"),
        ({}, "left_early", "the script of rank 1 had ended, with an unknown code, while others"),
    ],
)
async def test_the_exit_code_of_a_rank_that_nobody_reported_is_that_of_its_page(
    codes: Mapping[int, int], kind: str, words: str
) -> None:
    """A script that raised and exits slowly had never exited with 0."""
    phases = pages(("ended", 8.0), ("ended", 7.5), ("ended", 8.1), ("script", 7.9), codes=codes)
    lost = (lost_peer(0), lost_peer(2), lost_peer(3))
    found = await judged(case(ends=lost), {"page": phases})
    assert (found.cause, found.kind, found.ranks) == ("user_code", kind, (1,))
    assert words in found.reason
    assert "exited with 0" not in found.reason


async def test_a_rank_that_left_early_is_named_where_the_others_wait_for_it() -> None:
    """`sys.exit(0)`, and its process does not go: nobody has lost it, and all others stall."""
    waits = tuple(
        Stall(rank=rank, node=f"n{rank // 2}", fact=f"stall-{rank}", round=1, phase="step",
              waited_s=9.0, limit_s=8.0, blocked_in="all_reduce", is_waiting_for_ranks=True)
        for rank in (0, 2, 3)
    )  # fmt: skip
    standing = pages(
        ("script", 8.0), ("ended", 8.5), ("script", 8.1), ("script", 8.2), codes={1: 0}
    )
    of = case(trigger="rank_stalled", stalls=waits)
    found = await judged(of, {"page": standing})
    assert (found.cause, found.kind, found.ranks) == ("user_code", "left_early", (1,))


async def test_the_only_rank_that_all_others_lost_is_named_where_it_tells_nothing() -> None:
    """A7.2: its standard error was closed, so that nobody has read its exception."""
    lost = (lost_peer(0), lost_peer(2), lost_peer(3))
    phases = (("ended", 8.0), ("script", 7.5), ("ended", 8.1), ("ended", 7.9))
    found = await judged(case(ends=lost), {"page": pages(*phases)})
    assert (found.cause, found.kind, found.ranks) == ("unknown", "lost_by_all", (1,))
    assert not found.is_inconclusive
    two = await judged(case(ends=lost[:2]), {"page": pages(*phases)})
    assert two.kind != "lost_by_all"
