"""REST refuses: who may ask, and every limit, each with its problem."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Collection, Mapping
from typing import Any

import httpx2
import pytest
from sqlalchemy import select

from everstep.clock import SystemClock
from everstep.store import tables
from everstep.store.database import StoreLimits, open_database
from everstep.store.log import FactLog
from everstep.store.schema import upgrade
from everstep.store.tokens import StoredToken, Tokens
from everstep_services.history.api.app import create_app
from everstep_services.history.api.http.problems import ProblemError
from everstep_services.history.projections.fold import fold
from tests.fakes.clock import FakeClock
from tests.integration.conftest import Api
from tests.unit.history.facts import make


@pytest.fixture
def database_url(sqlite_url: str) -> str:
    """SQLite only: what is refused here never gets as far as to a difference."""
    return sqlite_url


@pytest.fixture
async def timed(database: Any, fact_log: FactLog, clock: FakeClock) -> Api:
    """The interface with a clock that the test moves."""
    made = Api(database, fact_log, clock)
    await made.open()
    return made


def problem(answer: httpx2.Response) -> tuple[int, str]:
    """Status and code, once the answer is a proper problem."""
    assert answer.headers["content-type"] == "application/problem+json", answer.text
    body = answer.json()
    assert set(body) >= {"type", "title", "status", "detail", "instance", "code"}
    assert body["status"] == answer.status_code
    assert body["type"] == f"urn:everstep:problem:{body['code']}"
    return answer.status_code, str(body["code"])


PATHS = [
    "jobs",
    "jobs/j",
    "jobs/j/rounds",
    "jobs/j/rounds/1",
    "jobs/j/rounds/1/members",
    "jobs/j/rounds/1/exits",
    "nodes",
    "nodes/n",
    "facts",
    "facts/x",
    "facts/stream",
    "jobs/j/logs/stream",
    "tokens",
    "status",
    "openapi.json",
    "no/such/path",
]


@pytest.mark.parametrize("path", PATHS)
async def test_nothing_is_told_without_a_token(api: Api, path: str) -> None:
    """Every path answers 401 (A13.1)."""
    async with api.client() as client:
        answer = await client.get(path)
    assert problem(answer) == (401, "token_missing")
    assert answer.headers["www-authenticate"].startswith("Bearer")


@pytest.mark.parametrize(
    "authorization",
    [
        "Bearer",
        "Bearer ",
        "Bearer evs_",
        "Basic YTpi",
        "Bearer evs_000000000000_" + "0" * 64,
        "Bearer evs_zzzzzzzzzzzz_" + "0" * 64,
        "Bearer " + "x" * 4000,
        "Bearer evs_'; DROP TABLE tokens; --_" + "0" * 64,
    ],
)
async def test_what_is_no_token_of_ours_is_refused(api: Api, authorization: str) -> None:
    async with api.client() as client:
        answer = await client.get("jobs", headers={"Authorization": authorization})
    assert answer.status_code == 401
    problem(answer)


async def test_a_token_with_a_wrong_secret_is_refused(api: Api) -> None:
    token = await api.token()
    async with api.client(token[:-1] + ("0" if token[-1] != "0" else "1")) as client:
        assert problem(await client.get("jobs")) == (401, "invalid_token")


async def test_a_token_works_until_it_expires(timed: Api, clock: FakeClock) -> None:
    async with timed.client(await timed.token(expires_in_s=60)) as client:
        assert (await client.get("jobs")).status_code == 200
        await clock.advance(61)
        answer = await client.get("jobs")
    assert problem(answer) == (401, "invalid_token")
    assert "expired" in answer.json()["detail"]


async def test_a_revoked_token_is_refused_at_once(api: Api) -> None:
    async with api.client(await api.token("admin")) as admin:
        made = (await admin.post("tokens", json={"name": "dash"})).json()
        async with api.client(made["token"]) as client:
            assert (await client.get("jobs")).status_code == 200
            assert (await admin.delete(f"tokens/{made['id']}")).status_code == 204
            assert problem(await client.get("jobs")) == (401, "invalid_token")
        assert problem(await admin.delete(f"tokens/{made['id']}")) == (404, "not_found")


async def test_another_replica_notices_a_revocation_soon(timed: Api, clock: FakeClock) -> None:
    other = Api(timed.database, timed.fact_log, clock)
    await other.open()
    token = await timed.token()
    async with timed.client(token) as client, other.client(token) as elsewhere:
        assert (await elsewhere.get("jobs")).status_code == 200
        async with timed.client(await timed.token("admin")) as admin:
            listed = (await admin.get("tokens")).json()["items"]
            (id_,) = [one["id"] for one in listed if one["scope"] == "read"]
            await admin.delete(f"tokens/{id_}")
        assert (await client.get("jobs")).status_code == 401
        await clock.advance(timed.context.settings.token_cache_s + 0.1)
        assert (await elsewhere.get("jobs")).status_code == 401


@pytest.mark.parametrize(
    ("scope", "path", "status"),
    [
        ("read", "jobs", 200),
        ("operate", "jobs", 200),
        ("admin", "jobs", 200),
        ("read", "tokens", 403),
        ("operate", "tokens", 403),
        ("admin", "tokens", 200),
    ],
)
async def test_a_scope_allows_what_those_below_it_allow(
    api: Api, scope: Any, path: str, status: int
) -> None:
    async with api.client(await api.token(scope)) as client:
        answer = await client.get(path)
    assert answer.status_code == status
    if status == 403:
        assert problem(answer) == (403, "scope_missing")
        assert 'scope="admin"' in answer.headers["www-authenticate"]


async def test_only_an_administrator_makes_and_revokes_tokens(api: Api) -> None:
    async with api.client(await api.token("operate")) as client:
        made = await client.post("tokens", json={"name": "x", "scope": "admin"})
        revoked = await client.delete("tokens/0123456789ab")
    assert [problem(one)[1] for one in (made, revoked)] == ["scope_missing"] * 2


async def test_secrets_are_not_kept_and_not_shown_again(api: Api) -> None:
    """Neither REST nor the database has a token's secret (A13.5)."""
    async with api.client(await api.token("admin")) as admin:
        made = await admin.post("tokens", json={"name": "dash", "scope": "read"})
        listed = await admin.get("tokens")
    secret = made.json()["token"].rpartition("_")[2]
    assert made.headers["cache-control"] == "no-store"
    assert secret not in listed.text
    async with api.database.read() as connection:
        rows = (await connection.execute(select(tables.tokens))).all()
    assert secret not in repr(rows)


