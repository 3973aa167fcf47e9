"""Secrets that strangers put into facts, logs and evidence leave history by no way at all."""

import asyncio
import re
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import httpx2
import msgspec

from everstep.clock import SystemClock
from everstep.evidence.archive import ArchiveMember, pack
from everstep.evidence.archive import unpack as unpack_archive
from everstep.messages import BlobRef, Fact
from everstep.messages.codec import decode, encode
from everstep.settings import remember_secret
from everstep.store.database import open_database
from everstep.store.log import FactLog
from everstep.store.schema import upgrade
from everstep_services.history.api.app import PARTS
from everstep_services.history.bundle import unpack, write_bundle
from everstep_services.history.mask import mask_file
from everstep_services.history.projections.fold import fold
from tests.integration.conftest import Api
from tests.integration.history.dashboard.dashboard_story import answering, beats
from tests.integration.history.dashboard.fleet_facts import JOB, KILLED, facts
from tests.integration.history.dashboard.test_dashboard_pages import PAGES
from tests.integration.history.dashboard.visitors import OURS, browser

KNOWN = "the-known-secret-of-history"
NEEDLES = (
    "Hunter22Url", "Hunter22Query", "Hunter22Env", "SECRETSECRET", "hf_abcdefghijklmnop",
    "Hunter22Bearer", "eyJhbGciOiJIUzI1", "MIIHunter22", "Hunter22Json", KNOWN,
)  # fmt: skip
PLANTED = " ".join(
    (
        "https://ann:Hunter22Url@git.example/x", "https://h/x?access_token=Hunter22Query&a=1",
        "WANDB_API_KEY=Hunter22Env", "evs_0123abcd_SECRETSECRET", "hf_abcdefghijklmnopqrst",
        "Authorization: Bearer Hunter22Bearer", "eyJhbGciOiJIUzI1.eyJzdWIiOiIxMjM0.SflKxwRJSM",
        '{"password": "Hunter22Json"}', KNOWN,
        "-----BEGIN RSA PRIVATE KEY-----\nMIIHunter22\n-----END RSA PRIVATE KEY-----",
    )
)  # fmt: skip
_FREE = frozenset(
    {
        "reason", "text", "traceback", "summary", "note", "says", "advice", "user", "cluster",
        "explanation", "blocked_in", "error_text", "missing_reason", "device", "rejected",
    }
)  # fmt: skip
"""Fields whose text anybody may choose."""


def hostile(fact: Fact) -> Fact:
    """The same fact with secrets in every free text of it."""
    planted = msgspec.json.encode(_planted("", msgspec.json.decode(encode(fact))))
    made = decode(planted)
    assert isinstance(made, Fact)
    return made


def _planted(name: str, value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _planted(key, one) for key, one in value.items()}
    if isinstance(value, list):
        command = [*value, "--password", "Hunter22Json", PLANTED] if name == "command" else value
        return [_planted("" if name == "command" else name, one) for one in command]
    return f"{value} {PLANTED}" if name in _FREE and isinstance(value, str) else value


def found(data: bytes | str) -> Iterable[str]:
    text = data if isinstance(data, str) else data.decode(errors="replace")
    return [needle for needle in NEEDLES if needle in text]


@asynccontextmanager
async def hostile_fleet(folder: Path) -> AsyncIterator[Api]:
    remember_secret(KNOWN)
    now = datetime.now(UTC)
    async with open_database(f"sqlite:///{folder / 'hostile.db'}") as database:
        await upgrade(database)
        api = Api(database, FactLog(database, fold), SystemClock())
        await api.open(failed_logins_per_minute=10**6)
        blob = await api.bus.blobs.put(JOB, f"step 1\n{PLANTED}\n".encode())
        told = [hostile(fact) for fact in facts(now, blob)]
        assert any(found(encode(fact)) for fact in told)
        await api.add(*told)
        for beat in beats(now):
            api.context.beats.hear(beat)
        async with answering(api.bus, now):
            yield api


def urls() -> Iterable[str]:
    """Every path of REST that is read, about the job that went wrong."""
    names = {"job": JOB, "incident": KILLED, "number": "1", "rank": "21", "node": "gpu-002",
             "step": "57500", "section": "data"}  # fmt: skip
    for route in (route for part in PARTS for route in part.router.routes):
        if "GET" in getattr(route, "methods", ()) and not route.path.endswith("/stream"):
            yield re.sub(r"\{(\w+)\}", lambda match: names.get(match[1], "x"), route.path)
    yield from (f"/facts?limit=200&kind={kind}" for kind in ("rank_exited", "job_started"))


