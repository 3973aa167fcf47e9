"""What analyzers read out of kernel logs, and of lost workers: whose line it is."""

import asyncio
from typing import Any

import pytest
from msgspec.structs import replace

from everstep.evidence.archive import ArchiveMember, pack
from everstep.messages import BlobRef, EvidencePiece, RankEnd
from everstep_services.attribution.analyzers.runner import BUILT_IN, AnalyzerRunner
from everstep_services.attribution.domain.combiner import combine
from tests.unit.attribution.cases import case, end, lost_peer, raised
from tests.unit.attribution.evidence import judged

KERNEL = b"[1.0] NVRM: Xid (PCI:0000:3b:00): 79, pid=71, GPU has fallen off the bus.\n"


async def test_a_kernel_that_lost_its_gpu_names_its_node() -> None:
    ends = (lost_peer(0), lost_peer(1))
    found = await judged(case(ends=ends), {"kernel_log": KERNEL})
    assert (found.cause, found.nodes, found.advice) == ("gpu", ("n1",), "restart_without")


LAUNCH = "CUDA error: unspecified launch failure"


@pytest.mark.parametrize(
    ("pids", "ranks"),
    [
        ({3: 71, 2: 72}, (3,)),  # the kernel's line has the process
        ({3: 5}, (3,)),  # of another namespace, and only one rank died so
        ({3: 5, 2: 6}, ()),
    ],
)
async def test_a_device_that_rank_and_kernel_report_is_the_cause(
    pids: dict[int, int], ranks: tuple[int, ...]
) -> None:
    """Both are evidence; where several ranks died, the kernel's process tells which device."""
    ends = [raised(rank, "AcceleratorError", LAUNCH, pid=pid) for rank, pid in pids.items()]
    without = await judged(case(ends=(lost_peer(0), *ends)), {})
    assert without.cause == "user_code"
    found = await judged(case(ends=(lost_peer(0), *ends)), {"kernel_log": KERNEL})
    assert (found.cause, found.nodes, found.advice) == ("gpu", ("n1",), "restart_without")
    assert found.ranks == ranks
    if ranks:
        facts = {claim.fact for claim, weight in found.evidence if weight > 0}
        assert {"f-kernel_log", f"end-{ranks[0]}"} <= facts


async def test_a_device_of_another_node_explains_no_rank() -> None:
    ends = (lost_peer(2), raised(0, "AcceleratorError", LAUNCH, pid=71))
    found = await judged(case(ends=ends), {"kernel_log": KERNEL})
    assert 0 not in found.ranks or found.cause != "gpu"


SEGFAULT = b"[ 2531.724919] python[5547]: segfault at 0 ip 00007fa98a385ad8 error 4 in libc.so.6\n"


async def test_a_crash_in_the_kernels_log_may_be_of_another_job() -> None:
    """The log is of the whole node: it counts where a rank ended in that way."""
    root = raised(3, "ValueError", "batch 17 has no labels")
    found = await judged(case(ends=(lost_peer(0), root)), {"kernel_log": SEGFAULT})
    assert (found.cause, found.ranks) == ("user_code", (3,))
    found = await judged(case(trigger="rank_stalled"), {"kernel_log": SEGFAULT})
    assert found.is_inconclusive
    crashed = end(3, how="signal", exit_code=None, signal="SIGSEGV")
    found = await judged(case(ends=(lost_peer(0), crashed)), {"kernel_log": SEGFAULT})
    assert (found.kind, found.ranks) == ("segfault", (3,))
    assert "another process" not in found.reason


def by_signal(rank: int, name: str, pid: int, **more: Any) -> RankEnd:
    return end(rank, how="signal", exit_code=None, signal=name, pid=pid, **more)


@pytest.mark.parametrize(
    ("ends", "kind", "ranks"),
    [
        # the same process
        ((by_signal(3, "SIGSEGV", 5547, is_pid_of_host=True), lost_peer(0)), "segfault", (3,)),
        ((by_signal(3, "SIGSEGV", 5547), by_signal(2, "SIGSEGV", 9)), "segfault", (2, 3)),
        # another process: what ended the rank remains as it is
        ((by_signal(3, "SIGBUS", 5547), lost_peer(0)), "bus_error", (3,)),
        ((by_signal(3, "SIGBUS", 5, is_pid_of_host=True), lost_peer(0)), "bus_error", (3,)),
        ((by_signal(3, "SIGKILL", 5, is_pid_of_host=True), lost_peer(0)), "killed", (3,)),
        ((by_signal(0, "SIGSEGV", 5547), lost_peer(2)), "segfault", (0,)),  # of another node
    ],
)
async def test_a_crash_in_the_kernels_log_is_a_ranks_only_by_node_process_and_signal(
    ends: tuple[RankEnd, ...], kind: str, ranks: tuple[int, ...]
) -> None:
    found = await judged(case(ends=ends), {"kernel_log": SEGFAULT})
    assert (found.kind, found.ranks) == (kind, ranks)
    own = [claim for claim, weight in found.evidence if claim.analyzer == "logs" and weight > 0.5]
    assert bool(own) == (ends[0].signal == "SIGSEGV" and ends[0].node == "n1")


