"""What analyzers read out of evidence: recorders, stacks, logs, kernels; also where it is bad."""

import asyncio
import json
import time
from collections.abc import Mapping

import pytest
from msgspec.structs import replace

from everstep.evidence.archive import ArchiveMember, pack, unpack
from everstep.messages import EvidencePiece, NodeSign, Stall
from everstep_services.attribution.analyzers import nvrx
from everstep_services.attribution.analyzers.runner import BUILT_IN, AnalyzerRunner
from everstep_services.attribution.domain.combiner import combine
from everstep_services.attribution.flight_recorder import faults
from tests.fakes import flight_dumps as fake
from tests.fakes import nccl_ras
from tests.unit.attribution.cases import NOON, case, end, lost_peer, raised
from tests.unit.attribution.evidence import (
    ALL_REDUCE,
    HANG,
    KILLED,
    STEP,
    judged,
    recorders,
    stack,
    stalls,
    with_evidence,
)

TRACEBACK = b"""Traceback (most recent call last):
  File "/home/ann/train.py", line 31, in step
    labels = batch["labels"]
KeyError: 'labels'
"""


@pytest.mark.parametrize(
    ("head", "part"),
    [
        ("Exception in thread prefetch:", "its thread prefetch"),
        ("Process SpawnProcess-3:", "its child process SpawnProcess-3"),
        ("Task exception was never retrieved\nfuture: <Task finished>", "an asyncio task"),
    ],
)
async def test_a_part_of_a_stalled_rank_that_an_exception_ended_is_the_cause(
    head: str, part: str
) -> None:
    log = pack([ArchiveMember(2, "txt", f"{head}\n".encode() + TRACEBACK)], {})
    found = await judged(
        case(trigger="rank_stalled", stalls=stalls(2)),
        {"log": log, "flight_recorder": recorders(2, 3)},
    )
    assert (found.cause, found.ranks) == ("user_code", (2,))
    assert f"rank 2: {part} ended by an exception: KeyError: 'labels'" in found.reason
    assert len([claim for claim, _ in found.evidence if claim.analyzer == "logs"]) == 1
    crashed = await judged(case(ends=(raised(1, "ValueError", "bad batch"),)), {"log": log})
    assert (crashed.ranks, crashed.kind) == ((1,), "python_exception")
    caught = pack([ArchiveMember(1, "txt", TRACEBACK)], {})
    dumps = {"log": caught, "flight_recorder": recorders(2, 3)}
    assert (await judged(case(trigger="rank_stalled", stalls=stalls(2)), dumps)).ranks == (2,)


async def test_a_dead_thread_is_less_than_the_cause_where_the_main_thread_waits_for_none() -> None:
    """A lock of its own holds it; a thread that feeds a queue would leave it in `get`."""
    head = b"Exception in thread metrics:\n"
    log = pack([ArchiveMember(2, "txt", head + TRACEBACK)], {})
    case_of_2 = case(trigger="rank_stalled", stalls=stalls(2))
    others = [ArchiveMember(rank, "json", stack(*ALL_REDUCE)) for rank in (0, 1, 3)]
    alone = ArchiveMember(2, "json", stack(STEP))
    in_get = ArchiveMember(2, "json", stack(("get", "/lib/python3.11/queue.py", 171), STEP))
    own = await judged(case_of_2, {"log": log, "stacks": pack([*others, alone], {})})
    assert own.ranks == (2,)
    assert "train.py:40" in own.reason
    fed = await judged(case_of_2, {"log": log, "stacks": pack([*others, in_get], {})})
    assert "its thread metrics ended by an exception" in fed.reason


@pytest.mark.parametrize("name", ["SIGTERM", "SIGKILL", "SIGSEGV"])
async def test_an_exception_that_was_caught_is_not_the_cause_of_a_later_signal(name: str) -> None:
    """One that ends a script is on record; a script may write any other, and go on."""
    killed = end(1, how="signal", exit_code=None, signal=name)
    log = {"log": pack([ArchiveMember(1, "txt", TRACEBACK)], {})}
    verdict = await judged(case(ends=(killed, lost_peer(0), lost_peer(2))), log)
    assert verdict.ranks == (1,)
    assert verdict.kind != "python_exception"
    assert "KeyError" not in verdict.reason


