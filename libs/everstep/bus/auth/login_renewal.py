"""Renews our login before it expires, by asking the service that holds the signing key.

A login is valid for days, and renewed at a random moment when about half of them have passed, so
that a fleet does not ask at once. The server ends a connection when its login expires; so we log
in again as soon as we have the new login.
"""

import asyncio
import logging
import random
from datetime import UTC, datetime

from everstep import subjects
from everstep.bus.auth.keys import Claims
from everstep.bus.auth.login import Login
from everstep.bus.auth.roles import LOGINS, job_in
from everstep.bus.errors import BusError
from everstep.bus.jetstream import JetStream
from everstep.bus.requests import ask
from everstep.messages import LoginRenewed, RenewLogin

log = logging.getLogger(__name__)

_LOOK_MOST_S = 60.0
_LOOK_LEAST_S = 0.25
_ANSWER_WITHIN_S = 10.0
_ANSWER_SHARE = 0.2
"""An answer is lost if the service renews its own login just then: there is time to ask again."""


async def renew_for_ever(jetstream: JetStream) -> None:
    """Run in the background of a connection; never fails."""
    login = jetstream.connection.login
    if login.settings.credentials_file is None:
        return
    share = random.uniform(0.45, 0.6)  # noqa: S311  not a secret
    while True:
        await jetstream.connection.wait_connected()
        wait_s = _LOOK_MOST_S
        claims = login.credentials.claims if login.credentials else None
        if claims is not None and claims.exp:
            wait_s = _due_in_s(claims, share)
            if wait_s <= 0:
                wait_s = await _renew(jetstream, claims)
        await asyncio.sleep(min(max(wait_s, _LOOK_LEAST_S), _LOOK_MOST_S))


def _due_in_s(claims: Claims, share: float) -> float:
    return claims.iat + share * (claims.exp - claims.iat) - datetime.now(UTC).timestamp()


async def _renew(jetstream: JetStream, claims: Claims) -> float:
    """Renew once, and return the seconds until the next attempt."""
    connection = jetstream.connection
    left_s = claims.exp - datetime.now(UTC).timestamp()
    try:
        newest = (await asyncio.to_thread(connection.login.read)).claims
        if newest is None or newest.iat <= claims.iat:  # else the file has a newer login
            await _keep(connection.login, await _asked(jetstream, claims, left_s))
    except BusError as error:
        left_s = claims.exp - datetime.now(UTC).timestamp()
        log.warning("login_not_renewed name=%s left_s=%.0f error=%s", claims.name, left_s, error)
        return left_s / 10
    await connection.log_in_anew()
    return 0.0


async def _keep(login: Login, token: str) -> None:
    try:
        await asyncio.to_thread(login.renewed, token)
    except OSError as error:
        log.warning("login_not_kept path=%s error=%s", login.kept_at, error.strerror)


async def _asked(jetstream: JetStream, claims: Claims, left_s: float) -> str:
    job = job_in(claims.name) or subjects.CLUSTER
    credentials = jetstream.connection.login.credentials
    assert credentials is not None
    question = RenewLogin(job=job, token=credentials.token)
    within_s = min(max(_ANSWER_SHARE * left_s, 0.5), _ANSWER_WITHIN_S)
    reply = await ask(
        jetstream, LOGINS, "renew", question, LoginRenewed, job=job, within_s=within_s
    )
    return reply.token
