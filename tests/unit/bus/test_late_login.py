"""A login that comes too late is no refusal: a busy machine is named, and not a password."""

import pytest
from nats import errors as nats_errors

from everstep.bus import BusSettings
from everstep.bus.diagnosis import explain, is_final
from everstep.bus.errors import BusDeniedError, BusTimeoutError

LATE = nats_errors.Error("nats: 'Authentication Timeout'")


def test_a_late_login_names_the_remedy_and_may_be_tried_again() -> None:
    """A14.2, A14.8: each error has its own name."""
    found = explain(LATE, BusSettings())
    assert isinstance(found, BusTimeoutError)
    assert "too busy" in str(found)
    assert "authorization.timeout" in str(found)
    assert not is_final([LATE])


@pytest.mark.parametrize("text", ["nats: 'Authorization Violation'"])
def test_a_refusal_is_still_one(text: str) -> None:
    error = nats_errors.Error(text)
    assert isinstance(explain(error, BusSettings()), BusDeniedError)