async def test_who_never_came_to_a_collective_is_named_from_the_recorders() -> None:
    found = await judged(HANG, {"flight_recorder": recorders(2, 3)})
    assert (found.cause, found.ranks, found.nodes) == ("user_code", (2,), ())
    assert found.kind == "never_joined"


async def test_ranks_that_were_still_on_their_way_when_another_one_failed_are_not_accused() -> None:
    dumps = {"flight_recorder": recorders(3, 3, others=(0, 1))}
    failed = await judged(case(ends=(raised(3, "IndexError", "no batch 7"),)), dumps)
    assert (failed.cause, failed.ranks) == ("user_code", (3,))
    assert not [claim.says for claim, _ in failed.evidence if {0, 1, 2} & set(claim.ranks)]
    assert "rank 3 had ended while others waited in" in " ".join(
        it.says for it, _ in failed.evidence
    )
    hung = await judged(HANG, dumps)
    assert "rank 2 alone entered" in " ".join(claim.says for claim, _ in hung.evidence)


async def test_a_rank_that_nccl_finds_out_of_step_is_named_by_its_number_in_the_world() -> None:
    """In a group of two ranks it has another number."""
    all_ranks = nccl_ras.communicator({rank: {"AllReduce": 5} for rank in range(4)})
    pair = nccl_ras.communicator({0: {"AllGather": 7}, 1: {"AllGather": 6}}, members=(1, 3))
    found = await judged(HANG, {"nccl_ras": nccl_ras.answer(all_ranks, pair)})
    assert found.ranks == (3,)
    assert "NCCL: rank 3 launched 6 AllGather, and most of the others 7" in found.reason
    assert (found.cause, found.kind) == ("user_code", "ras_behind")
    unknown = await judged(HANG, {"nccl_ras": nccl_ras.answer(pair)})
    assert unknown.ranks == ()
    silent = nccl_ras.communicator({rank: {} for rank in range(3)}, (3,))
    assert (await judged(HANG, {"nccl_ras": nccl_ras.answer(silent)})).ranks == (3,)
    broken = await judged(HANG, {"nccl_ras": b"{"})
    assert any("nccl_ras of n1: its JSON cannot be read" in line for line in broken.missing)


async def test_a_port_that_nccl_has_lost_is_evidence_against_the_network() -> None:
    """What the ranks raise is the same on both sides of the broken link."""
    line = "n1:12:34 [0] NCCL WARN NET/IB : mlx5_0:1 Got async error event: port error\n"
    ends = tuple(
        raised(rank, "DistBackendError", "NCCL error: remote process exited") for rank in range(2)
    )
    log = {"log": pack([ArchiveMember(1, "log", line.encode())], {})}
    found = await judged(case(ends=ends), log)
    assert (found.cause, found.kind, found.nodes) == ("network", "network", ("n1",))
    bug = await judged(case(ends=(*ends, raised(0, "KeyError", "'labels'"))), log)
    assert bug.cause == "user_code", "the port was up again, or the others came by another path"


async def test_ranks_that_call_two_groups_in_two_orders_are_all_named() -> None:
    """Whose order is the wrong one nobody can tell; that it is the script's is sure."""
    one, other = (fake.Group(str(n), f"group {n}", tuple(range(4))) for n in range(2))
    here, there = (fake.Call(group, "all_reduce", ((3,),)) for group in (one, other))
    calls = {rank: [here, there] if rank % 2 else [there, here] for rank in range(4)}
    dumps = fake.play(fake.Job(4, [one, other], calls))
    members = [
        ArchiveMember(rank, "json", json.dumps(dump).encode()) for rank, dump in dumps.items()
    ]
    found = await judged(HANG, {"flight_recorder": pack(members, {})})
    assert (found.cause, found.kind, found.ranks) == ("user_code", "cycle", (0, 1, 2, 3))
    assert not found.is_inconclusive


async def test_a_collective_that_a_dead_rank_has_torn_accuses_no_network() -> None:
    """Recorders are read after it has ended, and its peers notice one by one."""
    group = fake.Group("0", "default_pg", tuple(range(4)))
    calls = {rank: [fake.Call(group, "all_reduce", ((4,),))] * 6 for rank in range(4)}
    dumps = fake.play(fake.Job(4, [group], calls, unstarted={(2, "0", 5)}))
    members = [
        ArchiveMember(rank, "json", json.dumps(dump).encode()) for rank, dump in dumps.items()
    ]
    contents = {"flight_recorder": pack(members, {})}
    timeout = raised(0, "RuntimeError", "Watchdog caught collective operation timeout: WorkNCCL(")
    for waited in (HANG, case(ends=(timeout,))):
        assert (await judged(waited, contents)).kind == "not_started"
    assert not (await judged(case(ends=(lost_peer(0),)), contents)).others
    found = await judged(case(ends=(lost_peer(0), KILLED)), contents)
    assert (found.cause, found.kind, found.ranks) == ("unknown", "killed", (3,))
    assert not found.others