async def test_when_a_token_was_used_is_written_now_and_then(timed: Api, clock: FakeClock) -> None:
    async with timed.client(await timed.token("admin")) as admin:
        await clock.advance(100)
        await admin.get("jobs")
        assert (await admin.get("tokens")).json()["items"][0]["last_used_at"] is None
        await timed.context.auth.write_used()
        used = (await admin.get("tokens")).json()["items"][0]["last_used_at"]
    assert used == "2026-01-01T00:01:40Z"


async def test_who_guesses_is_slowed_down_and_nobody_else(timed: Api, clock: FakeClock) -> None:
    """A13.1."""
    await timed.open(failed_logins_per_minute=3)
    good = await timed.token()
    bad = "evs_000000000000_" + "0" * 64
    async with timed.client(good) as known, timed.client(bad) as guesser:
        await known.get("jobs")
        codes = [problem(await guesser.get("jobs"))[0] for _ in range(5)]
        assert codes == [401, 401, 401, 429, 429]
        assert (await known.get("jobs")).status_code == 200
        async with timed.client(good, address="10.0.0.2") as elsewhere:
            assert (await elsewhere.get("jobs")).status_code == 200
        async with timed.client(await timed.token()) as beginner:
            assert (await beginner.get("jobs")).status_code == 200, (
                "it is right, and was never seen"
            )
        await clock.advance(40)
        refused = await guesser.get("jobs")
        assert (problem(refused)[0], refused.headers["retry-after"]) == (429, "21")
        assert (await known.get("jobs")).status_code == 200
        await clock.advance(21)
        assert problem(await guesser.get("jobs"))[0] == 401


