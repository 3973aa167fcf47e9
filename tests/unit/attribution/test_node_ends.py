"""What is said of the ends of nodes, and of ranks that ended with them."""

from datetime import timedelta
from typing import Any

from msgspec.structs import replace

from everstep.messages import NodeSign, OutsideAct, Stall
from tests.unit.attribution.cases import NOON, case, end, lost_peer, raised
from tests.unit.attribution.test_ends import judged


def sign(node: str, kind: str, *, check: str = "", hours: float = 0.0) -> NodeSign:
    return NodeSign(
        node=node, sign=kind, reason="as measured", fact=f"{node}-{kind}-{check}",
        at=NOON - timedelta(hours=hours), check=check, failure_class="replace" if check else "",
    )  # fmt: skip


async def test_a_lost_node_is_named_unless_it_was_only_cut_off() -> None:
    of = case(trigger="node_lost", node="n1", nodes=2)
    lost = (sign("n1", "lost"),)
    peers = (lost_peer(0), lost_peer(1))
    found = await judged(replace(of, nodes=lost, ends=peers))
    assert (found.cause, found.nodes, found.advice) == ("host", ("n1",), "restart_without")
    assert found.ranks == of.ranks_of("n1"), "no rank of the node that is left"
    back = NodeSign(node="n1", sign="returned", reason="", fact="b", at=NOON, cause="cut_off")
    found = await judged(replace(of, nodes=(*lost, back), ends=peers))
    assert (found.cause, found.nodes) == ("network", ())


async def test_a_node_whose_agent_was_only_paused_is_blamed_for_no_rank_that_failed() -> None:
    """Its ranks run on without their agent (A4.6)."""
    why = "its agent was paused: it sent 0 beats in 9 s"
    back = replace(sign("n1", "returned"), reason=why, cause="paused")
    nodes = (sign("n1", "lost"), back)
    killed = end(0, how="signal", exit_code=None, signal="SIGKILL")
    found = await judged(replace(case(ends=(killed, lost_peer(1))), nodes=nodes))
    assert (found.kind, found.ranks, found.nodes) == ("killed", (0,), ())
    found = await judged(replace(case(trigger="node_lost", node="n1"), nodes=nodes))
    assert (found.cause, found.kind, found.nodes) == ("host", "paused_agent", ("n1",))
    assert (found.advice, found.retry) == ("restart", "as_is")
    assert found.reason == f"n1 is back: {why}"


async def test_an_agent_that_is_silent_alone_is_no_lost_node() -> None:
    """Its warden answers, so a rank that is killed elsewhere is the cause (A4.6)."""
    alone = replace(sign("n1", "lost"), cause="paused")
    killed = end(0, how="signal", exit_code=None, signal="SIGKILL")
    found = await judged(replace(case(ends=(killed, lost_peer(1))), nodes=(alone,)))
    assert (found.kind, found.ranks, found.nodes) == ("killed", (0,), ())
    found = await judged(replace(case(trigger="node_lost", node="n1"), nodes=(alone,)))
    assert (found.cause, found.kind, found.nodes) == ("host", "paused_agent", ("n1",))
    assert (found.advice, found.retry) == ("restart", "as_is")
    assert found.reason.startswith("only the agent of n1 is silent: as measured")


async def test_what_health_measured_of_a_lost_node_is_told_whole() -> None:
    reason = f"n1 has been silent for 5.6 s; {'it was asked for a beat; ' * 15}its warden answers"
    lost = replace(sign("n1", "lost"), reason=reason)
    found = await judged(replace(case(trigger="node_lost", node="n1"), nodes=(lost,)))
    assert found.reason == reason


async def test_a_failed_check_names_its_node_and_one_that_fails_everywhere_nobody() -> None:
    failed = case(ends=(end(3),))
    found = await judged(replace(failed, nodes=(sign("n1", "check", check="gpu"),)))
    assert (found.cause, found.nodes) == ("gpu", ("n1",))
    both = (sign("n0", "check", check="gpu"), sign("n1", "check", check="gpu"))
    assert (await judged(replace(failed, nodes=both))).nodes == ()
    old = (sign("n1", "check", check="gpu", hours=30),)
    assert (await judged(replace(failed, nodes=old))).nodes == ()
    mended = (sign("n1", "check", check="gpu"), sign("n1", "passed", check="gpu"))
    assert (await judged(replace(failed, nodes=mended))).nodes == ()


