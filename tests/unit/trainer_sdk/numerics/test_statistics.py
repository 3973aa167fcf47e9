"""Which results of a training the running statistics do not expect."""

import json
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer_sdk.numerics.statistics import ResultLimits, ResultWatch

FINITE = st.floats(-1e6, 1e6)


def trained(steps: int = 200, seed: int = 1) -> ResultWatch:
    watch, noise = ResultWatch(), random.Random(seed)
    for step in range(steps):
        loss, norm = 2 + noise.gauss(0, 0.05), math.exp(noise.gauss(0, 0.2))
        assert watch.look(step, loss, norm, lr=1e-3) is None
        watch.learn(step, loss, norm, lr=1e-3)
    return watch


@pytest.mark.parametrize(
    ("loss", "norm", "signal"),
    [
        (math.nan, 1.0, "nan"),
        (2.0, math.nan, "nan"),
        (math.inf, 1.0, "inf"),
        (2.0, -math.inf, "inf"),
        (4.0, 1.0, "loss_spike"),
        (0.0, 1.0, "loss_spike"),
        (2.0, 50.0, "grad_norm_spike"),
        (2.0, 0.0, "grad_norm_spike"),
        (2.2, 1.7, None),
    ],
)
def test_results_outside_their_own_history_are_unexpected(
    loss: float, norm: float, signal: str | None
) -> None:
    unexpected = trained().look(200, loss, norm, lr=1e-3)
    assert (unexpected.signal if unexpected else None) == signal
    if unexpected and unexpected.low is not None and unexpected.high is not None:
        assert not unexpected.low <= unexpected.value <= unexpected.high


def test_an_output_that_leaves_its_band_is_unexpected() -> None:
    watch = ResultWatch()
    for step in range(60):
        watch.learn(step, output=5.0 + step % 3)
    assert watch.look(60, output=7.0) is None
    unexpected = watch.look(60, output=500.0)
    assert unexpected is not None
    assert unexpected.signal == "output_spike"
    other = ResultWatch()
    state = watch.state_dict()
    other.load_state_dict(state)
    assert other.look(60, output=500.0) is not None
    del state["output"]  # as of a release that did not look at it
    other.load_state_dict(state)
    assert other.look(60, output=500.0) is None


def test_only_numbers_that_are_not_finite_are_unexpected_while_there_is_no_history() -> None:
    watch = ResultWatch()
    for step, loss in enumerate((1.0, 1e30, -5.0, 0.0)):
        assert watch.look(step, loss, loss) is None
        watch.learn(step, loss, loss)
    unexpected = watch.look(4, math.nan)
    assert unexpected is not None
    assert unexpected.signal == "nan"


@given(st.lists(st.tuples(FINITE, FINITE), max_size=120), st.sampled_from([math.nan, math.inf]))
def test_each_number_that_is_not_finite_is_unexpected(
    values: list[tuple[float, float]], bad: float
) -> None:
    watch = ResultWatch()
    for step, (loss, norm) in enumerate(values):
        watch.learn(step, loss, norm)
    for loss, norm in ((bad, 1.0), (1.0, bad)):
        unexpected = watch.look(len(values), loss, norm)
        assert unexpected is not None
        assert unexpected.signal in ("nan", "inf")
        assert unexpected.moved_at <= len(values)


@given(st.lists(FINITE, min_size=60, max_size=80), FINITE)
def test_a_look_changes_nothing(losses: list[float], value: float) -> None:
    watch = ResultWatch()
    for step, loss in enumerate(losses):
        watch.learn(step, loss)
    before = watch.state_dict()
    first = watch.look(len(losses), value)
    assert watch.state_dict() == before
    assert watch.look(len(losses), value) == first


@given(st.lists(FINITE, max_size=100), FINITE)
def test_a_band_says_what_a_look_finds(losses: list[float], value: float) -> None:
    watch = ResultWatch()
    for step, loss in enumerate(losses):
        watch.learn(step, loss)
    band = watch.band("loss")
    unexpected = watch.look(len(losses), value)
    assert (unexpected is not None) == (band is not None and not band.low <= value <= band.high)


