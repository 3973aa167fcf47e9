"""Which rank stands elsewhere, from stacks of jobs whose fault is known."""

import json
from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from everstep_services.attribution.analyzers.stacks import _claims
from everstep_services.attribution.domain.claims import Claim
from everstep_services.attribution.domain.combiner import combine
from everstep_services.attribution.stack_analysis.analysis import StackAnalysis
from everstep_services.attribution.stack_analysis.dumps import read_stacks
from everstep_services.attribution.stack_analysis.files import read_content
from everstep_services.attribution.stack_analysis.report import StackReport, folded, lines
from everstep_services.attribution.stack_analysis.rules import ACTIVITIES, shipped
from everstep_services.attribution.stack_analysis.stacks import Unreadable
from tests.fakes import stack_dumps as fake
from tests.unit.attribution.cases import case


def _report(*ranks: Sequence[str] | bytes, world: int | None = None) -> StackReport:
    """Of main threads, or of whole dumps."""
    analysis = StackAnalysis(world=world)
    for rank, one in enumerate(ranks):
        content = one if isinstance(one, bytes) else fake.dump(fake.thread(one))
        analysis.add(read_stacks(content, rank))
    return analysis.report()


def _named(report: StackReport) -> list[tuple[int, str, str]]:
    return [(one.rank, one.activity, one.domain) for one in report.suspects]


@pytest.mark.parametrize(
    ("frames", "activity", "domain"),
    [
        (fake.LOADER, "data_wait", "data"),
        (fake.SAMPLE, "data_read", "data"),
        ((*fake.QUEUE, "next_batch /home/u/ahead.py:9", *fake.FORWARD), "data_wait", "data"),
        (fake.SAVE, "checkpoint_save", "storage"),
        (fake.IMPORT, "import", "storage"),
        (fake.SHUTDOWN, "exit", "user_code"),
        (fake.AFTER_SCRIPT, "exit", "user_code"),
        (fake.RECORDING, "exit", "user_code"),
        (fake.FORWARD, "standing", "user_code"),
        ((*fake.QUEUE, *fake.FORWARD), "lock", "user_code"),
        (("clock_nanosleep libc.so.6", *fake.FORWARD), "sleep", "user_code"),
        (("cuStreamSynchronize libcuda.so.1", *fake.FORWARD), "device", "gpu"),
    ],
)
def test_the_one_that_does_not_wait_is_named_with_what_it_does(
    frames: Sequence[str], activity: str, domain: str
) -> None:
    """A7.6: with confidence and reason."""
    report = _report(fake.REDUCE, fake.REDUCE, frames, fake.REDUCE)
    assert (report.verdict, report.pattern) == ("odd_ranks", "odd")
    assert _named(report) == [(2, activity, domain)]
    assert report.waiting == (0, 1, 3)
    assert report.confidence >= 0.6
    assert "rank 2" in report.summary


def test_who_waits_for_a_save_of_another_is_not_named() -> None:
    report = _report(fake.SAVE, fake.BARRIER, fake.BARRIER, fake.REDUCE)
    assert _named(report) == [(0, "checkpoint_save", "storage")]


def test_a_collective_within_a_save_is_a_wait() -> None:
    gather = (
        "all_gather_object /v/site-packages/torch/distributed/distributed_c10d.py:3",
        "save /v/site-packages/torch/distributed/checkpoint/state_dict_saver.py:9",
    )
    report = _report(gather, gather, fake.SAVE)
    assert _named(report) == [(2, "checkpoint_save", "storage")]
    assert report.groups[0].state.within == "checkpoint_save"