@pytest.mark.parametrize("place", [("updatecache", "/lib/python3.11/linecache.py", 137), STEP])
async def test_what_others_do_when_a_killed_rank_is_gone_is_no_cause(
    place: tuple[str, str, int],
) -> None:
    """Stacks are read after it has ended: a rank may print its own error, or compute."""
    members = [ArchiveMember(rank, "json", stack(*ALL_REDUCE)) for rank in (0, 1)]
    members.append(ArchiveMember(2, "json", stack(place)))
    found = await judged(case(ends=(KILLED, lost_peer(0))), {"stacks": pack(members, {})})
    assert (found.cause, found.kind, found.ranks) == ("unknown", "killed", (3,))
    found = await judged(HANG, {"stacks": pack(members, {})})
    assert (found.ranks == (2,)) == (place == STEP)


async def test_the_stack_of_a_rank_whose_end_is_on_record_tells_no_cause() -> None:
    """It lost another rank, and was read while its process waited for torch's threads."""
    waits = ("_looks", "/site-packages/trainer_sdk/bootstrap/torch_exit.py", 116)
    members = [ArchiveMember(1, "json", stack(*ALL_REDUCE)), ArchiveMember(0, "json", stack(waits))]
    found = await judged(case(ends=(KILLED, lost_peer(0))), {"stacks": pack(members, {})})
    assert not found.others


def gathers(sizes: Mapping[int, int], pending: int) -> bytes:
    """Recorders of ranks that an exception ended in an all_gather, as gloo's are (torch 2.13)."""
    now_ns = time.time_ns()
    members = []
    for rank, size in sizes.items():
        entry = {
            "record_id": 1, "pg_id": 0, "process_group": ["0", "default_pg"],
            "collective_seq_id": 1, "p2p_seq_id": 0, "op_id": 1,
            "profiling_name": "gloo:all_gather", "time_created_ns": now_ns,
            "input_sizes": [[size]], "output_sizes": [[4, size]], "input_dtypes": ["Float"],
            "output_dtypes": ["Float"], "state": "scheduled", "is_p2p": False,
            "retired": rank != pending, "timeout_ms": 1_800_000,
        }  # fmt: skip
        dump = {"version": "2.10", "entries": [entry]}
        members.append(ArchiveMember(rank, "json", json.dumps(dump).encode()))
    return pack(members, {})


REFUSED = (
    b"terminate called after throwing an instance of 'gloo::EnforceNotMet'\n"
    b"  what():  op.preamble.length <= op.nbytes. 8192 vs 8. Received data size doesn't match "
    b"expected size. Is there a distributed collective mismatch in your code?\n"
)
ABORTED = end(2, how="signal", exit_code=None, signal="SIGABRT")


async def test_recorders_tell_whose_tensor_is_of_another_size_however_young_the_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """gloo ends the rank that is sent too much, which need not be the one that differs (A4.1)."""
    monkeypatch.setattr(faults, "_PATIENCE_NS", 3600 * 10**9)  # the wait stays young on any machine
    of = case(ends=(ABORTED, *map(lost_peer, (0, 1, 3))))
    dumps = gathers({0: 2, 1: 4096, 3: 2}, pending=0)
    found = await judged(of, {"log": REFUSED, "flight_recorder": dumps})
    assert (found.cause, found.kind, found.ranks) == ("user_code", "mismatch", (1,))
    quiet = await judged(of, {"flight_recorder": dumps})
    assert quiet.kind != "mismatch", "nobody has said that sizes differ"


async def test_where_all_other_recorders_agree_the_rank_without_one_differs() -> None:
    of = case(ends=(ABORTED, *map(lost_peer, (0, 1, 3))))
    dumps = gathers({0: 2, 1: 2, 3: 2}, pending=0)
    found = await judged(of, {"log": REFUSED, "flight_recorder": dumps})
    assert (found.cause, found.ranks) == ("user_code", (2,))
    two = gathers({0: 2, 3: 2}, pending=0)
    assert not (await judged(of, {"log": REFUSED, "flight_recorder": two})).ranks


