"""No reply subject, and no login of a job, makes anybody write outside of the job (A8, A13.2).

NATS does not check where a reply goes. In one account, who answers a question writes wherever
the asker says: the server's own acknowledgements and reads, too. So each job has an account.
"""

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nats
import pytest
from nats import errors as nats_errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from everstep import subjects
from everstep.bus import BusSettings, connect, topology
from everstep.bus.auth.accounts import Operator, _login
from everstep.bus.auth.keys import KeyKind
from everstep.bus.auth.roles import AGENTS_ASK, SERVICE, User, agents_name
from everstep.bus.client import NatsBus
from everstep.bus.nats_patches import settle
from everstep.bus.server.dev_server import DevServer
from everstep.messages import Done, Message, Order
from tests.integration.bus.one_account import one_account
from tests.integration.bus.servers import server_with, store_in
from tests.waiting import WITHIN_S, until_async

A, B = "job-a", "job-b"

QUESTIONS = [
    *(subjects.ask(service, verb, A) for service, verbs in AGENTS_ASK.items() for verb in verbs),
    subjects.fact(A, "rank_exited"),  # answered by the stream: an acknowledgement
    subjects.blob(A, "0" * 32, 0),
    subjects.log(A, 1, "n1", 0, "stdout"),
    subjects.log_index(A, 1, "n1"),
    f"$JS.API.DIRECT.GET.KV_LIMITS.$KV.LIMITS.{A}",  # answered by the stream: what it holds
    "$JS.API.INFO",
    subjects.beat(A, "n1"),  # acknowledged by any listener, if the sender marks it so
    subjects.timing(A, "n1"),
    subjects.heard(A, "inbox", "1"),
]
"""Everything that an agent may say, and so everything that may be answered."""

TARGETS = [
    "$JS.API.STREAM.PURGE.FACTS",
    "$JS.API.STREAM.DELETE.KV_ROUNDS",
    "$JS.API.STREAM.UPDATE.FACTS",
    "$JS.API.CONSUMER.CREATE.FACTS.mine",
    "$JS.API.DIRECT.GET.KV_ROUNDS",
    "$JS.ACK.FACTS.x.1.1.1.1.1",
    subjects.document("ROUNDS", B),
    subjects.document("LIMITS", B),
    subjects.document("CONTROL", B),
    subjects.document("LEASES", "history"),
    subjects.document_news("LIMITS", B),
    subjects.fact(B, "job_ended"),
    subjects.fact(subjects.CLUSTER, "control_changed"),
    subjects.blob(B, "0" * 32, 0),
    subjects.log(B, 1, "n1", 0, "stdout"),
    subjects.log_index(B, 1, "n1"),
    subjects.beat(B, "n1"),
    subjects.timing(B, "n1"),
    subjects.order(B),
    subjects.order(B, "n1"),
    subjects.hail(B, "n1"),
    subjects.injection(B, "n1"),
    subjects.lost(B, "n1"),
    subjects.heard(B, "inbox", "1"),
    subjects.ask("rendezvous", "stop", B),
    subjects.ask("health", "control", subjects.CLUSTER),
    subjects.ask("logins", "renew", B),
    "$SRV.PING",
    "_INBOX.of.somebody",
    "_R_.somebody",
    "$SYS.REQ.CLAIMS.UPDATE",
    "$SYS.REQ.SERVER.PING.KICK",
]
"""Where no word of job A may ever arrive."""


@dataclass
class Ground:
    """A bus with two jobs, services that answer, and somebody who hears all."""

    control: NatsBus
    attacker: Client
    heard: list[str] = field(default_factory=list)
    """The messages in the control plane's account, by subject."""
    heard_by_b: list[str] = field(default_factory=list)

    async def state(self) -> dict[str, Any]:
        """What the streams hold, but for what job A may say."""
        listed = await self.control.jetstream.api("STREAM.LIST")
        found: dict[str, Any] = {
            stream["config"]["name"]: stream["state"]["consumer_count"]
            for stream in listed["streams"]
        }
        for stream in ("FACTS", "EVIDENCE", "KV_ROUNDS", "KV_LIMITS", "KV_CONTROL", "KV_LEASES"):
            info = await self.control.jetstream.api(
                f"STREAM.INFO.{stream}", {"subjects_filter": ">"}
            )
            counts = info["state"].get("subjects") or {}
            found |= {name: many for name, many in counts.items() if f".{A}" not in name}
        return found