@given(
    st.integers(0, 10_000),
    st.sampled_from([0.0, 0.1, 3.0]),
    st.sampled_from([0.0, 2.0, 20.0]),
    st.sampled_from([None, 1e-3]),
)
def test_values_that_are_learned_together_are_judged_as_if_each_was_learned_at_once(
    seed: int, noise: float, level: float, rate: float | None
) -> None:
    dice = random.Random(seed)
    together, at_once = ResultWatch(), ResultWatch(ResultLimits(ahead=0))
    for step in range(150):
        scale = noise * dice.choice((1, 1, 1, 1, 8))
        values = [level * 0.98**step + dice.gauss(0, scale) for _ in range(2)]
        values.append(math.exp(dice.gauss(0, scale)))
        if rate is not None and dice.random() < 0.02:
            rate *= 2
        shown = (step, values[0], abs(values[1]), rate, values[2])
        assert together.look(*shown) == at_once.look(*shown)
        for watch in (together, at_once):
            watch.learn(*shown)
    assert together.state_dict() == at_once.state_dict()


def test_a_value_that_never_changes_is_expected() -> None:
    watch = ResultWatch()
    for step in range(100):
        assert watch.look(step, 0.0, 0.0) is None
        watch.learn(step, 0.0, 0.0)
    assert watch.look(100, 0.0, 0.0) is None


def test_the_first_step_that_moved_is_reported() -> None:
    watch = trained()
    for step, loss in enumerate((2.35, 2.40, 2.5), start=200):
        assert watch.look(step, loss, 1.0, lr=1e-3) is None
        watch.learn(step, loss, 1.0, lr=1e-3)
    unexpected = watch.look(203, math.nan, 1.0, lr=1e-3)
    assert unexpected is not None
    assert unexpected.moved_at == 200


def test_a_spike_that_came_back_did_not_move_the_statistic() -> None:
    watch = trained()
    for step, loss in enumerate((2.5, 2.0), start=200):
        watch.learn(step, loss, 1.0, lr=1e-3)
    unexpected = watch.look(202, 9.0, 1.0, lr=1e-3)
    assert unexpected is not None
    assert unexpected.moved_at == 202


def test_another_learning_rate_widens_the_band_for_some_steps() -> None:
    watch = trained()
    assert watch.look(200, 3.2, 1.0, lr=1e-3) is not None
    assert watch.look(200, 3.2, 1.0, lr=1e-2) is None
    watch.learn(200, 2.0, 1.0, lr=1e-2)
    assert watch.look(201, 3.2, 1.0, lr=1e-2) is None
    for step in range(201, 201 + ResultLimits().settling):
        watch.learn(step, 2.0, 1.0, lr=1e-2)
    assert watch.look(300, 3.2, 1.0, lr=1e-2) is not None


def test_a_learning_rate_that_changes_slowly_changes_no_band() -> None:
    watch = trained()
    rate = 1e-3
    for step in range(200, 300):
        rate *= 0.9995
        watch.learn(step, 2.0, 1.0, lr=rate)
    assert watch.look(300, 4.0, 1.0, lr=rate) is not None


def test_a_training_goes_on_from_its_saved_statistics() -> None:
    watch, other = trained(), ResultWatch()
    other.load_state_dict(json.loads(json.dumps(watch.state_dict())))
    assert other.state_dict() == watch.state_dict()
    assert other.band("loss") == watch.band("loss")
    for step, loss in enumerate((2.0, 2.05, 1.95) * 4, start=200):
        assert other.look(step, loss, 1.0, lr=1e-3) is None
        other.learn(step, loss, 1.0, lr=1e-3)


def test_losses_that_do_not_continue_after_a_restore_are_unexpected() -> None:
    watch = ResultWatch()
    watch.load_state_dict(trained().state_dict())
    limits = ResultLimits()
    for step in range(200, 199 + limits.restored):
        assert watch.look(step, 2.35) is None
        watch.learn(step, 2.35)
    unexpected = watch.look(199 + limits.restored, 2.35)
    assert unexpected is not None
    assert unexpected.signal == "restored_loss"
    assert unexpected.value == 2.35
    assert unexpected.moved_at == 200


def test_the_band_survives_a_spike_of_the_data() -> None:
    watch = trained()
    for step in (200, 210, 220):
        watch.learn(step, 1e6, 1e6)
        for later in range(step + 1, step + 10):
            watch.learn(later, 2.0, 1.0)
    assert watch.look(230, 4.0) is not None
    assert watch.look(230, 2.0, 50.0) is not None