def test_ranks_that_wait_for_their_devices_wait_for_the_few_that_stand_elsewhere() -> None:
    """On NCCL the processor of a rank that waits for a collective only waits for its device."""
    device = ("cuStreamSynchronize libcuda.so.1", *fake.FORWARD)
    locked = (*fake.QUEUE, *fake.FORWARD)
    report = _report(device, device, locked, device)
    assert (_named(report), report.waiting) == ([(2, "lock", "user_code")], (0, 1, 3))
    computes = fake.dump(fake.thread(fake.FORWARD, active=True))
    for others in ((locked, locked, device), (computes,), ()):  # too many, or it may only be slow
        assert _report(device, device, *others).waiting == ()


def test_all_in_one_collective_accuse_nobody() -> None:
    report = _report(*[fake.REDUCE] * 4)
    assert (report.verdict, report.pattern, report.suspects) == ("inconclusive", "together", ())
    assert "all 4 ranks" in report.summary


@pytest.mark.parametrize(
    ("call", "meaning"), [("recv", "receive, and none sends"), ("send", "send, and none receives")]
)
def test_ranks_that_all_wait_for_one_side_of_a_transfer_are_named(call: str, meaning: str) -> None:
    """A7.5: recorders of gloo say nothing about transfers that nobody has begun."""
    stack = (f"{call} /v/site-packages/torch/distributed/distributed_c10d.py:3", *fake.FORWARD)
    report = _report(*[stack] * 3)
    assert (report.verdict, report.pattern) == ("odd_ranks", "together")
    assert [rank for rank, _, _ in _named(report)] == [0, 1, 2]
    assert meaning in report.summary
    (claim,) = _claims(report, None, is_torn=False)
    assert claim.ranks == (0, 1, 2)
    assert _report(stack, stack, fake.REDUCE).pattern == "odd"
    assert "left no stack" in _report(stack, stack, world=3).summary


def test_of_ranks_that_all_wait_to_receive_at_several_places_none_is_named() -> None:
    """A7.5: in a pipeline, a send that is left out stops the ranks before it and after it."""
    stack = ("recv /v/site-packages/torch/distributed/distributed_c10d.py:3", *fake.FORWARD)
    report = _report(stack, stack, fake.RECEIVE, fake.RECEIVE)
    first, second = "ranks 0-1 at Model.forward (u/model.py:12)", "ranks 2-3 at "
    assert f"all 4 ranks wait to receive, and none sends: {first}, {second}" in report.summary
    (claim,) = _claims(report, None, is_torn=False)
    assert claim.ranks == ()
    own = Claim(cause="user_code", kind="circle", says="1-2 wait for each other", strength=0.5,
                ranks=(1, 2), analyzer="flight_recorder")  # fmt: skip
    found = combine(case(), [replace(claim, analyzer="stacks"), own], ())
    assert (found.kind, found.ranks) == ("one_sided_transfer", (1, 2))


def test_a_minority_that_waits_elsewhere_is_odd() -> None:
    """A7.5: a call was skipped, or made in another order."""
    report = _report(fake.REDUCE, fake.BARRIER, fake.REDUCE)
    assert (report.verdict, _named(report)) == ("odd_ranks", [(1, "collective", "user_code")])
    assert "rank 1 waits elsewhere than the others: in barrier" in report.summary


def test_a_call_that_ranks_leave_early_names_nobody() -> None:
    """Where most are says little of a broadcast: its source goes on before others have come."""
    report = _report(fake.REDUCE, fake.BROADCAST, fake.REDUCE)
    assert (report.verdict, report.confidence) == ("inconclusive", 0.4)


def test_two_halves_that_wait_for_each_other_are_told_as_parts() -> None:
    report = _report(fake.REDUCE, fake.BARRIER, fake.REDUCE, fake.BARRIER)
    assert (report.verdict, report.pattern) == ("inconclusive", "split")
    assert "ranks 0,2" in report.summary
    assert "ranks 1,3" in report.summary


def test_transfers_hold_up_collectives() -> None:
    report = _report(fake.REDUCE, fake.RECEIVE, fake.RECEIVE, fake.REDUCE, fake.REDUCE)
    assert {one.rank for one in report.suspects} == {1, 2}
    assert report.verdict == "odd_ranks"


