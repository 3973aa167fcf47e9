"""What happened after an incident had begun explains nothing of it."""

from datetime import timedelta
from typing import Any

import pytest
from msgspec.structs import replace

from everstep.messages import Case, NodeLeft, NodeLost, NodeSign, OperatorActed, PreemptionNoticed
from everstep_services.attribution.domain.case_facts import JobCases
from everstep_services.attribution.domain.event_order import in_time
from tests.unit.attribution.cases import NOON, about, case, exited, formed, lost_peer, opened
from tests.unit.attribution.test_case_facts import cases_of
from tests.unit.attribution.test_ends import judged


def _at(seconds: float) -> dict[str, Any]:
    return {"at": NOON + timedelta(seconds=seconds)}


def lost_node(at_s: float = 0.0) -> NodeLost:
    given = {**about(id="lost"), **_at(at_s)}
    return NodeLost(**given, node="n1", silence_s=9.0, limit_s=8.0, reason="n1 is silent")


def later(
    seconds: float, *, is_whole_job: bool = True
) -> tuple[PreemptionNoticed, NodeLeft, OperatorActed]:
    """The last node gets SIGTERM while it waits for another one, and a person stops the job."""
    noticed, left, acted = (
        {**about(id=name), **_at(seconds)} for name in ("noticed", "left", "acted")
    )
    return (
        PreemptionNoticed(**noticed, node="n0", origin="signal", reason="SIGTERM", grace_s=0.0,
                          is_whole_job=is_whole_job),
        NodeLeft(**left, node="n0", cause="preempted", reason="SIGTERM", exit_code=91),
        OperatorActed(
            **acted, by="ann", action="stop_job", target="", outcome="accepted", reason="enough"
        ),
    )  # fmt: skip


def node_loss(cases: JobCases) -> Case:
    found = cases.case("i")
    assert found is not None
    return in_time(found)


LOST: dict[str, Any] = {
    "trigger": "node_lost",
    "reason": "n1 is silent",
    "trigger_fact": "lost",
    "node": "n1",
}


@pytest.mark.parametrize("seconds", [1.0, 3.0, 180.0])
async def test_a_later_signal_or_stop_does_not_replace_a_node_loss(seconds: float) -> None:
    """The lost node stays the culprit, and an offender."""
    for by_health in ((lost_node(),), ()):
        first = (formed(), exited(0, error=None), *by_health, opened(**LOST))
        signs = later(seconds, is_whole_job=bool(by_health))
        found = await judged(node_loss(cases_of(*first, *signs)))
        assert (found.cause, found.kind, found.nodes) == ("host", "node_lost", ("n1",))
        assert "SIGTERM" not in found.reason


async def test_a_notice_before_a_node_falls_silent_explains_that() -> None:
    """A spot node that its cloud takes away: the notice came first."""
    noticed, _, _ = later(-20.0)
    found = await judged(node_loss(cases_of(formed(), noticed, lost_node(), opened(**LOST))))
    assert (found.cause, found.kind, found.nodes) == ("scheduler", "preempted", ())


def test_a_node_that_is_sent_away_leaves_once_its_ranks_have_saved() -> None:
    """Where the incident began by that, it belongs to it, however long the save took."""
    sign = NodeSign(
        node="n0", sign="left", reason="SIGTERM", fact="left", cause="preempted",
        at=NOON + timedelta(seconds=200),
    )  # fmt: skip
    suspected = replace(sign, sign="suspected", fact="suspected")
    ends = tuple(map(lost_peer, (2, 3)))
    ordered, failed = (
        in_time(replace(case(trigger=trigger, ends=ends), nodes=(sign, suspected)))
        for trigger in ("preempted", "rank_exited")
    )
    assert ordered.nodes == (sign,), "health suspects it because of this very incident"
    assert failed.nodes == ()