async def test_of_two_that_gloo_refused_the_one_who_expects_what_nobody_sends_differs() -> None:
    """all_to_all with other sizes: the rank that expects 12 bytes sends 28 to the last one."""
    also = end(3, how="signal", exit_code=None, signal="SIGABRT")
    of = case(ends=(ABORTED, also, *map(lost_peer, (0, 1))))
    logs = pack(
        [ArchiveMember(2, "txt", REFUSED.replace(b"8192 vs 8", b"16 vs 12")),
         ArchiveMember(3, "txt", REFUSED.replace(b"8192 vs 8", b"28 vs 16"))], {},
    )  # fmt: skip
    found = await judged(of, {"log": logs, "flight_recorder": gathers({0: 2, 1: 2}, pending=0)})
    assert (found.cause, found.ranks) == ("user_code", (2,))


async def test_among_two_ranks_it_is_open_which_one_differs() -> None:
    """gloo ends the one that is sent more than it expects; the other may have sent too much."""
    of = case(nodes=1, ends=(end(1, how="signal", exit_code=None, signal="SIGABRT"), lost_peer(0)))
    found = await judged(of, {"log": REFUSED, "flight_recorder": gathers({0: 2}, pending=0)})
    assert found.ranks == ()


async def test_a_signal_that_python_reports_too_is_one_event() -> None:
    """A7.1: the line of its fault handler is no second witness."""
    of = case(ends=(end(3, how="signal", exit_code=None, signal="SIGBUS"), lost_peer(0)))
    alone = await judged(of, {})
    log = pack([ArchiveMember(3, "txt", b"Fatal Python error: Bus error\n")], {})
    found = await judged(of, {"log": log})
    assert found.ranks == (3,)
    assert found.confidence <= alone.confidence + 0.15
    assert found.confidence < 0.9


async def test_stacks_say_what_that_rank_does_instead() -> None:
    members = [ArchiveMember(rank, "json", stack(*ALL_REDUCE)) for rank in (0, 1, 3)]
    loader = ("_try_get_data", "/site-packages/torch/utils/data/dataloader.py", 1251)
    members.append(ArchiveMember(2, "json", stack(loader, STEP)))
    contents = {"stacks": pack(members, {}), "flight_recorder": recorders(2, 3)}
    found = await judged(HANG, contents)
    assert (found.cause, found.ranks) == ("data", (2,))
    assert not found.is_inconclusive


async def test_a_rank_that_reads_data_itself_is_held_up_by_its_data() -> None:
    """That it came to no collective, and stalled outside of one, says less than where it is."""
    sample = (
        ("__getitem__", "/home/ann/data.py", 33),
        ("fetch", "/site-packages/torch/utils/data/_utils/fetch.py", 54),
        ("_next_data", "/site-packages/torch/utils/data/dataloader.py", 788),
        STEP,
    )
    members = [ArchiveMember(rank, "json", stack(*ALL_REDUCE)) for rank in (0, 1, 3)]
    members.append(ArchiveMember(2, "json", stack(*sample)))
    contents = {"stacks": pack(members, {}), "flight_recorder": recorders(2, 3)}
    found = await judged(replace(HANG, stalls=stalls(2)), contents)
    assert (found.cause, found.ranks, found.is_inconclusive) == ("data", (2,), False)


LATE = "no answer within 0.27 s"


@pytest.mark.parametrize("reason", [LATE, f"its recorder: {LATE}", "no answer within 2.4 s"])
async def test_what_we_did_not_wait_for_is_no_evidence_against_a_rank(reason: str) -> None:
    """A7.2: that a busy node gave a dump too late shows nothing of the rank."""
    whole = unpack(recorders(2, 3)).members
    members = [member for member in whole if member.rank != 2]
    stacks = [ArchiveMember(rank, "json", stack(*ALL_REDUCE)) for rank in (0, 1, 3)]
    contents = {
        "flight_recorder": pack(members, {2: reason}), "stacks": pack(stacks, {2: reason}),
    }  # fmt: skip
    found = await judged(HANG, contents)
    is_patient = "2.4" in reason
    assert {other.ranks for other in found.others} == ({(2,)} if is_patient else set())
    told = {claim.analyzer for claim, _ in found.evidence}
    assert told == ({"flight_recorder", "stacks"} if is_patient else set())
    assert any(reason in text for text in found.missing)


