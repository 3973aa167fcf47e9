"""The index of a job's checkpoints: what facts and files make of it."""

import itertools
import random
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.bus.documents import packed
from everstep.messages import (
    MAX_MESSAGE_BYTES,
    CheckpointRestored,
    CheckpointsDocument,
    Fact,
    Holding,
    KnownCheckpoint,
    RejectedStep,
    ReplicaLost,
    ReplicationDegraded,
    ReplicationRestored,
)
from everstep.messages.documents.health import combined
from everstep.messages.documents.rounds import Seat
from everstep.messages.facts.stamp import FactStamp
from everstep_services.catalog.domain.facts import apply
from everstep_services.catalog.domain.files import compare
from everstep_services.catalog.domain.index import Index
from everstep_services.catalog.domain.places import located
from everstep_services.catalog.domain.replication import judge, repairs, survivable
from everstep_services.catalog.domain.retention import RetentionRules, judged, last_good
from everstep_services.catalog.domain.schedule import ReadBackRules, rules_for, to_verify
from tests.integration.catalog.replicas import formed, stored
from tests.unit.history.facts import make
from trainer_sdk.checkpoint.manifest import Identity, Manifest, ShardFile
from trainer_sdk.checkpoint.storage.checkpoints import CheckpointMark, StoredCheckpoint

JOB = "llama"
BEGAN = datetime(2026, 11, 21, 7, 0, tzinfo=UTC)
PATHS = {step: f"/ckpt/step-{step:09d}" for step in (100, 200, 300)}
_ids = itertools.count()


def now(after_s: float = 0.0) -> FactStamp:
    return FactStamp(BEGAN + timedelta(seconds=after_s), lambda: f"{next(_ids):032x}", "catalog")


def index(*facts: Fact) -> Index:
    made = Index(JOB, CheckpointsDocument())
    for fact in facts:
        apply(made, fact, now())
    return made


def about(kind: str, step: int = 100, **more: Any) -> Fact:
    more.setdefault("round", None)
    if kind == "checkpoint_verified":
        more.setdefault("manifest_hash", "")  # as older releases say it
    return make(kind, job=JOB, step=step, tier="global", **more)


def committed(step: int, *, manifest_hash: str = "h1") -> Fact:
    return about(
        "checkpoint_committed", step, path=PATHS[step], manifest_hash=manifest_hash, round=1
    )


def verified(step: int, manifest_hash: str, flaw: str = "") -> Fact:
    return about(
        "checkpoint_verified",
        step,
        path=PATHS[step],
        is_good=not flaw,
        reason=flaw,
        manifest_hash=manifest_hash,
    )


def rejecting(step: int, reason: str, *, is_corrupt: bool = True) -> Fact:
    """A restore that passed a step over."""
    rejected = RejectedStep(
        step=step, tier="global", reason=reason, path=PATHS[step], is_corrupt=is_corrupt
    )
    return make("checkpoint_restored", job=JOB, step=100, rejected=(rejected,), round=2)


FACTS = [
    *(committed(step) for step in PATHS),
    committed(200, manifest_hash="h2"),
    about("checkpoint_verified", 100, path=PATHS[100], is_good=True, reason=""),
    about("checkpoint_verified", 200, path=PATHS[200], is_good=False, reason="torn"),
    verified(200, "h2"),
    about("checkpoint_quarantined", 200, path=PATHS[200], cause="corrupt", reason="torn"),
    about("checkpoint_released", 200),
    make("checkpoint_pinned", job=JOB, step=300, by="ann", reason="paper", round=None),
    make("checkpoint_unpinned", job=JOB, step=300, by="ann", reason="done", round=None),
    about("checkpoint_deleted", 100, path=PATHS[100]),
    formed(JOB, 3),
    formed(JOB, 2, 2),
    stored(JOB, 0, "n1"),
    stored(JOB, 1, "n0", step=120),
    rejecting(200, "torn"),
    make("node_lost", job=JOB, node="n1"),
    make("node_left", job=JOB, node="n0", round=None),
    make("job_ended", job=JOB, round=None),
]


@settings(max_examples=200)
@given(st.lists(st.sampled_from(FACTS), max_size=12))
def test_a_fact_that_comes_a_second_time_changes_nothing(facts: list[Fact]) -> None:
    once, twice = index(), index()
    for fact in facts:
        apply(once, fact, now())
        apply(twice, fact, now())
        apply(twice, fact, now())
    assert once.document("", 0, ()) == twice.document("", 0, ())


@given(st.lists(st.sampled_from(FACTS), max_size=12))
def test_the_document_holds_all_of_it(facts: list[Fact]) -> None:
    made = index(*facts)
    document = made.document("s", 7, ())
    assert Index(JOB, document).document("s", 7, ()) == document


