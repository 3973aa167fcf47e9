"""Webhooks in: who may send one, what it announces, and what is done when it is due (A11.5)."""

import asyncio
import json
import re
import sys
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import httpx2
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import structs

from everstep.bus.requests import RefusalError
from everstep.clock import SystemClock
from everstep.messages import DrainNode, ExcludeNode
from everstep.messages.codec import encode
from everstep.messages.questions.answers import Done
from everstep.observe.http import listen, serve_asgi, url_of
from everstep.store.database import Database
from everstep.store.log import FactLog
from everstep.subjects import CLUSTER
from everstep_services.health.nodes.control import blank
from everstep_services.history.commands import make_token
from everstep_services.history.notifications.targets import signed_headers
from everstep_services.history.webhooks.settings import WebhooksSettings
from everstep_services.history.webhooks.shapes import HealthEvents, ScheduledEvents
from tests.fakes.clock import FakeClock
from tests.integration.conftest import Api
from tests.unit.history.facts import make

KEY = "0123456789abcdef-ops"


class Outside:
    """A sender, the services that it has an effect on, and time that the test moves."""

    def __init__(self, api: Api, clock: FakeClock, folder: Path) -> None:
        self.api = api
        self.clock = clock
        self.folder = folder
        self.asked: list[Any] = []
        self.refusal: RefusalError | None = None
        self.token = ""

    async def answer(self, question: Any) -> Any:
        if self.refusal is not None:
            raise self.refusal
        self.asked.append(question)
        return Done(text=f"{question.node} is out")

    async def open(self, **more: Any) -> None:
        """The service starts, or starts again, with the same database."""
        given_settings = {"keys_dir": self.folder, "enforce": ("ops",), **more}
        await self.api.open(webhooks=WebhooksSettings(**given_settings))

    async def send(
        self,
        body: object,
        shape: str = "maintenance",
        *,
        key: str = KEY,
        late_s: float = 0,
        token: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> httpx2.Response:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        at_s = int(self.clock.wall().timestamp() - late_s)
        signed = {"Content-Type": "application/json", **signed_headers(key, data, at_s)}
        async with self.api.client(token or self.token) as client:
            return await client.post(
                f"webhooks/{shape}", content=data, headers={**signed, **(headers or {})}
            )

    async def notices(self) -> list[dict[str, Any]]:
        async with self.api.client(await self.api.token("read")) as client:
            items: list[dict[str, Any]] = (await client.get("webhooks/notices")).json()["items"]
            return items

    async def act(self) -> int:
        return await self.api.context.maintenance.act()

    def in_s(self, seconds: float) -> str:
        return (self.clock.wall() + timedelta(seconds=seconds)).isoformat()


@pytest.fixture
async def outside(database: Database, fact_log: FactLog, tmp_path: Path) -> AsyncIterator[Outside]:
    clock = FakeClock()
    made = Outside(Api(database, fact_log, clock), clock, tmp_path)
    (tmp_path / "ops.key").write_text(KEY)
    (tmp_path / "watcher.key").write_text(KEY)
    (tmp_path / "weak.key").write_text("short")
    await made.open()
    made.token = await make_token(database, "ops", "webhook", clock)
    await made.api.add(
        make("round_formed", job="llama", round=1, members=()),
        make("node_joined", job="llama", node="node-1", round=None),
        make("node_joined", job="over", node="node-2", round=None),
        make("job_ended", job="over"),
    )
    bus = made.api.bus
    async with (
        bus.answer("rendezvous", {"drain": made.answer}),
        bus.answer("health", {"exclude": made.answer}),
    ):
        yield made


def _problem(answer: httpx2.Response) -> tuple[int, str]:
    assert "\n" not in answer.json()["detail"]
    return answer.status_code, answer.json()["code"]


async def test_a_notice_for_now_drains_once_however_often_it_is_sent(outside: Outside) -> None:
    body = {"id": "CHG-1", "action": "drain", "nodes": ["node-1"], "reason": "new fan",
            "ends_at": outside.in_s(3600)}  # fmt: skip
    for _ in range(3):
        answer = await outside.send(body)
        assert (answer.status_code, answer.json()["stale"]) == (202, 0), answer.text
        await outside.act()
        await outside.clock.advance(0.3)
    exclude, drain = outside.asked
    assert isinstance(exclude, ExcludeNode)
    assert exclude.ttl_s == pytest.approx(3600, abs=60)
    assert isinstance(drain, DrainNode)
    assert (drain.job, drain.node, drain.by) == ("llama", "node-1", "ops (webhook)")
    assert (drain.reason, drain.origin) == ("new fan (CHG-1)", "rest")
    (notice,) = await outside.notices()
    assert (notice["state"], notice["outcome"]) == ("done", "node-1 is out; node-1 is out")


async def test_a_notice_for_later_waits_through_a_restart(outside: Outside) -> None:
    body = {"id": "later", "action": "exclude", "nodes": ["node-2"], "starts_at": outside.in_s(600)}
    assert (await outside.send(body)).json()["notices"][0]["state"] == "waiting"
    assert await outside.act() == 0
    await outside.clock.advance(500)
    await outside.open()
    assert await outside.act() == 0
    await outside.clock.advance(101)
    assert await outside.act() == 1
    assert [type(question) for question in outside.asked] == [ExcludeNode]


async def test_a_notice_is_moved_and_cancelled_while_it_waits(outside: Outside) -> None:
    body = {"id": "moved", "action": "drain", "nodes": ["node-1"], "starts_at": outside.in_s(60)}
    await outside.send(body)
    await outside.clock.advance(1)
    moved = {**body, "starts_at": outside.in_s(600)}
    assert (await outside.send(moved)).json()["stale"] == 0
    assert (await outside.send(body, late_s=5)).json()["stale"] == 1, "an older message came late"
    await outside.clock.advance(120)
    assert await outside.act() == 0
    cancelled = await outside.send({"id": "moved", "action": "cancel"})
    assert cancelled.json()["notices"][0]["state"] == "cancelled"
    await outside.clock.advance(600)
    assert await outside.act() == 0
    assert outside.asked == []


async def test_an_operator_cancels_a_notice(outside: Outside) -> None:
    body = {"id": "x", "action": "drain", "nodes": ["node-1"], "starts_at": outside.in_s(60)}
    await outside.send(body)
    async with outside.api.client(await outside.api.token("operate")) as client:
        path = "webhooks/notices/x:cancel"
        done = await client.post(path, json={"reason": "not today"})
        again = await client.post(path, json={})
        unknown = await client.post("webhooks/notices/y:cancel", json={})
    assert done.json()["notices"][0]["outcome"] == "cancelled by a operate: not today"
    assert _problem(again) == (409, "not_waiting")
    assert _problem(unknown) == (404, "not_found")
    async with outside.api.client(outside.token) as client:
        assert _problem(await client.post(path, json={})) == (403, "scope_missing")


async def test_a_sender_without_the_policy_and_the_brake_only_observe(outside: Outside) -> None:
    body = {"id": "w", "action": "drain", "nodes": ["node-1"]}
    watcher = await make_token(outside.api.database, "watcher", "webhook", outside.clock)
    await outside.send(body, token=watcher)
    control = structs.replace(blank(), is_braked=True, braked_by="ann")
    await outside.api.bus.documents("CONTROL").put(CLUSTER, encode(control), revision=0)
    await outside.send(body)
    assert await outside.act() == 2
    outcomes = {notice["sender"]: notice["outcome"] for notice in await outside.notices()}
    assert outside.asked == []
    assert outcomes == {
        "ops": "would drain node-1 of llama: the brake is on",
        "watcher": "would drain node-1 of llama: watcher is not in `enforce` of [api.webhooks]",
    }


async def test_a_service_that_is_away_is_asked_again(outside: Outside) -> None:
    outside.refusal = RefusalError("503", "no leader")
    await outside.send({"id": "a", "action": "drain", "nodes": ["node-1"]})
    assert await outside.act() == 1
    assert await outside.act() == 0
    (notice,) = await outside.notices()
    assert (notice["state"], notice["attempts"]) == ("waiting", 1)
    outside.refusal = None
    await outside.clock.advance(16)
    assert await outside.act() == 1
    assert (await outside.notices())[0]["state"] == "done"


async def test_strangers_are_refused(outside: Outside) -> None:
    body = {"id": "s", "action": "drain", "nodes": ["node-1"]}
    weak = await make_token(outside.api.database, "weak", "webhook", outside.clock)
    keyless = await make_token(outside.api.database, "../ops", "webhook", outside.clock)
    reader = await outside.api.token("read")
    assert _problem(await outside.send(body, key="another")) == (403, "signature_wrong")
    assert _problem(await outside.send(body, late_s=301)) == (403, "signature_old")
    assert _problem(await outside.send(body, late_s=-301)) == (403, "signature_old")
    unsigned = {"Everstep-Signature": ""}
    assert _problem(await outside.send(body, headers=unsigned)) == (403, "signature_missing")
    for when in ("abc", "-1", "1e9", "12.5"):
        answer = await outside.send(body, headers={"Everstep-Timestamp": when})
        assert _problem(answer) == (403, "signature_wrong")
        assert f"must be whole seconds since 1970, got '{when}'" in answer.json()["detail"]
    odd = {"Everstep-Timestamp": "１２３"}
    with pytest.raises(UnicodeEncodeError):
        await outside.send(body, headers=odd)
    assert _problem(await outside.send(body, token=reader)) == (403, "scope_missing")
    assert _problem(await outside.send(body, token=weak)) == (403, "no_key")
    assert _problem(await outside.send(body, token=keyless)) == (403, "no_key")
    assert (await outside.send(body, token="evs_0")).status_code == 401
    async with outside.api.client(outside.token) as client:
        for path in ("jobs", "webhooks/notices", "facts", "tokens", "status"):
            assert (await client.get(path)).status_code == 403, path
        assert (await client.post("nodes/node-1:drain", json={})).status_code == 403
    assert await outside.notices() == []


async def test_nodes_are_matched_strictly(outside: Outside) -> None:
    await outside.open(aliases=("i-0abc=node-1",))
    unknown = {"id": "u", "action": "drain", "nodes": ["node-1", "nod-1"]}
    answer = await outside.send(unknown)
    assert _problem(answer) == (422, "unknown_node")
    assert answer.json()["detail"] == "no node is called 'nod-1'; did you mean node-1?"
    assert await outside.notices() == []
    await outside.open(aliases=("i-0abc=node-1", "i-0abd=node-7"))
    aliased = await outside.send({"id": "u", "action": "drain", "nodes": ["i-0abd"]})
    text = "no node is called 'i-0abd' (an alias of 'node-7'); did you mean i-0abc?"
    assert aliased.json()["detail"] == text
    known = await outside.send({"id": "u", "action": "drain", "nodes": ["i-0abc", "node-1"]})
    assert [notice["node"] for notice in known.json()["notices"]] == ["node-1"]


async def test_limits_hold(outside: Outside) -> None:
    await outside.open(per_minute=5, waiting_most=2)
    body = {"action": "drain", "nodes": ["node-1"], "starts_at": outside.in_s(60)}
    for number in range(2):
        assert (await outside.send({**body, "id": f"{number}"})).status_code == 202
    assert _problem(await outside.send({**body, "id": "2"})) == (409, "too_many_notices")
    assert _problem(await outside.send(b"x" * (300 << 10))) in {
        (413, "body_too_large"),
        (422, "invalid_request"),
    }
    await outside.send({**body, "id": "3"})
    await outside.send({**body, "id": "4"})
    answer = await outside.send({**body, "id": "5"})
    assert _problem(answer) == (429, "too_many_messages")
    assert int(answer.headers["retry-after"]) > 0


async def test_health_events_drain_when_they_are_fatal(outside: Outside) -> None:
    event = {
        "version": 1, "agent": "gpu-health-monitor", "componentClass": "GPU",
        "checkName": "GpuXidError", "isFatal": True, "isHealthy": False, "message": "Xid 79\n\x07",
        "recommendedAction": "RESTART_BM", "errorCode": ["79"],
        "entitiesImpacted": [{"entityType": "GPU", "entityValue": "3"}],
        "generatedTimestamp": "2026-01-01T00:00:00Z", "nodeName": "node-1",
    }  # fmt: skip
    mild = {**event, "isFatal": False}
    answer = await outside.send({"version": 1, "events": [event, mild]}, "health-events")
    assert answer.status_code == 202, answer.text
    assert answer.json()["ignored"] == ["GpuXidError of node-1: not fatal, RESTART_BM: no drain"]
    await outside.act()
    (drain,) = outside.asked
    assert drain.reason.startswith("GpuXidError (79), RESTART_BM: Xid 79 (")


async def test_a_cloud_announces_and_the_node_leaves_before(outside: Outside) -> None:
    await outside.open(aliases=("vm-7=node-1",), lead_s=300)
    at = format_datetime(datetime(2026, 1, 1, 1, tzinfo=UTC), usegmt=True)
    event = {"EventId": "e1", "EventType": "Redeploy", "ResourceType": "VirtualMachine",
             "Resources": ["vm-7"], "EventStatus": "Scheduled", "NotBefore": at}  # fmt: skip
    document = {"DocumentIncarnation": 1, "Events": [event]}
    assert (await outside.send(document, "scheduled-events")).status_code == 202
    await outside.clock.advance(3299)
    assert await outside.act() == 0
    await outside.clock.advance(2)
    assert await outside.act() == 1
    over = {"Events": [{**event, "EventId": "e3", "EventStatus": "Completed"}]}
    answer = await outside.send(over, "scheduled-events")
    assert answer.json()["ignored"] == ["e3: nothing is announced; what arrives later is cancelled"]
    bad = {"Events": [{**event, "EventId": "e2", "NotBefore": "tomorrow"}]}
    assert _problem(await outside.send(bad, "scheduled-events")) == (422, "invalid_request")


_JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=20) | st.integers(),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner, max_size=4)
    ),
    max_leaves=12,
)
_EVENT = st.dictionaries(
    st.sampled_from(["nodeName", "isFatal", "recommendedAction", "message", "errorCode", "EventId",
                     "EventType", "Resources", "NotBefore", "EventStatus"]),
    _JSON | st.just("Reboot"),
)  # fmt: skip


