"""Explains in one line why a connection failed, and what to do."""

import asyncio
import json
import re
import socket
import ssl
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import UTC, datetime

from nats import errors as nats_errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from everstep.bus.auth.keys import Credentials
from everstep.bus.auth.login import read_secret
from everstep.bus.errors import (
    BusDeniedError,
    BusError,
    BusTimeoutError,
    BusTlsError,
    BusUnreachableError,
    CredentialsExpiredError,
    JetStreamOffError,
    NoLeaderError,
    ServerTooOldError,
)
from everstep.bus.settings import BusSettings

Noticing = Callable[..., AbstractContextManager[None]]

OLDEST_SERVER = (2, 11)
_BATCHES_SINCE = (2, 12)
NOT_AVAILABLE = frozenset({10008, 10009})
"""No server leads at this moment: while a leader is chosen, or most servers are away."""
_ABOUT_US = "$JS.API.INFO"
_ASK_AGAIN_S = 1.0
_VIOLATION = "authorization violation"
_REFUSALS = (_VIOLATION, "authentication expired")
_LATE = "authentication timeout"
_NOT_NATS = ("expecting INFO", "json parse", "Separator is")


def is_final(errors: Sequence[Exception]) -> bool:
    """Whether another attempt cannot help; False for a server that is still starting.

    A server that is reloading its configuration refuses clients that have not logged in yet, so
    only a second refusal is final.
    """
    error = errors[-1]
    if _VIOLATION in str(error).lower():
        return sum(_VIOLATION in str(error).lower() for error in errors) > 1
    return (
        isinstance(
            error,
            nats_errors.SecureConnWantedError
            | nats_errors.SecureConnRequiredError
            | ssl.SSLError
            | BusError,
        )
        or _is_refusal(error)
        or _looks_foreign(error)
    )


def explain(error: Exception | None, settings: BusSettings) -> BusError:
    """Return our error for the one that ended the last attempt to connect. Blocks on files."""
    if error is None:
        return BusTimeoutError(
            f"{settings.url} did not answer within {settings.connect_within_s:g} s: is it behind "
            f"a firewall, or is it not a NATS server?"
        )
    if isinstance(error, BusError):
        return error
    if _is_refusal(error):
        return credentials_expired(error, settings) or BusDeniedError(
            f"{settings.url} refused {_identity(settings)}: check user and password_file "
            f"(or credentials_file) in [bus]"
        )
    if isinstance(error, nats_errors.SecureConnWantedError):
        return BusTlsError(
            f"{settings.url} offers no TLS but the settings require it: nothing was sent. Turn "
            f"TLS on in the server, or use nats:// without ca_file"
        )
    if isinstance(error, ssl.SSLError | nats_errors.SecureConnRequiredError):
        return BusTlsError(
            f"no TLS with {settings.url}: {_tls_reason(error)}. Check ca_file, cert_file and the "
            f"names in the server's certificate"
        )
    return _unreachable(error, settings)


def _unreachable(error: Exception, settings: BusSettings) -> BusError:
    where = settings.url
    if isinstance(error, nats_errors.ConnectionClosedError):  # accepted, and closed at once
        expired = credentials_expired(error, settings)
        if expired is not None:
            return expired
    if isinstance(error, socket.gaierror):
        return BusUnreachableError(f"the host in {where} is unknown: {error.strerror}")
    if isinstance(error, ConnectionRefusedError):
        return BusUnreachableError(
            f"nothing listens at {where}: start a server with `everstep up`, or set url in [bus] "
            f"(EVERSTEP_BUS__URL)"
        )
    if _looks_foreign(error):
        return BusUnreachableError(f"the server at {where} is not a NATS server")
    if _is_late(error):
        return BusTimeoutError(
            f"{where} had no login from this process in time: this machine or the server's is too "
            f"busy. Try again; if it stays so, raise authorization.timeout of the server"
        )
    return _silent_or_unknown(error, settings)


def _silent_or_unknown(error: Exception, settings: BusSettings) -> BusError:
    where = settings.url
    if isinstance(error, TimeoutError | nats_errors.TimeoutError):
        return BusTimeoutError(
            f"{where} did not answer within {settings.connect_within_s:g} s: is it behind a "
            f"firewall, or is it not a NATS server?"
        )
    return BusUnreachableError(f"cannot connect to {where}: {str(error) or type(error).__name__}")