async def test_a_thousand_guesses_at_once_are_a_few_queries(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A right token of the same address passes in the middle of them (A13.1)."""
    queries, stored = list[int](), Tokens.stored

    async def counted(tokens: Tokens, ids: Collection[str]) -> Mapping[str, StoredToken]:
        queries.append(len(ids))
        return await stored(tokens, ids)

    monkeypatch.setattr(Tokens, "stored", counted)
    right = await api.token()

    async def admit(text: str) -> int:
        try:
            await api.context.auth.admit(f"Bearer {text}", "10.0.0.1")
        except ProblemError as error:
            return error.status_code
        return 200

    guesses = [f"evs_{number:012x}_{'0' * 64}" for number in range(1000)]
    answers = await asyncio.gather(*map(admit, [*guesses[:500], right, *guesses[500:]]))
    assert answers.count(200) == 1
    assert answers[500] == 200
    assert answers.count(401) == api.context.settings.failed_logins_per_minute
    assert sum(queries) == 1001
    assert len(queries) <= 4


BAD_QUESTIONS: list[tuple[str, Mapping[str, Any], tuple[int, str]]] = [
    ("jobs", {"limit": 0}, (422, "invalid_request")),
    ("jobs", {"limit": 1001}, (422, "invalid_request")),
    ("jobs", {"limit": "many"}, (422, "invalid_request")),
    ("jobs", {"sort": "size"}, (422, "invalid_request")),
    ("jobs", {"jb": "x"}, (422, "invalid_request")),
    ("jobs", {"label": "nocolon"}, (400, "bad_label")),
    ("jobs", {"cursor": "AAAA"}, (400, "bad_cursor")),
    ("jobs", {"cursor": "é"}, (400, "bad_cursor")),
    ("jobs", {"q": "a\x00b"}, (422, "invalid_request")),
    ("jobs", {"state": "a\x00b"}, (422, "invalid_request")),
    ("facts", {"kind": "a\x00b"}, (422, "invalid_request")),
    ("jobs/a%00b", {}, (422, "invalid_request")),
    ("jobs/" + "a" * 200, {}, (422, "invalid_request")),
    ("jobs/j/rounds/-1", {}, (422, "invalid_request")),
    ("jobs/j/rounds/99999999999999999999", {}, (422, "invalid_request")),
    ("facts", {"since": "yesterday"}, (422, "invalid_request")),
    ("facts", {"since": "2026-01-01T00:00:00"}, (422, "invalid_request")),
    ("facts", {"since": "9999-12-31T23:59:59-14:00"}, (422, "invalid_request")),
    ("facts", {"received_since": "9999-12-31T23:59:59-14:00"}, (422, "invalid_request")),
    ("facts", {"received_since": "yesterday"}, (422, "invalid_request")),
    ("facts", {"job": "a b"}, (422, "invalid_request")),
    ("facts", {"round": -1}, (422, "invalid_request")),
    ("facts/stream", {"limit": 1}, (422, "invalid_request")),
]


@pytest.mark.parametrize(("path", "query", "said"), BAD_QUESTIONS)
async def test_a_bad_question_is_explained(
    reader: httpx2.AsyncClient, path: str, query: Mapping[str, Any], said: tuple[int, str]
) -> None:
    assert problem(await reader.get(path, params=query)) == said


async def test_problems_of_parameters_are_in_plain_words(reader: httpx2.AsyncClient) -> None:
    unknown = (await reader.get("jobs", params={"jb": "x"})).json()
    assert unknown["detail"] == "query.jb: there is no such parameter"
    large = (await reader.get("jobs/j/rounds/99999999999999999999")).json()
    assert "less than or equal to 9007199254740991" in large["detail"]


@pytest.mark.parametrize(
    "body",
    [b"{", b"[]", b"null", b"\xff", b'{"name":""}', b'{"name":"x","scope":"root"}', b"[" * 9999],
)
async def test_a_bad_body_is_explained_without_repeating_it(api: Api, body: bytes) -> None:
    async with api.client(await api.token("admin")) as admin:
        answer = await admin.post(
            "tokens", content=body, headers={"Content-Type": "application/json"}
        )
    assert problem(answer)[0] in {400, 422}
    assert "root" not in answer.text


async def test_a_cursor_belongs_to_its_filters_and_cannot_be_changed(
    api: Api, reader: httpx2.AsyncClient
) -> None:
    await api.add(*(make("job_started", job=f"j{n}") for n in range(3)))
    cursor = (await reader.get("jobs", params={"limit": 1})).json()["next"]
    changed = cursor[:-1] + ("A" if cursor[-1] != "A" else "B")
    for query in ({"cursor": cursor, "q": "j"}, {"cursor": changed}, {"cursor": cursor + "AA"}):
        assert problem(await reader.get("jobs", params=query)) == (400, "bad_cursor")
    assert problem(await reader.get("nodes", params={"cursor": cursor})) == (400, "bad_cursor")
    assert (await reader.get("jobs", params={"cursor": cursor})).status_code == 200


@pytest.mark.parametrize(
    ("method", "path"), [("PUT", "jobs"), ("POST", "jobs/j"), ("TRACE", "facts")]
)
async def test_a_method_that_is_not_possible_is_named(
    reader: httpx2.AsyncClient, method: str, path: str
) -> None:
    answer = await reader.request(method, path)
    assert problem(answer) == (405, "method_not_allowed")
    assert answer.headers["allow"] == "GET, HEAD"


async def test_sizes_are_limited(api: Api) -> None:
    """Bodies, URLs and headers that are too large are refused (A13.3)."""
    await api.open(max_body_bytes=100, max_url_bytes=200, max_header_bytes=1000)

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(3):
            yield b"x" * 50

    async with api.client(await api.token("admin")) as admin:
        large = await admin.post("tokens", content=b"x" * 101)
        chunked = await admin.post("tokens", content=pieces())
        url = await admin.get("jobs", params={"q": "x" * 200})
        headers = await admin.get("jobs", headers={"X-Large": "x" * 1000})
    assert problem(large) == (413, "body_too_large")
    assert problem(chunked) == (413, "body_too_large")
    assert problem(url) == (414, "url_too_long")
    assert problem(headers) == (431, "headers_too_large")


async def test_an_answer_that_would_be_too_large_is_not_sent(api: Api) -> None:
    await api.open(max_response_bytes=3000)
    await api.add(*(make("job_started", job=f"j{n}") for n in range(20)))
    async with api.client(await api.token()) as client:
        assert problem(await client.get("jobs")) == (400, "answer_too_large")
        assert (await client.get("jobs", params={"limit": 2})).status_code == 200


async def test_only_names_that_are_served_are_answered(api: Api) -> None:
    await api.open(allowed_hosts=("everstep.test",))
    async with api.client(await api.token()) as client:
        assert (await client.get("jobs")).status_code == 200
        assert (await client.get("jobs", headers={"Host": "EVERSTEP.test:80"})).status_code == 200
        answer = await client.get("jobs", headers={"Host": "evil.test"})
    assert problem(answer) == (400, "wrong_host")


async def test_every_answer_has_the_safe_headers_and_allows_no_other_site(api: Api) -> None:
    async with api.client(await api.token()) as client:
        answers = [
            await client.get(path, headers={"Origin": "http://evil.test"}) for path in ("jobs", "x")
        ]
    for answer in answers:
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert not any(name.startswith("access-control") for name in answer.headers)


async def test_too_many_at_once_are_refused_not_queued(api: Api) -> None:
    await api.open(max_concurrent=1)
    token = await api.token("admin")
    arrived, go_on = asyncio.Event(), asyncio.Event()

    async def slow_body() -> AsyncIterator[bytes]:
        arrived.set()
        await go_on.wait()
        yield b'{"name":"slow"}'

    async with api.client(token) as client, asyncio.TaskGroup() as tasks:
        json = {"Content-Type": "application/json"}
        slow = tasks.create_task(client.post("tokens", content=slow_body(), headers=json))
        await arrived.wait()
        answer = await client.get("jobs")
        assert problem(answer) == (503, "too_busy")
        assert answer.headers["retry-after"] == "1"
        go_on.set()
    assert slow.result().status_code == 201


async def test_a_request_that_never_ends_is_ended(api: Api) -> None:
    await api.open(answer_within_s=0.2)

    async def never() -> AsyncIterator[bytes]:
        await asyncio.Event().wait()
        yield b""

    async with api.client(await api.token("admin")) as client:
        assert problem(await client.post("tokens", content=never())) == (503, "too_slow")


async def test_a_query_that_takes_too_long_is_stopped(database_url: str, api: Api) -> None:
    await api.add(*(make("rank_exited", source=f"agent/n{n}") for n in range(2000)))
    token = await api.token()
    # A disk that stands for some seconds is "no answer in time", and not what is tested here.
    limits = StoreLimits(read_within_s=0.001, connect_within_s=60)
    async with open_database(database_url, limits=limits) as hasty:
        api.app = create_app(dataclasses.replace(api.context, database=hasty))
        async with api.client(token) as client:
            answers = [
                await client.get("facts", params={"source": "nobody", "limit": 1000})
                for _ in range(20)
            ]
    assert {problem(one) for one in answers if one.status_code != 200} <= {(503, "query_too_long")}


async def test_a_database_that_is_away_is_a_503_and_comes_back(
    postgres_url: str, postgres: Any
) -> None:
    name = postgres_url.partition("@/")[2].partition("?")[0]
    async with open_database(postgres_url) as database:
        await upgrade(database)
        away = Api(database, FactLog(database, fold), SystemClock())
        await away.open()
        async with away.client(await away.token()) as client:
            assert (await client.get("jobs")).status_code == 200
            await asyncio.to_thread(postgres.psql, f"ALTER DATABASE {name} ALLOW_CONNECTIONS false")
            await asyncio.to_thread(
                postgres.psql,
                f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname='{name}'",
            )
            answer = await client.get("jobs")
            assert problem(answer) == (503, "database_unavailable")
            assert name not in answer.text
            await asyncio.to_thread(postgres.psql, f"ALTER DATABASE {name} ALLOW_CONNECTIONS true")
            assert (await client.get("jobs")).status_code == 200


async def test_a_bug_of_ours_tells_nothing_about_us(
    api: Api, reader: httpx2.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    object.__setattr__(api.context, "cursors", None)
    answer = await reader.get("jobs", params={"cursor": "AAAA"})
    assert problem(answer) == (500, "internal")
    assert "NoneType" not in answer.text
    assert "NoneType" in caplog.text