@pytest.mark.parametrize(
    "line",
    [
        "Out of memory: Killed process 900 (java)",
        "oom-kill:task=java,pid=900,uid=0",
        # whose request began it, and only then who was killed
        "java invoked oom-killer: order=0\n[ 2531.8] Out of memory: Killed process 900 (java)",
    ],
)
async def test_a_process_that_the_kernel_killed_for_memory_may_be_of_somebody_else(
    line: str,
) -> None:
    kernel = {"kernel_log": f"[ 2531.7] {line}\n".encode()}
    rank = by_signal(3, "SIGKILL", 71, is_pid_of_host=True)
    found = await judged(case(ends=(lost_peer(0), rank)), kernel)
    assert (found.cause, found.kind, found.ranks) == ("unknown", "killed", (3,))
    own = await judged(case(ends=(lost_peer(0), replace(rank, pid=900))), kernel)
    assert (own.cause, own.kind, own.ranks) == ("host", "host_oom", (3,))
    # Its control group counts kills of any kind, and has counted none: the line is a hint.
    contained = await judged(case(ends=(lost_peer(0), replace(rank, is_pid_of_host=False))), kernel)
    assert (contained.cause, [other.cause for other in contained.others]) == ("unknown", ["host"])
    assert contained.others[0].confidence > found.others[0].confidence


async def test_a_kernels_line_counts_though_another_nodes_kernel_has_one_before() -> None:
    """Each kernel's log is read by itself: n0's killed a process that is nobody's here."""
    of = case(ends=(lost_peer(0), by_signal(3, "SIGKILL", 900, is_pid_of_host=True)))
    lines = {"n0": b"[ 2530.1] Out of memory: Killed process 7 (java)\n",
             "n1": b"[ 2531.7] Out of memory: Killed process 900 (python)\n"}  # fmt: skip
    pieces = tuple(
        EvidencePiece(evidence="kernel_log", node=node, fact=node,
                      blob=BlobRef(job="j", id=node, size_bytes=1, parts=1))
        for node in lines
    )  # fmt: skip

    async def fetch(ref: BlobRef) -> bytes:
        return lines[ref.id]

    heard = await AnalyzerRunner(BUILT_IN).run(replace(of, evidence=pieces), fetch, 60.0)
    found = await asyncio.to_thread(combine, of, heard.claims, heard.missing)
    assert (found.cause, found.kind, found.ranks) == ("host", "host_oom", (3,))


KILLED = "RuntimeError: DataLoader worker (pid 71) is killed by signal: {}. "
FOUND_GONE = "DataLoader worker (pid(s) 71) exited unexpectedly"


@pytest.mark.parametrize("is_found_gone", [True, False])
@pytest.mark.parametrize(
    ("how", "kind"),
    [
        ("Killed", "worker_killed"), ("Terminated", "worker_killed"), ("Hangup", "worker_killed"),
        ("User defined signal 1", "worker_killed"), ("Segmentation fault", "segfault"),
        ("", "worker_killed"),
    ],
)  # fmt: skip
async def test_a_signal_that_ends_a_worker_of_the_loader_is_no_fault_of_the_data(
    how: str, kind: str, *, is_found_gone: bool
) -> None:
    """torch reports the signal, or only that the worker is gone, with the signal as its cause."""
    cause = KILLED.format(how) if how else "_queue.Empty"
    trace = f'Traceback (most recent call last):\n  File "/a/train.py", line 8, in step\n{cause}\n'
    if is_found_gone or not how:
        link = "The above exception was the direct cause of the following exception:"
        trace += f"\n{link}\n\n{trace.partition(cause)[0]}RuntimeError: {FOUND_GONE}\n"
    text = FOUND_GONE if is_found_gone or not how else cause.removeprefix("RuntimeError: ")
    lost = raised(3, "RuntimeError", text, traceback=trace)
    of = case(ends=(lost_peer(0), lost))
    log = {"log": pack([ArchiveMember(3, "txt", trace.encode())], {})}
    for evidence in ({}, log):
        found = await judged(of, evidence)
        assert (found.cause, found.kind, found.ranks) == ("unknown", kind, (3,))


async def test_where_a_launcher_ends_all_after_a_failure_a_lost_worker_is_no_cause() -> None:
    text = KILLED.format("Terminated").removeprefix("RuntimeError: ")
    ended = raised(2, "RuntimeError", text, after_s=1.0)
    found = await judged(case(ends=(raised(3, "ValueError", "bad batch"), ended)), {})
    assert (found.cause, found.ranks) == ("user_code", (3,))
