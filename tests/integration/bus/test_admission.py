"""Agents are let in when we allow it, and cut off; whatever happens to the server meanwhile."""

import asyncio
import os
import signal
from pathlib import Path

import pytest
from nats.aio.msg import Msg

from everstep import subjects
from everstep.bus import BusSettings, connect
from everstep.bus.auth import job_access
from everstep.bus.auth.accounts import LoginRefusedError, Operator
from everstep.bus.auth.job_access import admit, agents_login, cut_off, login_file
from everstep.bus.auth.keys import Key, KeyKind, claims_of
from everstep.bus.auth.login import read_credentials
from everstep.bus.auth.roles import ADMIN, SERVICE
from everstep.bus.client import NatsBus
from everstep.bus.errors import BusConfigError, BusDeniedError, BusUnreachableError
from everstep.bus.server.config import renew_accounts
from everstep.bus.server.dev_server import DevServer, dev_server
from everstep_services.cli.errors import CliError, Exit
from everstep_services.cli.machine.state import RunningServices, StateDir
from everstep_services.cli.stack.admission import agent_login
from tests.integration.bus.servers import refused
from tests.waiting import WITHIN_S, until_async


def announced(nats: DevServer) -> RunningServices:
    return RunningServices(
        pid=1, version="1", api="", observe="", token_file="", bus=nats.url, bus_version="2",
        bus_pid=nats.pid, services=[],
    )  # fmt: skip


async def test_an_agent_can_log_in_once_it_was_granted(nats: DevServer, job: str) -> None:
    async with connect(await nats.grant(job), "agent"):
        pass


async def test_another_process_lets_agents_in_too(
    nats: DevServer, tmp_path: Path, job: str
) -> None:
    state = StateDir(tmp_path / "own-nats")
    for _ in range(2):  # it may be asked again, and everybody stays connected
        login = await asyncio.to_thread(agent_login, state, announced(nats), job)
        async with connect(login, "agent"):
            pass


async def test_a_server_that_was_started_again_still_lets_agents_in(
    nats: DevServer, tmp_path: Path, job: str
) -> None:
    before = await nats.grant(job)
    running = announced(nats)
    os.kill(nats.pid, signal.SIGKILL)
    await until_async(lambda: nats.restarts, "it has been started again")
    async with connect(before, "agent"):
        pass
    state = StateDir(tmp_path / "own-nats")
    login = await asyncio.to_thread(agent_login, state, running, "another")
    async with connect(login, "agent"):
        pass


async def test_an_account_that_the_server_has_lost_comes_back_as_it_was(
    nats: DevServer, tmp_path: Path, job: str
) -> None:
    settings = await nats.grant(job)
    account = nats.operator.account_of(job)
    await asyncio.to_thread((tmp_path / f"own-nats/nats/store/accounts/{account}.jwt").unlink)
    os.kill(nats.pid, signal.SIGKILL)
    await until_async(lambda: nats.restarts, "it has been started again")
    assert isinstance(await refused(settings), BusDeniedError)
    await admit(nats.operator, settings, job)
    async with connect(settings, "agent"):  # with the very login of before
        pass


async def test_nobody_is_let_into_a_server_that_was_stopped(nats: DevServer, job: str) -> None:
    await nats.stop()
    with pytest.raises(BusUnreachableError, match="it was stopped"):
        await nats.grant(job)


async def test_who_is_cut_off_is_out_at_once_and_for_good(
    nats: DevServer, tmp_path: Path, job: str
) -> None:
    """A8: a login that got into the wrong hands ends everywhere, with those of the same job."""
    folder, settings = tmp_path / "own-nats" / "nats", await nats.grant(job)
    other = await nats.grant("another")
    async with connect(settings, "agent") as bus, connect(other, "other") as stays:
        await cut_off(nats.operator, settings, job)
        await until_async(lambda: not bus.connected, "its connection has ended")
        assert isinstance(await refused(settings), BusDeniedError)
        with pytest.raises(LoginRefusedError, match=f"everstep bus login {job}"):
            await nats.grant(job)
        with pytest.raises(CliError) as caught:
            await asyncio.to_thread(
                agent_login, StateDir(tmp_path / "own-nats"), announced(nats), job
            )
        assert caught.value.code is Exit.FORBIDDEN
        before = await admit(nats.operator, settings, job, again=True)
        assert isinstance(await refused(settings), BusDeniedError), "the old login stays out"
        fresh = await agents_login(folder, nats.operator, BusSettings(url=nats.url), job)
        assert before is not None
        async with connect(fresh, "agent"):
            pass
        assert stays.statistics()["reconnects_total"] == 0, "nobody else has noticed"


