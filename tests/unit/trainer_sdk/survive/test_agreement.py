"""Which state ranks agree on, and where each takes it."""

import pytest

from trainer_sdk.survive.agreement import (
    CopyResult,
    RankHolding,
    after_failures,
    agree,
    failed_copies,
    needs_images,
    unequal_replicas,
)

DDP = ("all",) * 4
HSDP = ("0", "1", "0", "1")
FSDP = ("0", "1", "2", "3")


def holdings(
    places: tuple[str, ...],
    *steps: int | None,
    torn: tuple[int, ...] = (),
    nodes: str = "aabb",
    images: tuple[int, ...] = (),
    made_in: tuple[int, ...] = (1, 1, 1, 1),
) -> list[RankHolding]:
    return [
        RankHolding(
            rank=rank,
            place=places[rank],
            step=step,
            is_torn=rank in torn,
            images=images,
            node=nodes[rank],
            made_in=made_in[rank],
        )
        for rank, step in enumerate(steps)
    ]


@pytest.mark.parametrize(
    ("held", "step", "sources"),
    [
        pytest.param(holdings(DDP, 5, 5, 5, 5), 5, ["own"] * 4, id="nobody is lost"),
        pytest.param(holdings(DDP, 5, 5, 5, None), 5, ["own", "own", "own", 2], id="same node"),
        pytest.param(
            holdings(DDP, 5, 5, None, None), 5, ["own", "own", 0, 1], id="donors share the work"
        ),
        pytest.param(
            holdings(DDP, 5, 6, 5, None), 6, [1, "own", 1, 1], id="a single rank is a step ahead"
        ),
        pytest.param(
            holdings(DDP, 5, 5, 5, 5, torn=(0, 3)), 5, [1, "own", "own", 2], id="torn ranks copy"
        ),
        pytest.param(holdings(DDP, 0, 0, None, 0), 0, ["own", "own", 3, "own"], id="no step yet"),
        pytest.param(
            holdings(HSDP, 5, 5, None, 5), 5, ["own", "own", 0, "own"], id="the shard's replica"
        ),
        pytest.param(
            holdings(HSDP, 6, 5, 5, 5), 5, [2, "own", "own", "own"], id="a step that others lack"
        ),
        pytest.param(holdings(FSDP, 5, 5, 5, 5), 5, ["own"] * 4, id="no replica is needed"),
        pytest.param(
            holdings(DDP, 9, 9, None, 7, made_in=(1, 1, 0, 2)),
            7,
            [3, 3, 3, "own"],
            id="a later step of an older round",
        ),
        pytest.param(
            holdings(FSDP, 5, 5, None, 5, images=(2, 4)), 4, ["image"] * 4, id="no replica lives"
        ),
        pytest.param(
            holdings(DDP, 5, 5, 5, 5, torn=(0, 1, 2, 3), images=(4,)), 4, ["image"] * 4, id="torn"
        ),
        pytest.param(
            holdings(HSDP, 9, None, 5, 5, images=(8,)), 8, ["image"] * 4, id="replicas far behind"
        ),
        pytest.param(
            holdings(HSDP, 9, None, 5, 5), 5, [2, 3, "own", "own"], id="far behind, and no image"
        ),
        pytest.param(holdings(FSDP, 5, 5, None, 5), None, ["fresh"] * 4, id="nothing is left"),
        pytest.param(holdings(DDP, *[None] * 4), None, ["fresh"] * 4, id="the job begins"),
    ],
)
def test_the_newest_state_that_all_can_have(
    held: list[RankHolding], step: int | None, sources: list[object]
) -> None:
    plan = agree(held)
    assert (plan.step, list(plan.sources.values())) == (step, sources)
    assert plan.is_live == ("own" in sources)


@pytest.mark.parametrize(
    ("held", "needed"),
    [
        (holdings(DDP, 5, 6, 5, None), False),
        (holdings(HSDP, 6, 5, 5, 5), False),
        (holdings(FSDP, 5, 5, None, 5), True),
        (holdings(HSDP, 9, None, 5, 5), True),
        (holdings(DDP, *[None] * 4), True),
    ],
)
def test_images_are_asked_for_only_without_a_near_state(
    held: list[RankHolding], needed: bool
) -> None:
    assert needs_images(held) == needed


def test_an_image_that_a_rank_lacks_is_not_chosen() -> None:
    held = holdings(FSDP, 5, 5, None, 5, images=(2, 4))
    held[1] = RankHolding(rank=1, place="1", step=5, made_in=1, images=(2,))
    assert agree(held).step == 2


def test_reasons_are_for_people() -> None:
    copied = agree(holdings(DDP, 5, 5, 5, None)).reason
    assert copied == (
        "step 5 is the newest that all ranks can have; 3 ranks keep their state, and others copy "
        "it: rank 3 from 2"
    )
    lost = agree(holdings(FSDP, 5, 5, None, 5, images=(4,))).reason
    assert lost == (
        "step 4 is the newest image; rank 2 lost a part of the state that no other rank has"
    )
    assert agree(holdings(DDP, *[None] * 4)).reason == "there is no image; all processes are new"


def test_wrong_bytes_lead_to_another_donor_and_then_to_an_image() -> None:
    held, results = holdings(DDP, 5, 5, 5, None), [CopyResult(equal="right")] * 4
    donors = []
    while (plan := agree(held)).is_live:
        donors.append(plan.sources[3])
        results[3] = CopyResult(equal="wrong")
        failed = failed_copies(plan, results)
        assert failed == {3: f"the hash of what it got from rank {donors[-1]} is wrong"}
        held = after_failures(held, plan, failed)
    assert donors == [2, 0]
    assert "rank 3 could not copy the state from 2 ranks" in plan.reason


def test_copies_that_arrived_stay_when_others_failed() -> None:
    held = holdings(DDP, 5, None, 5, None)
    plan = agree(held)
    failed = failed_copies(plan, [CopyResult(), CopyResult(), CopyResult(error="?"), CopyResult()])
    assert failed == {3: "rank 2: ?"}
    assert list(agree(after_failures(held, plan, failed)).sources.values()) == ["own"] * 3 + [0]


def test_a_donor_is_compared_with_another_replica() -> None:
    plan = agree(holdings(DDP, 5, 5, 5, None))
    assert plan.witnesses == {2: 0}
    equal = [CopyResult(equal="a"), CopyResult(), CopyResult(equal="a"), CopyResult(equal="a")]
    assert unequal_replicas(plan, equal) == ""
    assert unequal_replicas(plan, [CopyResult(equal="b"), *equal[1:]]) == "2 and 0"
    # Before the first step replicas may have been built with other values.
    assert not agree(holdings(DDP, 0, 0, 0, None)).witnesses
