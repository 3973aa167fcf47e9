"""The output of ranks by REST, from a log store in memory."""

import json
from datetime import datetime
from typing import Any

import httpx2
import pytest
from msgspec.structs import replace

from everstep.messages.rank_logs import LogHeader, LogIndex, LogPiece, SentLogFile
from tests.integration.conftest import Api
from tests.integration.history.test_rest_live import Listener, listening

JOB = "toy"
NOON_US = 1_767_268_800_000_000  # 2026-01-01T12:00:00Z
SECOND = 1_000_000


@pytest.fixture
def database_url(sqlite_url: str) -> str:
    """One kind of database: the lines are not in it."""
    return sqlite_url


@pytest.fixture
async def logs(api: Api) -> Api:
    """Two ranks on two nodes, that write a line a second, in round 3; and a round before."""
    store = api.bus.rank_logs
    for round in (2, 3):
        for second in range(5):
            for rank in range(2):
                text = f"round {round} rank {rank} step {second} loss={5 - second}\n"
                await store.put(_piece(round, rank, second, text))
        for rank in range(2):
            file = SentLogFile(
                rank=rank, stream="stdout", file=f"f{round}{rank}", size=150, sent=150, lines=5,
                first_us=NOON_US, last_us=NOON_US + 4 * SECOND, is_over=True,
            )  # fmt: skip
            await store.put_index(
                LogIndex(job=JOB, round=round, node=f"n{rank}", at_us=1, files=(file,))
            )
    return api