async def test_a_job_that_was_never_let_in_is_not_cut_off(nats: DevServer) -> None:
    """A8: a wrong name must not look like success while a stolen login goes on."""
    with pytest.raises(LoginRefusedError, match="nobody is cut off; is the name right"):
        await cut_off(nats.operator, BusSettings(url=nats.url), "misspelt")


async def test_accounts_of_an_older_release_get_what_this_one_needs(
    tmp_path: Path, job: str
) -> None:
    """A new server with the accounts of an old one (A15.3)."""
    state = tmp_path / "state"
    async with dev_server(state) as nats:
        operator = nats.operator
        settings = await nats.grant(job)
        await nats.grant("cut-off")
        await cut_off(operator, settings, "cut-off")
    accounts = state / "nats" / "store" / "accounts"
    path = accounts / f"{operator.account_of(job)}.jwt"
    token = claims_of(path.read_text())
    assert token is not None
    older = {**token.nats, "imports": token.nats["imports"][1:]}
    older.pop("version")
    path.write_text(operator._key.signed(token.sub, token.name, older, iat=token.iat))
    assert await asyncio.to_thread(renew_accounts, accounts, operator) == 1
    assert await asyncio.to_thread(renew_accounts, accounts, operator) == 0
    renewed = claims_of(path.read_text())
    assert renewed is not None
    assert renewed.nats == token.nats


async def test_accounts_on_a_running_server_get_what_this_release_needs(
    nats: DevServer, job: str
) -> None:
    """A bus of one's own, whose accounts a release without this question has made."""
    operator, subject = nats.operator, subjects.ask("straggler", "scores", job)
    agent_of_job = await nats.grant(job)
    await nats.grant("cut-off")
    await cut_off(operator, nats.settings(ADMIN), "cut-off")
    control, jobs = operator.control.public, operator.account_of(job)
    async with job_access._system(operator, nats.settings(ADMIN)) as server:
        for public, key in ((control, "exports"), (jobs, "imports")):
            account = await server.account(public)
            assert account is not None
            kept = [one for one in account.nats[key] if "straggler.scores" not in one["subject"]]
            older = {**account.nats, key: kept}
            older.pop("version")
            await server.update(operator._key.signed(public, account.name, older, iat=account.iat))

    async def answer_to(bus: NatsBus) -> bytes:
        reply = await bus.jetstream.request(subject, b"{}", within_s=WITHIN_S)
        return reply.data or (reply.headers or {})["Status"].encode()

    async with connect(nats.settings(SERVICE), "svc") as service:

        async def answer(message: Msg) -> None:
            await service.jetstream.connection.client.publish(message.reply, b"here")

        async with service.jetstream.connection.subscribed(subject, answer):
            async with connect(agent_of_job, "agent") as agent:
                assert await answer_to(agent) == b"503", "nobody hears it"
                renewed = await job_access.renew_accounts(operator, nats.settings(ADMIN))
                assert renewed == ["CONTROL", f"job-{job}"]
                assert await answer_to(agent) == b"here"
            assert service.statistics()["reconnects_total"] == 0, "the control plane stays"
    assert await job_access.renew_accounts(operator, nats.settings(ADMIN)) == []
    with pytest.raises(LoginRefusedError, match="were cut off"):
        await admit(operator, nats.settings(ADMIN), "cut-off")


def test_logins_are_made_anew_before_they_end_and_by_another_operator(tmp_path: Path) -> None:
    operator = Operator.made(tmp_path / "keys")

    def made(who: Operator, **how: int) -> str:
        return read_credentials(login_file(tmp_path, who, "agent-x", **how)).seed

    first = made(operator)
    assert made(operator) == first
    longer = made(operator, valid_s=30 * 86400)
    assert longer != first, "it does not last half as long as it is to"
    assert made(operator) == longer
    assert made(Operator(Key.new(KeyKind.OPERATOR))) != longer
    assert (tmp_path / "agent-x.creds").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "keys" / "operator.seed").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("text", ["", "SUABC", "not a seed", "S" * 58])
def test_a_key_file_that_holds_no_key(tmp_path: Path, text: str) -> None:
    (tmp_path / "operator.seed").write_text(text)
    with pytest.raises(BusConfigError) as caught:
        Operator.opened(tmp_path)
    assert "\n" not in str(caught.value)