async def test_no_planted_secret_is_in_any_answer_of_rest(tmp_path: Path) -> None:
    """A13.5: also behind links to single facts and pieces of evidence."""
    async with hostile_fleet(tmp_path) as api, api.client(await api.token("admin")) as client:
        masked, seen = 0, list(urls())
        incident = (await client.get(f"/incidents/{KILLED}")).json()
        seen += [f"/incidents/{KILLED}/evidence/{one['id']}" for one in incident["evidence"]]
        page = (await client.get("/facts?limit=500&kind=rank_exited")).json()
        seen += [f"/facts/{fact['id']}" for fact in page["items"]]
        for url in seen:
            if url.endswith("/export"):
                continue
            answer = await client.get(url)
            assert answer.status_code in {200, 404, 409, 410, 422, 503}, (url, answer.text)
            assert found(answer.content) == [], url
            masked += b"***" in answer.content
        assert masked > 12


async def test_no_planted_secret_is_on_any_page_or_in_the_live_stream(tmp_path: Path) -> None:
    """A13.5."""
    async with hostile_fleet(tmp_path) as api:
        client = browser(api)
        token = await api.token("operate")
        await client.post("/login", content=urlencode({"token": token}), headers=OURS)
        for path in [*PAGES, f"/incidents/{KILLED}.md", f"/jobs/{JOB}/heat?measure=own"]:
            answer = await client.get(path)
            assert answer.status_code == 200, path
            assert found(answer.content) == [], path
        sent = await streamed(api, token)
        assert b"event: fact" in sent
        assert b"***" in sent
        assert found(sent) == []


async def streamed(api: Api, token: str) -> bytes:
    """The beginning of the live stream, from the first fact on."""
    parts: list[bytes] = []
    is_enough = asyncio.Event()

    async def receive() -> dict[str, Any]:
        await is_enough.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        parts.append(message.get("body", b""))
        if b"***" in parts[-1]:
            is_enough.set()

    headers = [(b"authorization", f"Bearer {token}".encode()), (b"host", b"everstep.test")]
    scope = {
        "type": "http", "method": "GET", "path": "/api/v1/facts/stream", "headers": headers,
        "raw_path": b"/api/v1/facts/stream", "query_string": b"after=0", "scheme": "http",
        "http_version": "1.1", "client": ("10.0.0.1", 1), "root_path": "",
    }  # fmt: skip
    async with asyncio.timeout(60):
        await api.app(scope, receive, send)
    return b"".join(parts)


async def test_no_planted_secret_is_in_a_bundle(tmp_path: Path) -> None:
    """A13.5: neither in facts and tables nor in evidence."""
    async with hostile_fleet(tmp_path) as api:

        async def fetch(ref: BlobRef) -> bytes:
            return await api.bus.blobs.get(ref)

        file = tmp_path / "job.everstep"
        await write_bundle(api.database, JOB, file, fetch=fetch, now_us=1)
    await asyncio.to_thread(unpack, file, tmp_path / "bundle.db")
    async with open_database(f"sqlite:///{tmp_path / 'bundle.db'}") as database:
        served = Api(database, FactLog(database, fold), SystemClock())
        await served.open()
        async with served.client(await served.token()) as client:
            log = await client.get(f"/jobs/{JOB}/rounds/1/ranks/21/log")
        assert log.text.startswith("step 1\n")
        assert found(log.text) == []
    assert found(await asyncio.to_thread((tmp_path / "bundle.db").read_bytes)) == []


async def test_a_new_token_and_a_login_code_are_shown_once(tmp_path: Path) -> None:
    """The two answers whose purpose is a secret."""
    async with hostile_fleet(tmp_path) as api, api.client(await api.token("admin")) as client:
        made = (await client.post("/tokens", json={"name": "x"})).json()
        assert re.fullmatch(r"evs_[0-9a-f]+_\S{20,}", made["token"])
        code = (await client.post("/login-codes")).json()["code"]
        assert "***" not in code
        bearer = {"Authorization": f"Bearer {made['token']}"}
        again = await httpx2.AsyncClient(
            transport=httpx2.ASGITransport(app=api.app), base_url="http://everstep.test"
        ).get("/api/v1/status", headers=bearer)
        assert again.status_code == 200


def test_evidence_in_archives_is_masked_and_binary_files_stay() -> None:
    """A13.5."""
    remember_secret(KNOWN)
    members = [
        ArchiveMember(0, "txt", PLANTED.encode()),
        ArchiveMember(1, "json", msgspec.json.encode({"password": "Hunter22Json"})),
        ArchiveMember(2, "pickle", b"\x80\x04Hunter22"),
    ]
    packed = mask_file(pack(members, {3: PLANTED}))
    archive = unpack_archive(packed)
    assert [found(one.content) for one in archive.members] == [[], [], []]
    assert archive.members[2].content == b"\x80\x04Hunter22"
    assert found(archive.missing[3]) == []
    safe = pack([ArchiveMember(0, "txt", b"calm")], {})
    assert mask_file(safe) is safe