@pytest.mark.parametrize("kind", ["stacks", "flight_recorder"])
async def test_a_node_whose_evidence_is_on_its_way_has_left_nothing_out(kind: str) -> None:
    """What the other node has sent shows nothing of its ranks, unless it is lost."""
    whole = unpack(recorders(2, 3)).members if kind == "flight_recorder" else ()
    stacks = [ArchiveMember(rank, "json", stack(*ALL_REDUCE)) for rank in (0, 1)]
    parts = stacks if kind == "stacks" else [it for it in whole if it.rank in (0, 1)]
    of, fetch = with_evidence(HANG, {kind: pack(parts, {})}, node="n0")
    sent = EvidencePiece(evidence=kind, node="n1", fact="none", missing="not there after 4 s")
    lost = NodeSign(node="n1", sign="lost", reason="gone", fact="lost", at=NOON)
    absent = {
        "on its way": of,
        "sent": replace(of, evidence=(*of.evidence, sent)),
        "lost": replace(of, nodes=(lost,)),
    }
    named = set()
    for name, one in absent.items():
        heard = await AnalyzerRunner({kind: BUILT_IN[kind]}).run(one, fetch, 60.0)
        named |= {name for claim in heard.claims if {2, 3} & set(claim.ranks)}
    assert named == {"sent", "lost"}


async def test_a_rank_that_is_ending_is_no_culprit_of_a_node_that_was_lost() -> None:
    """It raised as it lost its peers, and others have not noticed yet."""
    ending = (("_exitfunc", "/usr/lib/python3.11/weakref.py", 666),)
    members = [
        ArchiveMember(0, "json", stack(*ALL_REDUCE)),
        ArchiveMember(1, "json", stack(*ending)),
    ]
    of = case(trigger="node_lost", node="n1", nodes=2, reason="n1 is gone: nobody hears it")
    found = await judged(of, {"stacks": pack(members, {}), "flight_recorder": recorders(2, 3)})
    assert (found.cause, found.ranks, found.nodes) == ("host", of.ranks_of("n1"), ("n1",))
    assert found.reason.startswith("n1 is gone: nobody hears it")


async def test_where_there_is_no_other_evidence_the_stalls_own_words_tell() -> None:
    found = await judged(case(trigger="rank_stalled", stalls=stalls(1)), {})
    assert (found.cause, found.ranks) == ("user_code", (1,))
    together = await judged(case(trigger="rank_stalled", stalls=stalls()), {})
    assert together.is_inconclusive
    assert together.ranks == ()


def warned(step: int | None) -> Stall:
    return Stall(
        rank=1, node="n0", fact="s1", round=1, phase="section", section="data", waited_s=6,
        limit_s=5, process_state="S", step=step, blocked_in="it waits for a pipe (pipe_read)",
        is_waiting_for_ranks=False,
    )  # fmt: skip


async def test_a_rank_that_nobody_could_look_into_is_not_outside_of_a_collective() -> None:
    told = tuple(
        replace(stall, blocked_in="it waits for a lock", is_waiting_for_ranks=None)
        if stall.rank == 2
        else stall
        for stall in stalls()
    )
    found = await judged(replace(HANG, stalls=told), {})
    assert not [claim for claim, _ in found.evidence if claim.analyzer == "stalls"]
    assert found.ranks == ()


async def test_a_stall_that_only_warned_counts_for_less_than_one_that_ended_the_round() -> None:
    """It stalled, and the others gave up before any limit that ends rounds was passed."""
    ends = (lost_peer(0), lost_peer(3))
    without = await judged(case(ends=ends, step=7), {})
    assert 1 not in without.ranks
    found = await judged(case(ends=ends, step=7, warned_stalls=(warned(7),)), {})
    assert (found.cause, found.ranks, found.nodes) == ("data", (1,), ())
    fatal = await judged(case(ends=ends, step=7, stalls=(warned(7),)), {})
    assert fatal.ranks == (1,)
    assert found.confidence < fatal.confidence