def test_a_backward_pass_off_the_processor_waits_and_one_on_it_computes() -> None:
    computing = fake.dump(fake.thread(fake.BACKWARD, active=True))
    report = _report(fake.BACKWARD, fake.BACKWARD, computing)
    assert _named(report) == [(2, "user_code", "user_code")]


def test_a_backward_pass_waits_where_nobody_tells_whether_it_computes() -> None:
    """faulthandler does not."""
    text = (
        b"Thread 0x01 (most recent call first):\n"
        b'  File "/v/torch/autograd/graph.py", line 979 in _engine_run_backward\n'
        b'  File "/home/u/train.py", line 3 in main\n'
    )
    report = _report(text, text, fake.SAVE)
    assert _named(report) == [(2, "checkpoint_save", "storage")]


def test_buckets_that_are_sorted_anew_are_a_collective() -> None:
    """DDP does it before the forward pass of the second step."""
    anew = (
        "DistributedDataParallel._pre_forward /v/torch/nn/parallel/distributed.py:1775",
        "DistributedDataParallel.forward /v/torch/nn/parallel/distributed.py:1830",
    )
    report = _report(anew, anew, fake.LOADER)
    assert _named(report) == [(2, "data_wait", "data")]


def test_a_rank_that_has_not_come_to_the_rendezvous_is_named() -> None:
    report = _report(fake.RENDEZVOUS, fake.IMPORT, fake.RENDEZVOUS)
    assert _named(report) == [(1, "import", "storage")]


def test_nobody_waits_while_all_compute() -> None:
    report = _report(*[fake.dump(fake.thread(fake.FORWARD, active=True))] * 3)
    assert report.verdict == "nothing"


def test_when_all_wait_for_data_that_is_told_and_none_accused() -> None:
    report = _report(*[fake.LOADER] * 3)
    assert (report.verdict, report.pattern) == ("inconclusive", "together")
    assert {one.domain for one in report.suspects} == {"data"}


def test_a_majority_that_computes_makes_it_inconclusive() -> None:
    computing = fake.dump(fake.thread(fake.FORWARD, active=True))
    report = _report(fake.REDUCE, computing, computing, computing)
    assert report.verdict == "inconclusive"


def test_a_rank_without_a_stack_is_evidence() -> None:
    """A7.2: with the reason, where there is one."""
    report = _report(fake.REDUCE, fake.REDUCE, world=3)
    assert (report.verdict, _named(report)) == ("odd_ranks", [(2, "unknown", "unknown")])
    assert report.missing == (2,)
    analysis = StackAnalysis()
    analysis.add(read_stacks(fake.dump(fake.thread(fake.REDUCE)), 0))
    analysis.add(Unreadable(name="rank_1.json", reason="ptrace is forbidden", rank=1))
    assert analysis.report().suspects[0].reason == "ptrace is forbidden"


def test_a_rank_whose_file_is_damaged_is_not_named_for_that() -> None:
    """A7.6: a file that is cut or too large says nothing about its rank."""
    analysis = StackAnalysis()
    analysis.add(read_stacks(fake.dump(fake.thread(fake.REDUCE)), 0))
    analysis.add(read_content(b"\x00" * 40, 1, "rank_1.json"))
    report = analysis.report()
    assert (report.verdict, report.suspects, report.missing) == ("inconclusive", (), (1,))
    assert "the stacks of rank 1 cannot be read" in report.summary


def test_the_worker_of_a_data_loader_tells_where_its_rank_waits() -> None:
    dump = fake.dump(fake.thread(fake.LOADER), fake.thread(fake.WORKER, pid=200))
    report = _report(fake.REDUCE, dump, fake.REDUCE)
    assert "Samples.__getitem__ (u/data.py:33)" in report.suspects[0].reason
    (other,) = report.others
    assert (other.state.activity, other.state.within) == ("data_read", "data_worker")