async def answer(_: Message) -> Message:
    return Done(text="done")


@asynccontextmanager
async def ground(
    control: BusSettings, attacker: Client, b: BusSettings | None
) -> AsyncIterator[Ground]:
    async with AsyncExitStack() as stack:
        bus = await stack.enter_async_context(connect(control, "services"))
        await topology.init(bus.jetstream)
        for service, verbs in AGENTS_ASK.items() if b is not None else ():
            handlers = dict.fromkeys(verbs, answer)
            await stack.enter_async_context(bus.answer(service, handlers))
        for bucket, job in itertools.product(("ROUNDS", "LIMITS", "CONTROL"), (A, B)):
            await bus.documents(bucket).put(job, b"{}", revision=0)
        await bus.jetstream.publish(subjects.fact(B, "rank_exited"), b"{}")
        await stack.enter_async_context(bus.subscribe(subjects.beat(), Message))
        made = Ground(bus, attacker)

        async def hear(message: Msg) -> None:
            made.heard.append(message.subject)

        async def hear_as_b(message: Msg) -> None:
            made.heard_by_b.append(message.subject)

        await hear_all(stack, bus, CONTROL_HEARS, hear)
        if b is not None:
            other = await stack.enter_async_context(connect(b, "agent-b"))
            await hear_all(stack, other, B_HEARS, hear_as_b)
        yield made


CONTROL_HEARS = ("es.>", "$KV.>", "$JS.>", "$SRV.>", "_INBOX.of.>", "_R_.>", "$SYS.>")
B_HEARS = (subjects.order(B), f"{subjects.order(B)}.>", "_INBOX.of.>")


async def hear_all(
    stack: AsyncExitStack, bus: NatsBus, of: tuple[str, ...], hear: Callable[[Msg], Awaitable[None]]
) -> None:
    for subject in of:
        await stack.enter_async_context(bus.jetstream.connection.subscribed(subject, hear))


@asynccontextmanager
async def raw(url: str, **how: Any) -> AsyncIterator[Client]:
    async def ignore(_: Exception) -> None:
        """Violations are what we are here for."""

    client = await nats.connect(url, error_cb=ignore, **how)
    try:
        yield client
    finally:
        await client.close()


async def attack(ground: Ground, question: str) -> None:
    """Ask with every reply subject there is; and go on until all of it was answered."""
    marked = {"Everstep-Acknowledge": "1"}
    for target in TARGETS:
        await ground.attacker.publish(question, b"{}", reply=target)
        await ground.attacker.publish(question, b"{}", reply=target, headers=marked)
    # Answers come in order: what comes after the last attack shows that it is over.
    with contextlib.suppress(nats_errors.TimeoutError, nats_errors.NoRespondersError):
        await ground.attacker.request(question, b"{}", timeout=0.5)
    await settle(ground.attacker, WITHIN_S)
    await ground.control.prove()


def landed(heard: list[str]) -> set[str]:
    """What arrived where it must not."""
    return {subject for subject in heard if subject in TARGETS}


@pytest.fixture
async def operator_ground(nats: DevServer) -> AsyncIterator[Ground]:
    settings = await nats.grant(A)
    async with (
        raw(nats.url, user_credentials=str(settings.credentials_file)) as attacker,
        ground(nats.settings("admin"), attacker, await nats.grant(B)) as made,
    ):
        yield made


async def test_no_answer_to_an_agent_arrives_outside_of_its_job(operator_ground: Ground) -> None:
    before = await operator_ground.state()
    for question in QUESTIONS:
        await attack(operator_ground, question)
        assert landed(operator_ground.heard) == set(), question
        assert landed(operator_ground.heard_by_b) == set(), question
        assert await operator_ground.state() == before, question