def test_another_checkpoint_of_the_same_name_is_not_verified_but_still_pinned() -> None:
    verified = about("checkpoint_verified", 200, path=PATHS[200], is_good=True, reason="")
    pinned = make("checkpoint_pinned", job=JOB, step=200, by="ann", reason="r", round=None)
    made = index(committed(200), verified, pinned, committed(200, manifest_hash="h2"))
    (one,) = made.known.values()
    assert (one.verified_at, one.pinned_by, one.manifest_hash) == (None, "ann", "h2")


@pytest.mark.parametrize("kind", ["checkpoint_restored", "restore_failed", "fresh_started"])
def test_what_a_restore_has_found_corrupt_is_not_the_last_good_one(kind: str) -> None:
    good = [about("checkpoint_verified", step, path=PATHS[step], is_good=True) for step in PATHS]
    made = index(*map(committed, PATHS), *good)
    before = last_good(made.known.values())
    assert before is not None
    assert before.step == 300
    restored = rejecting(300, "a shard is torn")
    assert isinstance(restored, CheckpointRestored)
    apply(made, make(kind, job=JOB, rejected=restored.rejected), now())
    after = last_good(made.known.values())
    assert after is not None
    assert after.step == 200
    (one,) = made.of_step(300, "global")
    assert (one.flaw, one.is_good) == ("a shard is torn", False)
    again = to_verify(made, ReadBackRules(is_on=True, with_objects=False, again_s=0.0), BEGAN)
    assert again == one
    kept = judged(made.known.values(), RetentionRules(keep_last=1))
    assert [each.checkpoint.step for each in kept if each.is_kept] == [300, 200]


def test_what_a_restore_could_not_use_is_as_good_as_it_was() -> None:
    verified = about("checkpoint_verified", 200, path=PATHS[200], is_good=True)
    made = index(committed(200), verified, rejecting(200, "it lacks more", is_corrupt=False))
    (one,) = made.known.values()
    assert one.is_good


def test_memory_goes_with_the_agent_and_that_is_said() -> None:
    made = index(formed(JOB, 2), stored(JOB, 0, "n1"), stored(JOB, 1, "n0"))
    apply(made, make("node_lost", job=JOB, node="n1", reason="silent"), now())
    assert {(one.slot, one.holder) for one in made.holdings.values()} == {(0, "n0"), (1, "n0")}
    lost = [fact for fact in made.facts if isinstance(fact, ReplicaLost)]
    assert {(fact.owner_slot, fact.holder) for fact in lost} == {(0, "n1"), (1, "n1")}
    assert all("silent" in fact.reason for fact in lost)


@pytest.mark.parametrize(
    ("kind", "more", "is_kept"),
    [
        ("node_returned", {"how": "restarted"}, False),
        ("node_returned", {"how": "cut_off"}, True),
        ("node_joined", {"last_round": None}, False),
        ("node_joined", {"last_round": 1}, True),
    ],
)
def test_another_agent_on_a_node_holds_nothing(
    kind: str, more: dict[str, Any], is_kept: bool
) -> None:
    made = index(formed(JOB, 2), stored(JOB, 0, "n1"))
    apply(made, make(kind, job=JOB, node="n1", **{"round": None, **more}), now())
    assert any(one.holder == "n1" for one in made.holdings.values()) is is_kept


def test_what_is_in_memory_can_be_restored_by_as_many_ranks_only() -> None:
    held = [stored(JOB, slot, f"n{slot ^ 1}", step=100 + slot) for slot in range(2)]
    made = index(formed(JOB, 2), *held)
    places, _ = located(made, None, 2, ())
    assert [(one.step, one.tier, one.survivable_losses) for one in places] == [(100, "peer", 1)]
    assert located(made, None, 4, ()) == ([], [])
    apply(made, formed(JOB, 4, 2), now())
    assert not made.holdings


def test_too_few_copies_are_said_once_they_last_and_repaired_elsewhere() -> None:
    """Under-replicated, repaired, restored: each is a fact (A9.5)."""
    held = [stored(JOB, slot, f"n{slot ^ 1}") for slot in range(4)]
    made = index(formed(JOB, 4), *held)
    judge(made, 1, 60.0, now())
    assert made.facts == []
    apply(made, make("node_lost", job=JOB, node="n3", reason="silent"), now())
    made.facts.clear()
    judge(made, 1, 60.0, now())
    judge(made, 1, 60.0, now(59))
    assert made.facts == []
    judge(made, 1, 60.0, now(60))
    judge(made, 1, 60.0, now(70))
    (said,) = made.facts
    assert isinstance(said, ReplicationDegraded)
    assert (said.slots, said.survivable_losses, said.wanted_losses) == ((2, 3), 0, 1)

    seats = [
        Seat(
            node=f"n{n}", slot=n, ranks=1, address="a", stage="running", replica_port=1,
            failure_domain=f"rack-{n % 2}",
        )
        for n in range(3)
    ]  # fmt: skip
    asked = repairs(made, 1, seats)
    assert [(one.slot, one.holder, one.to) for one in asked] == [(2, "n2", "n1"), (3, "n2", "n1")]
    for one in asked:
        apply(made, stored(JOB, one.slot, one.to), now())
    judge(made, 1, 60.0, now(80))
    restored = made.facts[-1]
    assert isinstance(restored, ReplicationRestored)
    assert (restored.survivable_losses, restored.degraded_s) == (1, 80.0)


