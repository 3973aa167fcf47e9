"""Checkpoints that were saved since a result began to be unexpected."""

from datetime import UTC, datetime
from typing import Any

import pytest

from everstep.messages import (
    CheckpointCommitted,
    CheckpointReleased,
    CheckpointsDocument,
    Fact,
    KnownCheckpoint,
    NumericsActed,
    NumericsJudged,
    NumericsSuspected,
)
from everstep.messages.facts.stamp import FactStamp
from everstep_services.catalog.domain.facts import apply
from everstep_services.catalog.domain.index import Index
from everstep_services.catalog.domain.places import place_of
from everstep_services.catalog.domain.retention import RetentionRules, judged

AT = datetime(2026, 1, 1, tzinfo=UTC)
STAMP = FactStamp(AT, lambda: "f" * 32, "catalog")


def about(**fields: Any) -> dict[str, Any]:
    head = {"id": "f" * 32, "job": "j", "at": AT, "source": "agent/a", "round": 1}
    return {**head, "case": "0" * 16, "step": 30, **fields}


def suspected(moved_at: int = 25, signal: str = "loss_spike", **fields: Any) -> Fact:
    return NumericsSuspected(**about(signal=signal, moved_at=moved_at, value=9.5, **fields))


def told(kind: str, signal: str = "loss_spike") -> Fact:
    return NumericsJudged(**about(signal=signal, kind=kind, reason="it differs"))


def acted(action: str, outcome: str = "done") -> Fact:
    return NumericsActed(**about(action=action, outcome=outcome, reason="by policy"))


def saved(step: int) -> Fact:
    fields = about(step=step, tier="global", path=f"/ckpt/step-{step:09d}", size_bytes=1)
    del fields["case"]
    return CheckpointCommitted(
        **fields, shards=1, world_size=1, manifest_hash=f"{step}", has_data_position=True,
    )  # fmt: skip


def index(*facts: Fact) -> Index:
    known = Index("j", CheckpointsDocument())
    for fact in (saved(10), saved(20), saved(30), *facts):
        apply(known, fact, STAMP)
    again = Index("j", known.document("", 0, ()))
    assert again.document("", 0, ()) == known.document("", 0, ()), "a replica goes on from it"
    return again


def suspects(known: Index) -> list[int]:
    return sorted(it.step for it in known.known.values() if it.suspected_for)


def test_checkpoints_since_a_result_moved_are_suspect_also_later_ones() -> None:
    known = index(suspected(), saved(40))
    assert suspects(known) == [30, 40]
    (place,) = [place_of(it) for it in known.known.values() if it.step == 30]
    assert place.is_suspect
    assert place.note.startswith("suspect: at step 30 the loss left its band: 9.5")
    assert suspects(index(suspected(), told("persistent"), saved(40))) == [30, 40]


@pytest.mark.parametrize(
    ("facts", "left"),
    [
        ([told("transient"), acted("again")], []),
        ([told("transient"), acted("again", "observed")], [30]),
        ([told("correct_but_unexpected"), acted("rollback", "observed")], []),
        ([acted("rollback", "observed")], []),
        ([told("persistent"), acted("exclude")], [30]),
        ([told("persistent"), acted("rollback")], []),
        ([told("correct_but_unexpected"), acted("skip")], []),
        ([acted("move")], [30]),
    ],
)
def test_what_follows_clears_them_or_does_not(facts: list[Fact], left: list[int]) -> None:
    assert suspects(index(suspected(), *facts)) == left


def test_replicas_that_differ_stay_suspect_if_they_are_only_observed() -> None:
    known = index(suspected(signal="replicas_differ"), acted("rollback", "observed"))
    assert suspects(known) == [30]
    released = {key: it for key, it in about(step=30).items() if key not in {"case", "round"}}
    apply(
        known, CheckpointReleased(**released, tier="global", reason="it is fine", by="ann"), STAMP
    )
    assert suspects(known) == []


def test_one_result_that_is_explained_leaves_the_suspicion_of_another() -> None:
    known = index(suspected(15, case="1" * 16), suspected(), acted("again"))
    assert suspects(known) == [20, 30]


def test_results_are_bounded() -> None:
    known = index(*(suspected(step, case=f"{step:016x}") for step in range(40)))
    assert len(known.unjudged) == 16


def test_retention_keeps_the_last_good_one_before_the_first_suspect() -> None:
    def checkpoint(step: int, suspected_for: str = "") -> KnownCheckpoint:
        path = f"/ckpt/step-{step:09d}"
        return KnownCheckpoint(step=step, path=path, verified_at=AT, suspected_for=suspected_for)

    known = [checkpoint(10), checkpoint(20), *(checkpoint(step, "spike") for step in (30, 40, 50))]
    decisions = judged(known, RetentionRules(keep_last=2))
    assert {it.checkpoint.step: it.reason for it in decisions if it.is_kept} == {
        50: "it is among the last 2",
        40: "it is among the last 2",
        20: "it is the last good one",
    }