async def test_people_and_schedulers_are_nobodys_fault() -> None:
    stop = OutsideAct(act="stop_job", by="ada", reason="wrong branch", fact="s")
    ends_of_all = tuple(
        end(rank, how="signal", exit_code=None, signal="SIGTERM") for rank in range(4)
    )
    found = await judged(case(trigger="operator", outside=(stop,), ends=ends_of_all))
    assert (found.cause, found.kind, found.advice) == ("scheduler", "operator", "stop")
    notice = OutsideAct(act="preempted", by="slurm", reason="SIGTERM", fact="p")
    found = await judged(case(trigger="preempted", outside=(notice,)))
    assert (found.cause, found.kind, found.advice) == ("scheduler", "preempted", "wait")


async def test_two_nodes_that_are_lost_at_once_are_both_named() -> None:
    signs = tuple(sign(node, "lost") for node in ("n1", "n2"))
    of = replace(case(trigger="node_lost", node="n1"), nodes=signs)
    found = await judged(of)
    assert (found.cause, found.kind, found.nodes) == ("host", "node_lost", ("n1", "n2"))
    assert "n1" in found.reason
    assert "n2" in found.reason


async def test_a_node_that_is_lost_explains_no_rank_that_is_killed_elsewhere() -> None:
    killed = end(0, how="signal", exit_code=None, signal="SIGKILL")
    of = replace(case(ends=(killed, lost_peer(1))), nodes=(sign("n1", "lost"),))
    found = await judged(of)
    assert (found.ranks, found.nodes, found.others) == ((0, 2, 3), ("n1",), ())
    assert "rank 0 (n0) was killed" in found.reason
    assert found.reason.endswith("rank 1 lost another rank")
    assert (found.advice, found.retry) == ("restart_without", "without_node")
    raised_too = replace(of, ends=(raised(0, "ValueError", "bad batch"), lost_peer(1)))
    found = await judged(raised_too)
    assert (found.ranks, found.advice, found.retry) == ((0, 2, 3), "change", "after_change")
    own = replace(of, ends=(lost_peer(0), replace(killed, rank=2, node="n1")))
    assert "only because of that" in (await judged(own)).reason, "its node's loss explains its end"


async def test_ranks_whose_warden_was_killed_are_told_as_that() -> None:
    """Nobody saw their ends, and everybody knows why: no rank is the culprit."""
    gone: dict[str, Any] = {
        "how": "unknown",
        "exit_code": None,
        "first_error": "the warden of this node has ended: it was killed by SIGKILL; its log is w",
    }
    found = await judged(case(ends=(lost_peer(0), end(2, **gone), end(3, **gone))))
    assert (found.cause, found.kind, found.ranks) == ("unknown", "warden_ended", ())
    assert "the warden of n1" in found.reason
    assert "it was killed by SIGKILL; its log is w; ranks 2, 3 ended with it" in found.reason
    assert "rank 0 failed only because of that" in found.reason
    assert not found.is_inconclusive


async def test_a_node_whose_agent_was_paused_is_no_culprit_of_a_stall() -> None:
    """One of its ranks stood still, and the other one only waited for that (A4.6)."""
    back = replace(sign("n1", "returned"), cause="paused")
    stall = Stall(
        rank=3, node="n1", round=1, fact="s3", waited_s=9, limit_s=9, phase="step",
        process_state="T", blocked_in="it is stopped", is_waiting_for_ranks=False,
    )  # fmt: skip
    waits = replace(stall, process_state="S", is_waiting_for_ranks=True)
    stalls = (stall, *(replace(waits, rank=rank, fact=f"s{rank}") for rank in range(3)))
    of = case(trigger="rank_stalled", rank=3, stalls=stalls)
    found = await judged(replace(of, nodes=(sign("n1", "lost"), back)))
    assert (found.kind, found.ranks, found.nodes) == ("stopped_process", (3,), ())