def test_a_job_without_copies_is_never_short_of_them() -> None:
    made = index(formed(JOB, 2))
    for slot in range(2):
        own = make(
            "shards_written", job=JOB, slot=slot, node=f"n{slot}", step=100, tier="memory", round=1
        )
        apply(made, own, now())
    judge(made, 1, 0.0, now(1000))
    assert made.facts == []


def test_the_largest_index_fits_into_one_message() -> None:
    noise = random.Random(7)
    made = index()
    for step in range(1100):
        flaw = noise.randbytes(100).hex()
        root = f"s3://a-bucket-with-a-long-name/team/project/{'x' * 40}/run-{step % 3}"
        made.put(
            KnownCheckpoint(
                step=step,
                path=f"{root}/step-{step:09d}",
                round=7,
                saved_at=BEGAN + timedelta(seconds=step),
                size_bytes=noise.getrandbits(40),
                shards=4096,
                world_size=4096,
                manifest_hash=noise.randbytes(16).hex(),
                committed_hash=noise.randbytes(16).hex(),
                verified_at=BEGAN,
                flaw=flaw,
                quarantined_for="corrupt",
                quarantine_reason=flaw,
            )
        )
    apply(made, formed(JOB, 1), now())
    made.slots = 12_500
    for slot in range(made.slots):
        for holder in (slot, (slot + 12) % made.slots):
            made.hold(Holding(slot=slot, holder=f"gpu-{holder:05d}", step=5000 + slot % 3, round=7))
    assert len(made.known) == 1000
    stored_ = made.document("s" * 32, 2**40, ())
    assert len(packed(msgspec.json.encode(stored_), "x")) < MAX_MESSAGE_BYTES
    assert survivable(made.holdings.values(), made.slots)[0] == 1


# ---- files


def seen(step: int, hash_: str = "h1", **more: Any) -> StoredCheckpoint:
    identity = Identity(job=JOB, round=3, step=step, world_size=2, layout="l")
    files = (ShardFile(name="a", size_bytes=5, hash="x"),)
    manifest = Manifest(identity=identity, files=files, saved_at="2026-11-21T07:00:00+00:00")
    return StoredCheckpoint(step, PATHS[step], manifest, hash_, **more)


def test_files_bring_what_facts_have_lost_and_keep_what_is_known() -> None:
    verified = about("checkpoint_verified", 100, path=PATHS[100], is_good=True, reason="")
    made = index(committed(100), verified)
    assert compare(made, "/ckpt", [seen(200), seen(100)], now()) == (1, 0)
    known = {one.step: one for one in made.known.values()}
    assert known[100].is_good
    assert (known[200].world_size, known[200].saved_at, known[200].is_good) == (2, BEGAN, False)


def test_what_the_files_mark_is_marked_and_their_lack_unmarks_nothing() -> None:
    pinned = make("checkpoint_pinned", job=JOB, step=100, by="ann", reason="paper", round=None)
    made = index(committed(100), pinned)
    marked = seen(
        200,
        pinned=CheckpointMark(by="bob"),
        quarantined=CheckpointMark(reason="NaN", failed_at=207),
    )
    compare(made, "/ckpt", [marked, seen(100)], now())
    known = {one.step: one for one in made.known.values()}
    assert (known[100].pinned_by, known[200].pinned_by) == ("ann", "bob")
    assert (known[200].quarantined_for, known[200].quarantine_reason) == ("nan_after_load", "NaN")
    said = len(made.facts)
    compare(made, "/ckpt", [marked, seen(100)], now())
    assert len(made.facts) == said


def test_what_is_gone_is_missing_until_it_is_there_again() -> None:
    made = index(committed(100), committed(200))
    assert compare(made, "/ckpt", [seen(200)], now(5)) == (0, 1)
    assert compare(made, "/elsewhere", [], now(9)) == (0, 0)
    known = {one.step: one for one in made.known.values()}
    assert known[100].missing_since == BEGAN + timedelta(seconds=5)
    _, rejected = located(made, None, 2, ())
    assert [(one.step, one.reason) for one in rejected] == [
        (100, f"its files are gone from {PATHS[100]}")
    ]
    compare(made, "/ckpt", [seen(200), seen(100)], now(6))
    assert all(one.missing_since is None for one in made.known.values())