@pytest.mark.parametrize("step", [6, None])
async def test_a_stalled_rank_may_be_steps_behind_the_others(step: int | None) -> None:
    """A4.4: the others were not held up by it, or had not noticed yet."""
    stopped = replace(warned(step), process_state="T", blocked_in="it is stopped, as by SIGSTOP")
    of = case(trigger="rank_stalled", trigger_fact="s1", step=7, warned_stalls=(stopped,))
    found = await judged(of, {})
    assert (found.cause, found.kind, found.ranks) == ("host", "stopped_process", (1,))
    assert not found.is_inconclusive
    other = await judged(replace(of, trigger_fact="another"), {})
    assert (other.kind, other.ranks) == ("stopped_process", (1,))
    assert other.confidence < found.confidence


@pytest.mark.parametrize(
    ("lines", "cause"),
    [
        ("First rerun: unexpected result is not reproducible within the tolerance", "gpu"),
        ("Second rerun: unexpected result is not reproducible on a different GPU, therefore was "
         "likely incorrect\nPossible persistent error!", "gpu"),
        ("Second rerun: unexpected result is reproducible on a different GPU, therefore it was "
         "likely correct", "user_code"),
        ("First rerun: unexpected result is reproducible within the tolerance\nNeed to rerun on a "
         "different GPU to verify correctness", "unknown"),
    ],
)  # fmt: skip
async def test_megatrons_rerun_tells_whose_fault_a_rejected_result_is(
    lines: str, cause: str
) -> None:
    left = raised(3, "SystemExit", "16", exit_code=16, traceback="megatron/training/training.py")
    log = pack([ArchiveMember(3, "txt", f"{lines}\n".encode())], {})
    found = await judged(case(ends=(lost_peer(0), left)), {"log": log})
    assert (found.cause, found.ranks) == (cause, (3,))


async def test_logs_name_the_rank_where_its_end_says_nothing() -> None:
    log = pack([ArchiveMember(3, "txt", TRACEBACK)], {2: "the rank had exited"})
    found = await judged(case(ends=(lost_peer(0),)), {"log": log})
    assert (found.cause, found.ranks) == ("user_code", (3,))
    assert "log of rank 2: the rank had exited" in found.missing


BAD = {
    "gone": b"",
    "cut": recorders(1, 2)[:200],
    "not an archive": b"\x1f\x8b" + bytes(50),
    "pickle": pack([ArchiveMember(0, "pickle", b"cposix\nsystem\n(S'id'\ntR.")], {}),
    "deep": pack([ArchiveMember(0, "json", b"[" * 100_000)], {}),
    "other encoding": pack([ArchiveMember(0, "json", "ä".encode("utf-16") * 1000)], {}),
}


@pytest.mark.parametrize(
    "kind", ["flight_recorder", "stacks", "log", "kernel_log", "gpu", "cgroup", "process"]
)
@pytest.mark.parametrize("name", sorted(BAD))
async def test_evidence_that_cannot_be_read_is_missing_and_hides_nothing(
    kind: str, name: str
) -> None:
    """A13.3: hostile, cut short, or gone."""
    whole, fetch = with_evidence(case(ends=(lost_peer(0),), stalls=stalls(1)), {kind: BAD[name]})
    heard = await AnalyzerRunner(BUILT_IN).run(whole, fetch, 60.0)
    assert not [text for text in heard.missing if text.startswith("analyzer")]
    found = await asyncio.to_thread(combine, whole, heard.claims, heard.missing)
    assert (found.ranks, found.nodes) == ((1,), ())


class TheirAnalyzer:
    """In the shape of NVRx's base class."""

    async def preprocess_input(self, data: Mapping[int, str]) -> list[int]:
        return sorted(rank for rank, text in data.items() if "KeyError" in text)

    def run_attribution(self, data: list[int]) -> str:
        return f"hanging ranks: {data}"

    async def print_output(self, data: str) -> tuple[str, str]:
        return data, "CONTINUE"


async def test_an_analyzer_of_nvrx_is_a_plug_in_by_one_line() -> None:
    """Its ranks are a place; the causes come from others."""
    log = pack([ArchiveMember(3, "txt", TRACEBACK)], {})
    analyzers = {**BUILT_IN, "theirs": nvrx.adapted(TheirAnalyzer())}
    found = await judged(case(ends=(lost_peer(0),)), {"log": log}, analyzers)
    named = [claim for claim, _ in found.evidence if claim.analyzer == "theirs"]
    assert [(claim.ranks, claim.role) for claim in named] == [((3,), "place")]
