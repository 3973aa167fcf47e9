"""Which logins are renewed, by pure reckoning: whose, for whom, until when."""

from datetime import UTC, datetime

import pytest

from everstep.bus.auth.accounts import LoginRefusedError, Operator, Signers
from everstep.bus.auth.keys import Claims, Credentials, Key, KeyKind, claims_of
from everstep.bus.auth.roles import ADMIN, SERVICE

OPERATOR = Operator(Key.new(KeyKind.OPERATOR))
STRANGER = Operator(Key.new(KeyKind.OPERATOR))


def of(token: str) -> Claims:
    claims = claims_of(token)
    assert claims is not None
    return claims


def in_s(seconds: float) -> float:
    return datetime.now(UTC).timestamp() + seconds


@pytest.mark.parametrize(("name", "job"), [("agent-a", "a"), (SERVICE, "_cluster")])
def test_a_renewed_login_is_the_same_with_a_later_end(name: str, job: str) -> None:
    login = OPERATOR.login(name, 900)
    renewed = OPERATOR.signers.valid_for(901).renewed(login.token, job)
    before, after = of(login.token), of(renewed)
    assert (after.sub, after.name, after.iss, after.nats) == (
        before.sub, before.name, before.iss, before.nats
    )  # fmt: skip
    assert in_s(890) < after.exp <= in_s(901)


def test_a_login_that_was_made_for_a_short_time_is_renewed_for_a_short_time() -> None:
    """A8: who was given a login for a minute does not have one for a week."""
    login = OPERATOR.login("agent-a", 60)
    renewed = OPERATOR.signers.valid_for(600).renewed(login.token, "a")
    assert in_s(50) < of(renewed).exp <= in_s(60)


def test_a_renewal_makes_no_login_shorter() -> None:
    login = OPERATOR.login("agent-a", 6000)
    renewed = OPERATOR.signers.valid_for(60).renewed(login.token, "a")
    assert of(renewed).exp == of(login.token).exp


def forged(login: Credentials) -> str:
    """The token of job a with the name of job b in it, and the signature that it had."""
    head, _, signature = login.token.split(".")
    body = OPERATOR.login("agent-b").token.split(".")[1]
    return f"{head}.{body}.{signature}"


@pytest.mark.parametrize(
    ("token", "job", "said"),
    [
        (OPERATOR.login("agent-a").token, "b", "does not belong to job b"),
        (OPERATOR.login("agent-a").token, "_cluster", "does not belong to job _cluster"),
        (OPERATOR.login(SERVICE).token, "a", "does not belong to job a"),
        (OPERATOR.login(ADMIN).token, "_cluster", "does not renew this login"),
        (OPERATOR.login("agent-a", -5).token, "a", "has expired"),
        (forged(OPERATOR.login("agent-a")), "b", "does not renew this login"),
        (STRANGER.login("agent-a").token, "a", "does not renew this login"),
        (OPERATOR.job_account("a"), "a", "does not renew this login"),
        ("", "a", "does not renew this login"),
        ("a.b.c", "a", "does not renew this login"),
        (".." * 1000, "a", "does not renew this login"),
    ],
    ids=[
        "another job", "for the cluster", "a service for a job", "admin", "expired", "forged",
        "another operator", "an account", "nothing", "rubbish", "dots",
    ],
)  # fmt: skip
def test_what_is_not_renewed(token: str, job: str, said: str) -> None:
    with pytest.raises(LoginRefusedError, match=said):
        OPERATOR.signers.renewed(token, job)


def test_everything_follows_from_the_operators_key_and_from_nothing_less() -> None:
    key = Key.new(KeyKind.OPERATOR)
    assert Operator(key).account_of("a") == Operator(Key(key.seed)).account_of("a")
    assert len({OPERATOR.account_of(job) for job in ("a", "b", "A", "a-b")}) == 4
    assert not hasattr(Signers([]), "account_of")


def test_a_creds_file_is_read_as_it_was_written() -> None:
    login = OPERATOR.login("agent-a")
    assert Credentials.parsed(login.text()) == login
    assert Credentials.parsed("nothing of that kind") is None
    assert Key(login.seed).public == of(login.token).sub