def test_a_manifest_that_nobody_has_committed_is_never_good() -> None:
    made = index(committed(100), verified(100, "h1"))
    compare(made, "/ckpt", [seen(100, "h2")], now())
    apply(made, verified(100, "h2"), now())
    (one,) = made.known.values()
    assert (one.is_good, one.quarantined_for) == (False, "")
    assert last_good(made.known.values()) is None
    apply(made, verified(100, "h2", flaw="it is not the one that was committed"), now())
    (place,), rejected = located(made, None, 2, ())
    assert (place.manifest_hash, place.committed_hash, rejected) == ("h2", "h1", [])
    assert place.note == (
        f"the manifest of {PATHS[100]} is not the one that was committed: its xxh3-128 is h2, "
        "and h1 was committed"
    )
    compare(made, "/ckpt", [seen(100, "h1")], now())  # it was put back
    apply(made, verified(100, "h1"), now())
    assert [one.is_good for one in made.known.values()] == [True]


def test_what_was_committed_is_heard_of_after_its_files_were_seen() -> None:
    made = index(committed(100))
    compare(made, "/ckpt", [seen(100, "h2")], now())
    apply(made, verified(100, "h2", flaw="it is not the one that was committed"), now())
    apply(made, committed(100, manifest_hash="h2"), now())
    (one,) = made.known.values()
    assert (one.is_as_committed, one.flaw, one.verified_at) == (True, "", None)
    apply(made, verified(100, "h2"), now())
    assert [one.is_good for one in made.known.values()] == [True]


@pytest.mark.parametrize("gone", ["quarantined", "missing", "never told of"])
def test_a_save_whose_fact_is_lost_may_take_the_place_of_what_is_gone(gone: str) -> None:
    made = index(committed(100, manifest_hash="" if gone == "never told of" else "h1"))
    if gone == "quarantined":
        apply(made, about("checkpoint_quarantined", path=PATHS[100], cause="c", reason="r"), now())
    if gone == "missing":
        compare(made, "/ckpt", [], now())
    compare(made, "/ckpt", [seen(100, "h2")], now())
    apply(made, verified(100, "h2"), now())
    assert [one.is_good for one in made.known.values()] == [True]


def test_a_reading_says_nothing_of_another_manifest() -> None:
    made = index(committed(100, manifest_hash="h2"), verified(100, "h1"))
    (one,) = made.known.values()
    assert (one.verified_at, one.is_good) == (None, False)


def test_a_manifest_that_cannot_be_read_is_quarantined() -> None:
    made = index()
    broken = StoredCheckpoint(100, PATHS[100], None, flaw="it is torn")
    compare(made, "/ckpt", [broken], now())
    compare(made, "/ckpt", [broken], now())
    (one,) = made.known.values()
    assert (one.quarantined_for, one.quarantine_reason) == ("corrupt", "it is torn")
    assert len(made.facts) == 1


# ---- duties


def test_the_newest_that_was_never_read_back_is_read_first() -> None:
    made = index(committed(100), committed(300))
    made.put(KnownCheckpoint(step=400, path="s3://bucket/step-000000400"))
    reading = ReadBackRules(is_on=True, with_objects=False, again_s=0.0)

    def first(how: ReadBackRules, wall: datetime = BEGAN) -> int | None:
        one = to_verify(made, how, wall)
        return None if one is None else one.step

    assert first(reading) == 300
    assert first(ReadBackRules(is_on=True, with_objects=True, again_s=0.0)) == 400
    assert first(ReadBackRules(is_on=False, with_objects=True, again_s=0.0)) is None
    for step in (100, 300):
        apply(made, about("checkpoint_verified", step, path=PATHS[step], is_good=True), now())
    assert first(reading) is None
    later = max(one.verified_at for one in made.known.values() if one.verified_at is not None)
    again = ReadBackRules(is_on=True, with_objects=False, again_s=60.0)
    assert first(again, later + timedelta(seconds=61)) == 300


def test_a_jobs_switches_go_over_the_clusters_and_the_settings() -> None:
    from everstep.messages import ControlDocument

    def switches(**of: str) -> ControlDocument:
        names = {f"catalog.{name}": value for name, value in of.items()}
        return ControlDocument(settings=names, changed_by="", reason="", modes={})

    default = RetentionRules(keep_last=3)
    assert rules_for(default, combined(None, None)) == default
    cluster, job = switches(keep_last="5", keep_every_steps="100"), switches(keep_last="2")
    assert rules_for(default, combined(cluster, job)) == RetentionRules(
        keep_last=2, keep_every_steps=100
    )
    assert rules_for(default, switches(keep_last="many")) == default