def credentials_expired(error: Exception, settings: BusSettings) -> BusError | None:
    """Return the error for expired credentials, or None if they are not why we were refused."""
    if settings.credentials_file is None:
        return None
    credentials = Credentials.parsed(read_secret(settings.credentials_file, "credentials_file"))
    claims = None if credentials is None else credentials.claims
    ends = None if claims is None else claims.ends_at
    said_so = "expired" in str(error).lower()
    if not said_so and (ends is None or ends > datetime.now(UTC)):
        return None
    when = "" if ends is None else f" on {ends:%Y-%m-%d %H:%M:%S} UTC"
    return CredentialsExpiredError(
        f"the credentials in {settings.credentials_file} expired{when}: put new ones there "
        f"(`everstep bus login`); a running process reads them by itself"
    )


def check_server(client: Client, settings: BusSettings) -> None:
    """Raise if the server lacks a feature that we rely on."""
    version = _version(client)
    if version_of(version) < OLDEST_SERVER:
        raise ServerTooOldError(
            f"the server at {settings.url} is NATS {version}; Everstep needs "
            f"{'.'.join(map(str, OLDEST_SERVER))} or newer"
        )
    if not client._server_info.get("jetstream", False):  # noqa: SLF001  nats-py shows no such property
        raise JetStreamOffError(
            f"the server at {settings.url} runs without JetStream: start it with `-js`, or put "
            f"a jetstream block into its configuration"
        )


async def check_account(
    client: Client, settings: BusSettings, answers: Subscription, noticing: Noticing
) -> None:
    """Raise if the account has no JetStream. A slow server is not taken for a refusal."""
    denied: list[str] = []
    try:
        async with asyncio.timeout(settings.connect_within_s) as limit:

            def on_denied(subject: str) -> None:
                denied.append(subject)
                limit.reschedule(asyncio.get_running_loop().time())

            with noticing(denied=on_denied):
                answer = await _answer(client, answers)
    except TimeoutError as error:
        if denied:
            raise BusDeniedError(
                f"{_identity(settings)} must be allowed to publish {_ABOUT_US} at {settings.url}"
            ) from error
        raise BusTimeoutError(
            f"JetStream at {settings.url} did not answer within {settings.connect_within_s:g} s: "
            f"see the server's log"
        ) from error
    finally:
        if not client.is_closed:
            await _unsubscribe(answers)
    _check_answer(answer, settings)


async def _answer(client: Client, answers: Subscription) -> Msg:
    """Ask until somebody answers: servers that have not elected a leader yet answer nothing."""
    while True:
        await client.publish(_ABOUT_US, b"", reply=answers.subject)
        try:
            return await answers.next_msg(timeout=_ASK_AGAIN_S)
        except nats_errors.TimeoutError:
            continue


def _check_answer(answer: Msg, settings: BusSettings) -> None:
    if answer.headers and answer.headers.get("Status") == "503":
        raise JetStreamOffError(f"JetStream is not ready at {settings.url}")
    problem = json.loads(answer.data or b"{}").get("error")
    if problem and problem.get("err_code") in NOT_AVAILABLE:
        raise NoLeaderError("JetStream")
    if problem:
        raise JetStreamOffError(
            f"JetStream at {settings.url} is off for {_identity(settings)}: "
            f"{problem.get('description', 'no reason given')}"
        )


async def _unsubscribe(subscription: Subscription) -> None:
    try:
        async with asyncio.timeout(1):
            await subscription.unsubscribe()
    except (nats_errors.Error, TimeoutError):
        return  # it has unsubscribed itself after its only message


def has_batches(client: Client) -> bool:
    """Whether the server takes atomic batches; older ones store their messages one by one."""
    return version_of(_version(client)) >= _BATCHES_SINCE


def _version(client: Client) -> str:
    return str(client._server_info.get("version", "0"))  # noqa: SLF001  its own property drops the patch level


def version_of(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:3])


def _is_refusal(error: Exception) -> bool:
    text = str(error).lower()
    return isinstance(error, nats_errors.AuthorizationError) or any(
        sign in text for sign in _REFUSALS
    )


def _is_late(error: Exception) -> bool:
    """Whether the server waited for the login in vain."""
    return _LATE in str(error).lower()


def _looks_foreign(error: Exception) -> bool:
    return any(sign in str(error) for sign in _NOT_NATS)


def _tls_reason(error: Exception) -> str:
    return str(getattr(error, "verify_message", "") or getattr(error, "reason", "") or error)


def _identity(settings: BusSettings) -> str:
    if settings.user is not None:
        return f"user {settings.user}"
    if settings.credentials_file is not None:
        return f"the credentials in {settings.credentials_file}"
    if settings.nkey_seed_file is not None:
        return f"the nkey in {settings.nkey_seed_file}"
    return "a client without credentials"