def _piece(round: int, rank: int, second: int, text: str) -> LogPiece:
    header = LogHeader(
        file=f"f{round}{rank}", offset=30 * second, size=30, line=second,
        times=((2, NOON_US + second * SECOND + rank * SECOND // 2),),
    )  # fmt: skip
    return LogPiece(
        job=JOB, round=round, node=f"n{rank}", rank=rank, stream="stdout", header=header,
        data=text.encode(),
    )  # fmt: skip


async def lines(reader: httpx2.AsyncClient, query: str = "") -> list[str]:
    answer = await reader.get(f"jobs/{JOB}/logs{query}")
    assert answer.status_code == 200, answer.text
    return [item["text"] for item in answer.json()["items"]]


async def test_the_newest_round_of_all_ranks_by_time(logs: Api, reader: httpx2.AsyncClient) -> None:
    """Whole logs of all nodes, from any machine."""
    answer = (await reader.get(f"jobs/{JOB}/logs")).json()
    assert answer["round"] == 3
    assert answer["is_end"]
    times = [datetime.fromisoformat(item["at"]) for item in answer["items"]]
    assert len(times) == 10
    assert times == sorted(times)
    assert [(item["node"], item["rank"]) for item in answer["items"][:2]] == [("n0", 0), ("n1", 1)]


@pytest.mark.parametrize(
    ("query", "count"),
    [
        ("?round=2", 10),
        ("?rank=1", 5),
        ("?rank=0&rank=1", 10),
        ("?node=n1", 5),
        ("?stream=stderr", 0),
        ("?since=2026-01-01T12:00:03Z", 4),
        ("?until=2026-01-01T12:00:00Z", 1),
        ("?contains=loss%3D3", 2),
        ("?regex=step%20[12]%20", 4),
        ("?regex=step%20[12]%20&rank=0&limit=1", 1),
    ],
)
async def test_lines_are_filtered(
    logs: Api, reader: httpx2.AsyncClient, query: str, count: int
) -> None:
    assert len(await lines(reader, query)) == count


@pytest.mark.parametrize("query", ["", "&regex=loss", "&contains=rank%201"])
async def test_pages_put_together_are_all_lines(
    logs: Api, reader: httpx2.AsyncClient, query: str
) -> None:
    whole = await lines(reader, f"?limit=100{query}")
    assert whole
    seen: list[str] = []
    cursor, is_end = "", False
    while not is_end:
        answer = (await reader.get(f"jobs/{JOB}/logs?limit=3{query}{cursor}")).json()
        assert len(answer["items"]) <= 3
        seen += [item["text"] for item in answer["items"]]
        cursor, is_end = f"&cursor={answer['next']}", answer["is_end"]
    assert sorted(seen) == sorted(whole)


async def test_a_page_of_one_piece_ends_within_it(logs: Api, reader: httpx2.AsyncClient) -> None:
    text = "".join(f"line {number}\n" for number in range(100))
    piece = replace(_piece(9, 0, 0, text), header=LogHeader(file="x", offset=0, size=900, line=0))
    await logs.bus.rank_logs.put(piece)
    seen: list[str] = []
    cursor, is_end = "", False
    while not is_end:
        answer = (await reader.get(f"jobs/{JOB}/logs?round=9&limit=30{cursor}")).json()
        seen += [item["text"] for item in answer["items"]]
        cursor, is_end = f"&cursor={answer['next']}", answer["is_end"]
    assert seen == text.splitlines()


async def test_what_is_written_later_follows(logs: Api, reader: httpx2.AsyncClient) -> None:
    """`everstep logs -f`: the cursor of the end goes on."""
    end = (await reader.get(f"jobs/{JOB}/logs")).json()
    assert end["is_end"]
    await logs.bus.rank_logs.put(_piece(3, 0, 5, "step 5\n"))
    answer = (await reader.get(f"jobs/{JOB}/logs?cursor={end['next']}")).json()
    assert [item["text"] for item in answer["items"]] == ["step 5"]
    answer = (await reader.get(f"jobs/{JOB}/logs?cursor={answer['next']}")).json()
    assert answer["items"] == []


STREAM = f"jobs/{JOB}/logs/stream"


async def heard(stream: Listener, count: int) -> tuple[list[str], str]:
    """The texts of the next lines, and the id of the last event."""
    texts: list[str] = []
    last = ""
    while len(texts) < count:
        event = await stream.block()
        last = event.get("id", last)
        if event.get("event") == "lines":
            texts += [item["text"] for item in json.loads(event["data"])["items"]]
    return texts, last


async def test_lines_are_heard_as_they_come(logs: Api) -> None:
    """Those that are there, then those that follow, and none twice after a break."""
    token = await logs.token()
    async with listening(logs, token, "rank=0", path=STREAM) as stream:
        texts, _ = await heard(stream, 5)
        assert texts[0] == "round 3 rank 0 step 0 loss=5"
        await logs.bus.rank_logs.put(_piece(3, 0, 5, "step 5\n"))
        texts, last = await heard(stream, 1)
        assert texts == ["step 5"]
    await logs.bus.rank_logs.put(_piece(3, 0, 6, "step 6\n"))
    async with listening(logs, token, "rank=0", last, path=STREAM) as stream:
        assert (await heard(stream, 1))[0] == ["step 6"]


@pytest.mark.parametrize(("query", "follows"), [("", True), ("round=3", False)])
async def test_a_stream_goes_on_with_the_next_round(logs: Api, query: str, follows: bool) -> None:
    """Unless it was asked for one round."""
    async with listening(logs, await logs.token(), query, path=STREAM) as stream:
        await heard(stream, 10)
        await logs.bus.rank_logs.put(_piece(4, 0, 0, "a new round\n"))
        await logs.bus.rank_logs.put_index(LogIndex(job=JOB, round=4, node="n0", at_us=1, files=()))
        if not follows:
            await logs.bus.rank_logs.put(_piece(3, 0, 5, "the old round\n"))
        expected = "a new round" if follows else "the old round"
        assert (await heard(stream, 1))[0] == [expected]


async def test_a_stream_waits_for_a_bus_that_is_away(logs: Api) -> None:
    await logs.open(keep_alive_s=0.5)
    async with listening(logs, await logs.token(), "rank=0", path=STREAM) as stream:
        await heard(stream, 5)
        await logs.bus._server.set_up(False)
        stream.forget()
        await stream.block()  # it is alive
        await logs.bus._server.set_up(True)
        await logs.bus.rank_logs.put(_piece(3, 0, 5, "step 5\n"))
        assert (await heard(stream, 1))[0] == ["step 5"]


async def test_a_stream_of_nothing_is_refused(logs: Api, reader: httpx2.AsyncClient) -> None:
    answer = await reader.get("jobs/nobody/logs/stream")
    assert (answer.status_code, answer.json()["code"]) == (404, "logs_not_stored")


async def test_the_index_of_a_round(logs: Api, reader: httpx2.AsyncClient) -> None:
    answer = (await reader.get(f"jobs/{JOB}/rounds/3/logs")).json()
    assert answer["is_whole"]
    assert answer["nodes"] == ["n0", "n1"]
    assert [(item["rank"], item["stored_bytes"]) for item in answer["items"]] == [
        (0, 150),
        (1, 150),
    ]
    assert (await reader.get(f"jobs/{JOB}/logs/rounds")).json()["rounds"] == [2, 3]


async def test_the_file_of_a_cycle(logs: Api, reader: httpx2.AsyncClient) -> None:
    """NVRx's single file, page by page."""
    text, cursor = "", ""
    while True:
        answer = await reader.get(f"jobs/{JOB}/rounds/3/logs/text?limit=4{cursor}")
        assert answer.status_code == 200
        text += answer.text
        if "Everstep-Next" not in answer.headers:
            break
        cursor = f"&cursor={answer.headers['Everstep-Next']}"
    assert text.splitlines()[:2] == [
        "0: round 3 rank 0 step 0 loss=5",
        "1: round 3 rank 1 step 0 loss=5",
    ]
    assert len(text.splitlines()) == 10


@pytest.mark.parametrize(
    ("path", "status", "code"),
    [
        ("jobs/nobody/logs", 404, "logs_not_stored"),
        ("jobs/toy/logs?round=77", 404, "logs_not_stored"),
        ("jobs/toy/rounds/77/logs", 404, "logs_not_stored"),
        ("jobs/toy/rounds/77/logs/text", 404, "logs_not_stored"),
        ("jobs/toy/logs?regex=(", 422, "bad_regex"),
        ("jobs/toy/logs?cursor=abc", 400, "bad_cursor"),
        ("jobs/toy/logs?line=3", 422, "invalid_request"),
        ("jobs/toy/logs?limit=0", 422, "invalid_request"),
    ],
)
async def test_what_cannot_be_answered_says_why(
    logs: Api, reader: httpx2.AsyncClient, path: str, status: int, code: str
) -> None:
    answer = await reader.get(path)
    assert (answer.status_code, answer.json()["code"]) == (status, code)


async def test_an_expression_that_never_ends_ends(
    logs: Api, reader: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A13.3: a hostile pattern costs some processor time of another process."""
    await logs.bus.rank_logs.put(_piece(3, 0, 6, "a" * 60 + "!\n"))
    answer = await reader.get(f"jobs/{JOB}/logs?regex=%28a%7Ca%29%2Ab")
    assert answer.status_code == 422
    assert "takes longer" in answer.json()["detail"]
    assert (await reader.get("status")).status_code == 200


async def test_the_bus_away_is_said(logs: Api, reader: httpx2.AsyncClient) -> None:
    await logs.bus._server.set_up(False)
    for path in (f"jobs/{JOB}/logs", f"jobs/{JOB}/rounds/3/logs", f"jobs/{JOB}/logs/rounds"):
        answer = await reader.get(path)
        assert (answer.status_code, answer.json()["code"]) == (503, "bus_unavailable")


async def test_markup_in_a_line_stays_text(logs: Api, reader: httpx2.AsyncClient) -> None:
    await logs.bus.rank_logs.put(_piece(3, 0, 6, "<script>alert(1)</script>\n"))
    answer: Any = await reader.get(f"jobs/{JOB}/rounds/3/logs/text?contains=script")
    assert answer.headers["content-type"].startswith("text/plain")
    assert answer.headers["x-content-type-options"] == "nosniff"
