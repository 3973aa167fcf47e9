"""No message ends a service, whatever it is and from whatever sender (A13.3)."""

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from everstep.messages import RestartJob, ShowRound, encode
from everstep.messages.questions.asks import ASKS
from tests.hostile_bus import SERVED, ControlPlane, Input, inputs

FEW = settings(
    max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    with ControlPlane(tmp_path_factory.mktemp("plane")) as running:
        yield running


@pytest.fixture(autouse=True)
def every_service_lives_on(plane: ControlPlane) -> Iterator[None]:
    yield
    assert not plane.ended


def test_a_question_of_the_wrong_type_is_refused_with_400(plane: ControlPlane) -> None:
    codes = {}
    for one in ASKS:
        if one.service in SERVED:
            wrong = RestartJob if one.question is ShowRound else ShowRound
            question = ShowRound(job="j") if wrong is ShowRound else _restart()
            codes[one.service, one.verb] = plane.ask(one.service, one.verb, question)
    assert set(codes.values()) == {"400"}, codes
    assert not plane.failures()


def _restart() -> RestartJob:
    return RestartJob(job="j", by="somebody", reason="", origin="test", round=1)


def test_a_question_without_a_reply_subject_ends_no_service(plane: ControlPlane) -> None:
    plane.send(
        [
            Input(f"es.ask.{one.service}.{one.verb}.j", body)
            for one in ASKS
            if one.service in SERVED
            for body in (b"garbage", encode(_restart()), b"")
        ]
    )
    assert not plane.failures()


@FEW
@given(sent=st.lists(inputs(), min_size=5, max_size=30))
def test_no_input_ends_a_service_or_meets_an_exception_that_nobody_foresaw(
    plane: ControlPlane, sent: list[Input]
) -> None:
    plane.send(sent)
    assert not plane.failures()
