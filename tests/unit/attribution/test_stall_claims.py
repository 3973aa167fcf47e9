"""Verdicts on ranks of parallel groups of which agents saw little: the machine had no time."""

import pytest

from everstep.messages import Stall
from everstep_services.agent.stalls.interpreter import Interpreter, in_words
from everstep_services.agent.stalls.process_state import ProcessState
from tests.unit.attribution.cases import case
from tests.unit.attribution.evidence import judged

WORLD, ODD = 64, 37
BEHIND_LOCK = ProcessState("S", "it waits for a lock (futex_wait_queue)")


def stall(rank: int, process: ProcessState, python: Interpreter | None, waits_in: str) -> Stall:
    words = in_words(process, python, waits_in)
    return Stall(
        rank=rank, node=f"n{rank // 32}", fact=f"s{rank}", round=1, phase="step", waited_s=6.5,
        limit_s=6, step=3, process_state=process.letter, blocked_in=words.text,
        is_waiting_for_ranks=words.is_waiting_for_ranks,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("odd", "named"),
    [
        (stall(ODD, ProcessState("S", "do_sys_pause"), None, ""), (ODD,)),
        (stall(ODD, BEHIND_LOCK, Interpreter(runs=True, at="train.py:9 in load"), ""), (ODD,)),
        (stall(ODD, BEHIND_LOCK, None, ""), ()),
    ],
)
async def test_ranks_behind_a_lock_may_wait_for_others(odd: Stall, named: tuple[int, ...]) -> None:
    """In transfers gloo waits as in collectives, but does not record them."""
    in_transfer = [rank for rank in range(WORLD) if rank % 5 in (2, 3) and rank != ODD]
    stalls = tuple(
        odd if rank == ODD
        else stall(rank, BEHIND_LOCK, None, "" if rank in in_transfer else "gloo:all_reduce of 3")
        for rank in range(WORLD)
    )  # fmt: skip
    found = await judged(case(trigger="rank_stalled", nodes=2, ranks=32, stalls=stalls), {})
    assert (found.ranks, found.nodes) == (named, ())