async def test_whoever_may_say_anything_in_a_jobs_account_reaches_no_other(
    nats: DevServer, tmp_path: Path
) -> None:
    """Its account alone confines it, without the permissions of its login."""
    await nats.grant(A)
    unbound = tmp_path / "unbound.creds"
    unbound.write_text(login_without_bounds(nats.operator))
    async with (
        raw(nats.url, user_credentials=str(unbound)) as attacker,
        ground(nats.settings("admin"), attacker, await nats.grant(B)) as made,
    ):
        before = await made.state()
        for target in TARGETS:
            for reply in ("", "_INBOX.of.mine"):
                await attacker.publish(target, b"{}", reply=reply)
        for question in QUESTIONS:
            await attack(made, question)
        assert landed(made.heard) == set()
        assert landed(made.heard_by_b) == set()
        assert await made.state() == before
        heard: list[str] = []

        async def hear(message: Msg) -> None:
            heard.append(message.subject)

        await attacker.subscribe(">", cb=hear)
        await settle(attacker, WITHIN_S)
        for subject in (
            subjects.order(B),
            subjects.fact(B, "x"),
            subjects.document_news("LIMITS", B),
        ):
            await made.control.jetstream.connection.client.publish(subject, b"{}")
        await made.control.jetstream.connection.client.publish(subjects.order(A), b"{}")
        await until_async(lambda: heard, "the last of them was for job A")
        assert set(heard) == {subjects.order(A)}


def login_without_bounds(operator: Operator) -> str:
    """A login in the account of job A that the account's own key has signed: it has no scope."""
    account = operator._key.derived(KeyKind.ACCOUNT, f"job {A}")
    everything = User((">",), (">",))
    return _login(account, account.public, agents_name(A), 600, everything).text()


async def test_no_agent_makes_up_an_order_for_another_of_its_job(
    nats: DevServer, operator_ground: Ground
) -> None:
    """It may not publish one; and no answer that it can have sent there is one."""
    settings = await nats.grant(A)
    for subject in (subjects.order(A), subjects.order(A, "n2"), subjects.hail(A, "n2")):
        await operator_ground.attacker.publish(subject, b"{}")
    async with (
        connect(settings, "n2") as other,
        other.subscribe(subjects.order(A, "n2"), Order) as orders,
    ):
        for question in QUESTIONS:
            await operator_ground.attacker.publish(question, b"{}", reply=subjects.order(A, "n2"))
        await settle(operator_ground.attacker, WITHIN_S)
        await until_async(lambda: orders.received, "answers have come there")
        await other.jetstream.api("INFO")
        assert not orders._waiting


async def test_in_one_account_the_same_attack_lands(tmp_path: Path) -> None:
    """What this is for. It also shows that the tests above would see it."""
    config, agents = one_account(tmp_path, A)
    async with (
        server_with(tmp_path, {**config, "jetstream": store_in(tmp_path)}) as port,
        raw(f"nats://127.0.0.1:{port}", **agents) as attacker,
    ):
        url = f"nats://127.0.0.1:{port}"
        settings = BusSettings(url=url, user="admin", password_file=tmp_path / "admin.password")
        async with ground(settings, attacker, None) as made:
            before = await made.state()
            assert before[subjects.fact(B, "rank_exited")] == 1
            for question in (subjects.fact(A, "x"), subjects.blob(A, "0" * 32, 0)):
                await attack(made, question)
            assert subjects.ask("rendezvous", "stop", B) in landed(made.heard)
            assert subjects.order(B) in landed(made.heard)
            assert await made.state() != before


@pytest.mark.parametrize("role", [SERVICE, "admin"])
async def test_a_login_of_the_control_plane_cannot_make_accounts_or_logins(
    nats: DevServer, role: str
) -> None:
    """A8: who runs a service is not the operator."""
    login = str(nats.settings(role).credentials_file)
    async with raw(nats.url, user_credentials=login) as client:
        for subject in ("$SYS.REQ.CLAIMS.UPDATE", "$SYS.REQ.CLAIMS.DELETE"):
            with pytest.raises((nats_errors.TimeoutError, nats_errors.NoRespondersError)):
                token = nats.operator.job_account("sneaked-in")
                await client.request(subject, token.encode(), timeout=0.5)
    accounts = json.loads(await asyncio.to_thread((nats._folder / "nats.json").read_text))
    assert nats.operator.account_of("sneaked-in") not in accounts["resolver_preload"]
