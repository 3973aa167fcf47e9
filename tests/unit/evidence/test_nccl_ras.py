"""What NCCL's RAS says, in words and as JSON: who stopped answering, and who is out of step."""

import pytest

from everstep.evidence.nccl_ras import findings, parse, summary
from tests.fakes import nccl_ras as fake

EVEN = {rank: {"AllReduce": 64, "Broadcast": 1} for rank in range(8)}
ONE_LATE = {**EVEN, 6: {"AllReduce": 60, "Broadcast": 1}}
TOLD = {
    "late": (ONE_LATE, (), "behind", [6], "launched 60 AllReduce, and most of the others 64"),
    "early": ({**EVEN, 6: {"AllReduce": 65, "Broadcast": 1}}, (), "ahead", [6], "launched 65"),
    "other": ({**EVEN, 6: {"AllReduce": 63, "Broadcast": 2}}, (), "differs", [6],
              "other collectives than most: AllReduce, Broadcast differ"),
    "silent": ({rank: EVEN[rank] for rank in range(6)}, (6, 7), "silent", [6, 7], "stopped"),
    "of two": ({0: {"AllReduce": 5}, 1: {"AllReduce": 4}}, (), "behind", [1], "launched 4"),
}  # fmt: skip


@pytest.mark.parametrize("case", TOLD)
def test_the_few_that_differ_are_named(case: str) -> None:
    launched, silent, kind, ranks, says = TOLD[case]
    report = parse(fake.answer(fake.communicator(launched, silent)))
    (found,) = findings(report)
    assert (found.kind, [one.rank for one in found.ranks]) == (kind, ranks)
    assert says in found.says
    assert f"{ranks[-1]} " in summary(report)


def test_ranks_in_step_are_no_finding() -> None:
    report = parse(fake.answer(fake.communicator(EVEN), fake.communicator({0: {}, 1: {}})))
    assert ([*findings(report)], summary(report)) == ([], "2 communicators: no rank differs")


@pytest.mark.parametrize(
    ("told", "ranks", "pids"),
    [(fake.DIFFERENT + fake.ALONE, [6], [106]), (fake.DIFFERENT + fake.TWO, [0, 2], [100, 102]),
     (fake.DEAD, [-1], [106])],
)  # fmt: skip
def test_words_tell_the_same(told: str, ranks: list[int], pids: list[int]) -> None:
    report = parse((fake.IN_WORDS + told).encode())
    (found,) = findings(report)
    assert ([one.rank for one in found.ranks], [one.pid for one in found.ranks]) == (ranks, pids)
    assert found.size == (8 if ranks[0] >= 0 else 0)
    assert [*findings(parse(fake.IN_WORDS.encode()))] == []


@pytest.mark.parametrize("answer", [b"", b"{", b'{"communicators": 7}', b"HTTP/1.1 400", b"\xff\0"])
def test_what_is_no_report_says_so(answer: bytes) -> None:
    with pytest.raises(ValueError, match=r"its JSON cannot be read|not a report of NCCL's RAS"):
        parse(answer)


def test_an_answer_of_a_rank_that_means_harm_is_read_once() -> None:
    """It takes seconds; hours, where each line is looked at for each other one."""
    blank, blocks = "\n" * 300_000, "#0-0 (a) MISMATCH\nRank 1 -- GPU\n" * 100_000
    report = parse(f"Communicators\n{blank}{' ' * 300_000}\n{blocks}".encode())
    assert len(report.communicators) == 100_000
    assert [*findings(report)] == []
    many = {f"kind {number}": 1 for number in range(65)}
    with pytest.raises(ValueError, match="more kinds of collectives than NCCL has"):
        parse(fake.answer(fake.communicator({0: many, 1: {}})))
