"""What the operator's key allows on running servers: to admit the agents of jobs, and to ask."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
from nats import errors as nats_errors
from nats.aio.client import Client

from everstep.bus.auth.accounts import (
    VALID_S,
    LoginRefusedError,
    Operator,
    is_cut_off,
    is_same,
    logins_before,
)
from everstep.bus.auth.keys import Claims, claims_of
from everstep.bus.auth.login import Login, read_credentials, write_private
from everstep.bus.auth.roles import agents_name
from everstep.bus.diagnosis import explain
from everstep.bus.errors import BusRefusedError, BusTimeoutError, BusUnreachableError
from everstep.bus.nats_patches import PatchedClient, dispose
from everstep.bus.settings import BusSettings

_UPDATE = "$SYS.REQ.CLAIMS.UPDATE"
_REPORT = "$SYS.REQ.SERVER.PING.JSZ"
_LAST_REPORT_S = 1.0
"""Nobody knows how many servers answer: the last one is the one after which none follows."""


async def admit(
    operator: Operator, settings: BusSettings, job: str, *, again: bool = False
) -> int | None:
    """Admit the agents of a job; on return the server accepts their logins.

    Returns the time up to which their logins are revoked. `LoginRefusedError` when they were cut
    off, unless `again` is set.
    """
    async with _system(operator, settings) as server:
        account = await server.account(operator.account_of(job))
        before = None if account is None else logins_before(account)
        if account is not None and is_cut_off(account):
            if not again:
                raise LoginRefusedError(
                    f"the agents of job {job} were cut off from the bus: `everstep bus login "
                    f"{job}` lets them in again"
                )
            # No login can have been renewed since: no agent could connect.
            before = int(datetime.now(UTC).timestamp()) - 1
        token = operator.job_account(job, logins_before=before)
        if account is None or not is_same(account, token):
            await server.update(token)
    return before


async def cut_off(operator: Operator, settings: BusSettings, job: str) -> None:
    """End every connection of a job's agents, and refuse all of their logins from now on.

    `LoginRefusedError` when the server has never let that job in: the name may be a wrong one.
    """
    before = int(datetime.now(UTC).timestamp())
    async with _system(operator, settings) as server:
        if await server.account(operator.account_of(job)) is None:
            raise LoginRefusedError(
                f"no agent of a job {job} was ever admitted at {settings.url}: nobody is cut off; "
                f"is the name right?"
            )
        await server.update(operator.job_account(job, is_cut_off=True, logins_before=before))


async def renew_accounts(operator: Operator, settings: BusSettings) -> list[str]:
    """Update the accounts on a running server that an older release has made; return their names.

    Its clients stay connected.
    """
    async with _system(operator, settings) as server:
        changed = []
        for public in await server.accounts():
            account = await server.account(public)
            token = None if account is None else operator.renewed(account)
            if account is not None and token is not None:
                await server.update(token)
                changed.append(account.name)
        return sorted(changed)


async def server_reports(operator: Operator, settings: BusSettings) -> dict[str, dict[str, Any]]:
    """What each server that answers says about its store and about the cluster, by its name."""
    async with _system(operator, settings) as server:
        return await server.reports()


def login_file(
    folder: Path,
    operator: Operator,
    name: str,
    *,
    valid_s: int = VALID_S,
    issued_after: int | None = None,
) -> Path:
    """Return the file of a login; make a new login if there is none, or it expires soon."""
    path = folder / f"{name}.creds"
    if not (path.exists() and _is_good(path, operator, valid_s, issued_after or 0)):
        write_private(path, operator.login(name, valid_s).text())
    return path


async def agents_login(
    folder: Path, operator: Operator, settings: BusSettings, job: str, valid_s: int = VALID_S
) -> BusSettings:
    """Admit the agents of a job with a login from a folder, and return how they log in."""
    before = await admit(operator, settings, job)
    path = await asyncio.to_thread(
        login_file, folder, operator, agents_name(job), valid_s=valid_s, issued_after=before
    )
    return msgspec.structs.replace(settings, credentials_file=path)


def _is_good(path: Path, operator: Operator, valid_s: int, issued_after: int) -> bool:
    claims = read_credentials(path).claims
    if claims is None or not operator.signs_as(claims.iss):
        return False
    left_s = claims.exp - datetime.now(UTC).timestamp()
    return claims.iat > issued_after and left_s > valid_s / 2


class _Server:
    """A server that accepts accounts from us."""

    def __init__(self, client: Client, settings: BusSettings) -> None:
        self._client = client
        self._settings = settings

    async def account(self, public: str) -> Claims | None:
        """Return the server's claims of an account; None if it has none."""
        answer = await self._request(f"$SYS.REQ.ACCOUNT.{public}.CLAIMS.LOOKUP", b"")
        return claims_of(answer.decode(errors="replace"))

    async def accounts(self) -> list[str]:
        """The public keys of all accounts that the server keeps."""
        answer = msgspec.json.decode(await self._request("$SYS.REQ.CLAIMS.LIST", b""))
        return list(answer.get("data") or ())

    async def update(self, token: str) -> None:
        """Give the server an account, which it keeps over restarts."""
        answer = msgspec.json.decode(await self._request(_UPDATE, token.encode()))
        problem: dict[str, Any] | None = answer.get("error")
        if problem is not None:
            code, text = int(problem.get("code", 0)), str(problem.get("description", ""))
            raise BusRefusedError("a new account", code, text)

    async def reports(self) -> dict[str, dict[str, Any]]:
        """What every server reports, by its name."""
        reports: dict[str, dict[str, Any]] = {}
        inbox = self._client.new_inbox()
        answers = await self._client.subscribe(inbox)
        await self._client.publish(_REPORT, b'{"config":true}', reply=inbox)
        with contextlib.suppress(nats_errors.TimeoutError):
            while True:
                answer = await answers.next_msg(_LAST_REPORT_S)
                report = msgspec.json.decode(answer.data)
                reports[report["server"]["name"]] = report.get("data") or {}
        return reports

    async def _request(self, subject: str, data: bytes) -> bytes:
        within_s = self._settings.request_within_s
        try:
            return (await self._client.request(subject, data, timeout=within_s)).data
        except nats_errors.NoRespondersError as error:
            raise BusUnreachableError(
                f"the server at {self._settings.url} takes no accounts: is its configuration the "
                f"one that `everstep bus setup` wrote?"
            ) from error
        except (nats_errors.TimeoutError, TimeoutError) as error:
            raise BusTimeoutError(f"no answer to {subject} within {within_s:g} s") from error
        except nats_errors.Error as error:
            raise BusUnreachableError(f"cannot send {subject}: {error}") from error


@asynccontextmanager
async def _system(operator: Operator, settings: BusSettings) -> AsyncIterator[_Server]:
    address = BusSettings(
        url=settings.url,
        ca_file=settings.ca_file,
        cert_file=settings.cert_file,
        key_file=settings.key_file,
        connect_within_s=settings.connect_within_s,
        request_within_s=settings.request_within_s,
    )
    login = operator.system_login()
    options = await asyncio.to_thread(Login(address).options)
    client = PatchedClient()
    errors: list[Exception] = []

    async def on_error(error: Exception) -> None:
        errors.append(error)

    try:
        async with asyncio.timeout(settings.connect_within_s):
            await client.connect(
                **{**options, "max_reconnect_attempts": 0},
                allow_reconnect=False,
                user_jwt_cb=login.token.encode,
                signature_cb=login.answer,
                error_cb=on_error,
                name="everstep-operator",
            )
        yield _Server(client, settings)
    except (nats_errors.Error, OSError) as error:
        cause = errors[-1] if errors else error
        raise await asyncio.to_thread(explain, cause, address) from error
    finally:
        await dispose(client)