@given(event=_EVENT)
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_no_body_breaks_a_shape(event: dict[str, Any]) -> None:
    for of, field in ((HealthEvents, "events"), (ScheduledEvents, "Events")):
        try:
            of.model_validate({field: [event]}).reading()
        except (ValueError, TypeError):
            continue


async def test_garbage_is_refused_in_one_line(outside: Outside) -> None:
    await outside.open(per_minute=1000)
    for body in (b"", b"\x00", b"[" * 10_000, b"null", b"{}", b'{"id":1}', b'{"events":{}}'):
        for shape in ("maintenance", "health-events", "scheduled-events"):
            answer = await outside.send(body, shape)
            assert 400 <= answer.status_code < 500, (body[:20], shape)
            assert "\n" not in answer.json()["detail"]
    assert (await outside.send({"id": "n", "action": "drain"})).status_code == 422
    assert await outside.notices() == []


async def test_the_script_of_the_guide_sends_a_notice(
    database: Database, fact_log: FactLog, tmp_path: Path
) -> None:
    clock = SystemClock()
    api = Api(database, fact_log, clock)
    (tmp_path / "cm.key").write_text(KEY)
    await api.open(webhooks=WebhooksSettings(keys_dir=tmp_path))
    await api.add(make("node_joined", job="llama", node="node-1", round=None))
    (tmp_path / "token").write_text(await make_token(database, "cm", "webhook", clock))
    guide = Path(__file__).parents[3] / "docs/guides/webhooks.md"
    (script,) = re.findall(r"^```python\n(.*?)^```$", guide.read_text("utf-8"), re.M | re.S)
    (tmp_path / "send.py").write_text(script)
    listener, stop = listen("127.0.0.1", 0, remedy=""), asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(serve_asgi(api.app, listener, stop))
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "send.py", url_of(listener), "token", "cm.key"),
            cwd=tmp_path,
            stdout=asyncio.subprocess.PIPE,
        )
        out, _ = await process.communicate()
        stop.set()
    (notice,) = json.loads(out)["notices"]
    assert (notice["sender"], notice["id"], notice["state"]) == ("cm", "CHG-4711", "waiting")
    assert notice["starts_at"] == "2099-01-01T02:00:00Z"
