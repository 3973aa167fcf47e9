"""What retention may never do, whatever there is and whatever the rules say."""

from datetime import UTC, datetime

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from everstep.messages import KnownCheckpoint
from everstep_services.catalog.domain.retention import RetentionRules, judged, last_good, protection

AT = datetime(2026, 1, 1, tzinfo=UTC)


def checkpoint(step: int, root: str = "/ckpt", *, good: bool = True) -> KnownCheckpoint:
    at = AT if good else None
    return KnownCheckpoint(step=step, path=f"{root}/step-{step:09d}", verified_at=at)


def kept(
    known: list[KnownCheckpoint], rules: RetentionRules, restored: int | None = None
) -> list[int]:
    found = judged(known, rules, restored_step=restored)
    return [one.checkpoint.step for one in found if one.is_kept]


@st.composite
def shelves(draw: st.DrawFn) -> list[KnownCheckpoint]:
    known = []
    for step in draw(st.sets(st.integers(0, 40), max_size=12)):
        one = checkpoint(step, draw(st.sampled_from(["/a", "/b"])), good=draw(st.booleans()))
        one = replace(
            one,
            flaw=draw(st.sampled_from(["", "", "", "torn"])),
            quarantined_for=draw(st.sampled_from(["", "", "", "corrupt"])),
            pinned_by=draw(st.sampled_from(["", "", "", "ann"])),
            missing_since=draw(st.sampled_from([None, None, None, AT])),
        )
        known.append(one)
    return known


RULES = st.builds(
    RetentionRules, keep_last=st.integers(0, 4), keep_every_steps=st.sampled_from([0, 1, 5, 10])
)


@given(shelves(), RULES, st.none() | st.integers(0, 40))
def test_what_must_stay_stays(
    known: list[KnownCheckpoint], rules: RetentionRules, restored: int | None
) -> None:
    """Whatever the rules are, the last verified checkpoint of a place is kept (A8.1)."""
    found = judged(known, rules, restored_step=restored)
    assert {id(one.checkpoint) for one in found} == {id(one) for one in known}
    gone = [one.checkpoint for one in found if not one.is_kept]
    assert not any(one.pinned_by or one.quarantined_for for one in gone)
    for root in ("/a", "/b"):
        good = last_good(known, root)
        in_root = [one for one in gone if one.path.startswith(root)]
        assert good not in gone
        assert good is not None or not in_root
        left = [one for one in known if one.path.startswith(root) and one not in gone]
        restorable = [one for one in left if one.may_be_restored]
        before = [one for one in known if one.path.startswith(root) and one.may_be_restored]
        newest = sorted(before, key=lambda one: -one.step)[: rules.keep_last]
        assert all(one in restorable for one in newest)
    if not rules.keep_last:
        assert not gone


@given(shelves(), RULES)
def test_a_second_look_deletes_nothing_more(
    known: list[KnownCheckpoint], rules: RetentionRules
) -> None:
    left = [one.checkpoint for one in judged(known, rules) if one.is_kept]
    assert kept(left, rules) == [
        one.step for one in sorted(left, key=lambda one: (one.step, one.path), reverse=True)
    ]


def test_the_last_ones_and_every_tenth_step_stay() -> None:
    known = [checkpoint(step) for step in range(1, 31)]
    assert kept(known, RetentionRules(keep_last=3, keep_every_steps=10)) == [30, 29, 28, 20, 10]


def test_the_last_good_one_stays_while_newer_ones_are_unverified() -> None:
    known = [checkpoint(100), checkpoint(200), *(checkpoint(s, good=False) for s in (300, 400))]
    assert kept(known, RetentionRules(keep_last=1)) == [400, 200]


def test_nothing_goes_before_one_was_verified() -> None:
    known = [checkpoint(step, good=False) for step in (100, 200, 300)]
    assert kept(known, RetentionRules(keep_last=1)) == [300, 200, 100]
    assert "no checkpoint is verified" in protection(known[0], known)


def test_what_the_running_round_began_from_stays_until_there_is_a_newer_good_one() -> None:
    known = [checkpoint(100), checkpoint(200, good=False), checkpoint(300, good=False)]
    assert kept(known, RetentionRules(keep_last=1), restored=200) == [300, 200, 100]
    known[2] = checkpoint(300)
    assert kept(known, RetentionRules(keep_last=1), restored=200) == [300]


def test_each_reason_says_the_rule() -> None:
    known = [replace(checkpoint(100), pinned_by="ann", pin_reason="paper"), checkpoint(200)]
    reasons = {
        one.checkpoint.step: one.reason for one in judged(known, RetentionRules(keep_last=1))
    }
    assert reasons == {100: "ann has pinned it: paper", 200: "it is the last good one"}
