"""What a keeper holds of a rank whose training was sent back, and of rounds that are over."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep_services.agent.replicas.displacement import ImageSender, TrainingLine
from trainer_sdk.checkpoint.image_folder import RestoredState
from trainer_sdk.checkpoint.manifest import Identity


def state(round: int, step: int, rollbacks: int = 0) -> Identity:
    return Identity(job="j", round=round, step=step, world_size=8, layout="l", rollbacks=rollbacks)


def sent_back(to: Identity, *, round: int) -> ImageSender:
    return ImageSender(round, RestoredState(identity=to, round=round))


def test_a_newer_state_is_taken_and_an_older_one_is_not() -> None:
    course, held = TrainingLine(), [state(1, 10), state(1, 20)]
    assert course.hear(ImageSender(1))
    assert not course.refusal(state(1, 30), held)
    assert course.refusal(state(1, 15), held) == "a newer one is here"


def test_a_later_round_is_newer_at_whatever_step() -> None:
    course, held = TrainingLine(), [state(1, 10), state(1, 20)]
    course.hear(ImageSender(2))
    assert not course.refusal(state(2, 1), held)
    assert course.refusal(state(1, 30), [state(2, 1)]) == "a newer one is here"


def test_what_the_training_went_back_to_is_taken_though_a_newer_one_is_here() -> None:
    course = TrainingLine()
    course.hear(sent_back(state(1, 10), round=2))
    assert not course.refusal(state(1, 10), [state(1, 20)])
    assert course.refusal(state(1, 20), []) == "the training went back to step 10, before it"
    assert course.refusal(state(1, 9), [state(1, 10)]) == "a newer one is here"


def test_a_step_that_is_saved_again_after_going_back_in_place_is_taken() -> None:
    course, held = TrainingLine(), [state(1, 10), state(1, 20)]
    course.hear(ImageSender(1, RestoredState(identity=state(1, 10), round=1, rollbacks=1)))
    assert course.refusal(state(1, 20), held) == "the training went back to step 10, before it"
    assert not course.refusal(state(1, 20, rollbacks=1), held)
    assert min([*held, state(1, 12, rollbacks=1)], key=course.worth) == state(1, 20)


def test_what_was_left_makes_room_before_what_the_training_goes_on_from() -> None:
    course, held = TrainingLine(), [state(1, 10), state(1, 20)]
    assert min(held, key=course.worth) == state(1, 10)
    course.hear(sent_back(state(1, 10), round=2))
    assert min(held, key=course.worth) == state(1, 20)
    assert min([*held, state(2, 11)], key=course.worth) == state(1, 20)
    assert not course.has_left(state(2, 11))


def test_nobody_of_a_round_that_is_over_is_heard() -> None:
    """Round 3 has gone on from step 20; an agent of round 2, which went back to 10, still sends."""
    course = TrainingLine()
    assert course.hear(sent_back(state(1, 20), round=3))
    assert not course.hear(sent_back(state(1, 10), round=2))
    assert not course.has_left(state(1, 20))
    assert course.refusal(state(1, 10), [state(1, 20)]) == "a newer one is here"


def test_a_round_that_does_not_restore_leaves_nothing_more() -> None:
    course = TrainingLine()
    course.hear(sent_back(state(1, 10), round=2))
    course.hear(ImageSender(3))
    assert course.has_left(state(1, 20))
    assert not course.has_left(state(2, 11))


SENDERS = st.tuples(st.integers(1, 5), st.booleans(), st.integers(0, 9))
"""A round, whether it was sent back, and to which step of the round before."""


@given(st.lists(SENDERS, min_size=1), st.lists(st.tuples(st.integers(1, 5), st.integers(0, 9))))
def test_the_newest_round_that_was_heard_is_never_displaced(
    senders: list[tuple[int, bool, int]], others: list[tuple[int, int]]
) -> None:
    course, newest = TrainingLine(), 0
    for round, is_sent_back, step in senders:
        sender = (
            sent_back(state(round - 1, step), round=round) if is_sent_back else ImageSender(round)
        )
        assert course.hear(sender) == (round >= newest)
        newest = max(newest, round)
    own = state(newest, 0)
    held = [own, *(state(round, step) for round, step in others if round < newest)]
    if len(held) > 1:
        assert min(held, key=course.worth) != own
    for round, step in others:
        if round < newest:
            assert course.refusal(state(round, step), held)


@pytest.mark.parametrize("round", [1, 2])
def test_a_restored_state_is_known_until_a_later_one_is(round: int) -> None:
    course = TrainingLine()
    course.hear(sent_back(state(1, 20), round=2))
    course.hear(ImageSender(2, RestoredState(identity=state(1, 5), round=round)))
    assert course.has_left(state(1, 10)) == (round == 2)
