"""The choice of a checkpoint, with plain values."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer_sdk.checkpoint.manifest import Identity
from trainer_sdk.checkpoint.restore.choice import (
    GLOBAL,
    MEMORY,
    PEER,
    Sight,
    StateOffer,
    StateOffers,
    Tier,
    choose,
    missing,
)


def identity(step: int, **changes: Any) -> Identity:
    known: dict[str, Any] = {"job": "j", "round": 1, "step": step, "world_size": 2, "layout": "l"}
    return Identity(**known | changes)


def offer(tier: Tier, step: int, **changes: Any) -> StateOffer:
    return StateOffer(identity=identity(step, **changes), tier=tier, place=f"{tier}-{step}")


def field(*ranks: list[StateOffer], published: tuple[StateOffer, ...] = ()) -> StateOffers:
    return StateOffers(tuple(map(tuple, ranks)), published)


def test_the_newest_common_step_is_chosen_and_ranks_without_a_newer_one_are_named() -> None:
    """All ranks agree on one step (A9.2)."""
    seen = field([offer(MEMORY, 30), offer(MEMORY, 20)], [offer(MEMORY, 20)])
    chosen = choose(seen)
    assert chosen is not None
    assert chosen.identity.step == 20
    [passed] = missing(seen, chosen)
    assert (passed.step, passed.rank) == (30, 1)
    assert passed.reason == "rank 1 has nothing of it, as saved in round 1; 1 of 2 ranks have"


def test_each_rank_takes_its_nearest_tier_and_tiers_may_be_mixed() -> None:
    seen = field(
        [offer(PEER, 30), offer(MEMORY, 30)], [offer(PEER, 30)], [], published=(offer(GLOBAL, 30),)
    )
    chosen = choose(seen)
    assert chosen is not None
    assert [one.tier for one in chosen.offers] == [MEMORY, PEER, GLOBAL]
    assert chosen.published == (offer(GLOBAL, 30),)


@pytest.mark.parametrize("changed", [{"round": 2}, {"layout": "other"}, {"job": "other"}])
def test_states_of_different_identities_are_never_mixed(changed: dict[str, Any]) -> None:
    """Another round, layout or job makes two ranks' states unfit (A9.2)."""
    seen = field([offer(MEMORY, 30)], [offer(MEMORY, 30, **changed)])
    assert choose(seen) is None
    assert {one.rank for one in missing(seen, None)} == {0, 1}


def test_the_latest_round_of_a_step_is_chosen() -> None:
    both = [offer(MEMORY, 30, round=1), offer(MEMORY, 30, round=2)]
    chosen = choose(field(both, both))
    assert chosen is not None
    assert chosen.identity.round == 2


def test_all_ranks_choose_again_if_one_rank_cannot_verify_its_image() -> None:
    seen = field([offer(MEMORY, 30)], [offer(MEMORY, 30), offer(PEER, 30)])
    seen = seen.without([(1, offer(MEMORY, 30))])
    chosen = choose(seen)
    assert chosen is not None
    assert [one.tier for one in chosen.offers] == [MEMORY, PEER]
    assert choose(seen.without([(1, offer(PEER, 30))])) is None


def test_a_published_checkpoint_that_one_rank_finds_damaged_is_rejected_by_all() -> None:
    seen = field([], [], published=(offer(GLOBAL, 30), offer(GLOBAL, 20)))
    chosen = choose(seen.without([(1, offer(GLOBAL, 30))]))
    assert chosen is not None
    assert chosen.identity.step == 20


def test_an_image_that_one_node_has_quarantined_is_loaded_by_no_rank() -> None:
    sights = [
        Sight(offers=(offer(MEMORY, 30), offer(GLOBAL, 30))),
        Sight(offers=(offer(PEER, 30),), suspect=(identity(30),)),
    ]
    chosen = choose(StateOffers.of(sights))
    assert chosen is not None
    assert {one.tier for one in chosen.offers} == {GLOBAL}


def test_only_the_requested_step_is_offered() -> None:
    sights = [Sight(offers=(offer(MEMORY, 30), offer(GLOBAL, 20), offer(GLOBAL, 10)))]
    chosen = choose(StateOffers.of(sights, 20))
    assert chosen is not None
    assert chosen.identity.step == 20
    assert StateOffers.of(sights, 15).is_empty


def test_images_of_another_layout_are_dropped_with_the_reason() -> None:
    seen = field([offer(MEMORY, 30, layout="old"), offer(MEMORY, 20)])
    seen, passed = seen.of_layout("l")
    assert [(one.step, one.rank) for one in passed] == [(30, 0)]
    assert "other tensors" in passed[0].reason
    chosen = choose(seen)
    assert chosen is not None
    assert chosen.identity.step == 20


offers = st.builds(
    offer, st.sampled_from([MEMORY, PEER]), st.integers(1, 4), round=st.integers(1, 2)
)


@given(
    st.lists(st.lists(offers, max_size=5), min_size=1, max_size=4),
    st.lists(st.builds(offer, st.just(GLOBAL), st.integers(1, 4)), max_size=3),
)
def test_the_choice_is_the_newest_state_that_all_ranks_have(
    images: list[list[StateOffer]], published: list[StateOffer]
) -> None:
    seen = field(*images, published=tuple(published))
    chosen = choose(seen)
    common = set.intersection(*({one.identity for one in (*own, *published)} for own in images))
    if chosen is None:
        assert not common
        return
    newest = max(common, key=lambda one: (one.step, one.round))
    assert chosen.identity == newest
    for own, taken in zip(images, chosen.offers, strict=True):
        assert taken in own or taken in published
        assert taken.identity == newest
    later = {one.step for one in missing(seen, chosen)}
    assert all(step > newest.step for step in later)