def test_the_holder_of_the_interpreter_is_named() -> None:
    """A7.5: a rank that holds the lock in native code, by itself or in a thread."""
    alone = fake.dump(fake.thread(fake.FORWARD, owns_gil=True))
    report = _report(fake.REDUCE, alone, fake.REDUCE)
    assert _named(report) == [(1, "native", "user_code")]
    assert report.groups[1].has_interpreter == (1,)
    in_thread = fake.dump(
        fake.thread(fake.FORWARD),
        fake.thread(["encode /home/u/tokens.py:5"], name="tokenizer", owns_gil=True),
    )
    report = _report(fake.REDUCE, in_thread, fake.REDUCE)
    assert _named(report) == [(1, "interpreter_lock", "user_code")]
    assert "tokenizer: encode (u/tokens.py:5)" in report.suspects[0].reason


def test_idle_threads_and_those_of_the_sdk_are_not_told() -> None:
    dump = fake.dump(
        fake.thread(fake.REDUCE),
        fake.thread(fake.POOL, name="ThreadPoolExecutor-0_0"),
        fake.thread(fake.WRITER, name="everstep-writer"),
        fake.thread([*fake.QUEUE, "pump /home/u/pump.py:3"], name="pump"),
    )
    report = _report(dump, dump)
    assert [(one.thread, one.ranks) for one in report.others] == [("pump", (0, 1))]


def test_ten_thousand_ranks_fold_into_two_stacks() -> None:
    analysis = StackAnalysis()
    waits, saves = (read_stacks(fake.dump(fake.thread(one)), 0) for one in (fake.REDUCE, fake.SAVE))
    for rank in range(10_000):
        analysis.add(type(waits)(rank=rank, threads=(saves if rank == 4711 else waits).threads))
    report = analysis.report()
    assert [one.rank for one in report.suspects] == [4711]
    assert [len(one.ranks) for one in report.groups] == [9999, 1]


def test_the_report_reads_from_the_verdict_on() -> None:
    text = list(lines(_report(fake.REDUCE, fake.SAVE, fake.REDUCE)))
    assert text[0] == (
        "rank 1 saves a checkpoint at main (u/train.py:61), and ranks 0,2 wait for others in "
        "all_reduce, at main (u/train.py:61)"
    )
    assert "  2 ranks 0,2: waits in a collective (all_reduce)" in text
    assert "Stacks of 3 ranks were read." in text


def test_a_terminal_obeys_no_name_of_a_frame() -> None:
    """A13.3"""
    report = _report(fake.REDUCE, ("evil\x1b[2J;rm /home/u/train.py:6", *fake.FORWARD))
    assert not any("\x1b" in line for line in (*lines(report), *folded(report)))


def test_folded_stacks_are_for_flame_graphs() -> None:
    found = list(folded(_report(fake.REDUCE, fake.REDUCE, fake.FORWARD)))
    assert found[0] == (
        "MainThread;<module> (u/train.py:80);main (u/train.py:61);"
        "_exception_logger.<locals>.wrapper (distributed/c10d_logger.py:83);"
        "all_reduce (distributed/distributed_c10d.py:3252) 2"
    )
    assert all(line.rpartition(" ")[2].isdigit() for line in found)


def test_every_rule_has_a_known_source_and_a_purpose() -> None:
    rules = shipped()
    assert {one.source for one in rules.rules} <= set(rules.sources)
    assert all(one.files or one.names for one in rules.rules)
    assert {one.activity for one in rules.rules} <= set(ACTIVITIES)


def test_the_report_is_plain_data() -> None:
    import msgspec

    report = _report(fake.REDUCE, fake.SAVE)
    again = msgspec.json.decode(msgspec.json.encode(report), type=StackReport)
    assert again == report
    assert json.loads(msgspec.json.encode(report))["suspects"][0]["rank"] == 1
