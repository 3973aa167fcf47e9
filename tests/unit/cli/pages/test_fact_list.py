"""Facts on the screen: which are asked for, and how they look."""

import json
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

import httpx2
import pytest

from everstep_services.cli.__main__ import main
from everstep_services.cli.api.client import Api
from everstep_services.cli.commands.evidence.facts import print_live, print_past, wanted
from everstep_services.cli.errors import CliError
from everstep_services.cli.invocation import Invocation

SINCE = datetime(2026, 11, 21, 8, tzinfo=UTC)


def fact(n: int) -> dict[str, Any]:
    body = {"type": "rank_exited.v1", "id": f"f{n}", "job": "j", "rank": n, "how": "a\tb"}
    return {
        "n": n,
        "id": f"f{n}",
        "job": "j",
        "kind": "rank_exited",
        "round": None,
        "node": "n1",
        "at": "2026-11-21T08:00:00.5Z",
        "source": "agent/n1",
        "body": body,
    }


class History:
    """An API with three facts; its stream sends the given lines and then refuses."""

    def __init__(self, stream: bytes = b"", facts: Sequence[int] = (1, 2, 3)) -> None:
        self.asked: list[httpx2.URL] = []
        self.facts = facts
        self.stream = [stream]

    def __call__(self, request: httpx2.Request) -> httpx2.Response:
        self.asked.append(request.url)
        if request.url.path.endswith("/status"):
            return httpx2.Response(200, content=b'{"last_n":2}')
        if request.url.path.endswith("/stream"):
            if not self.stream:
                return httpx2.Response(403, content=b'{"detail":"revoked"}')
            headers = {"Content-Type": "text/event-stream"}
            return httpx2.Response(200, content=self.stream.pop(), headers=headers)
        items = [fact(n) for n in self.facts]
        if request.url.params["order"] == "desc":
            items.reverse()
        return httpx2.Response(200, content=json.dumps({"items": items, "next": None}).encode())

    def api(self) -> Api:
        return Api("http://api.test", None, transport=httpx2.MockTransport(self))


def past(history: History, output: str | None, **asked: Any) -> None:
    options = {"since": None, "until": None, "limit": None, **asked}
    with history.api() as api:
        print_past(Invocation(output=output), api, wanted(**options))


Printed = Callable[[], str]


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str]) -> Printed:
    return lambda: capsys.readouterr().out


@pytest.mark.parametrize("output", [None, "table", "name", "jsonl"])
def test_when_there_are_none_it_says_so_beside_the_data(
    capsys: pytest.CaptureFixture[str], output: str | None
) -> None:
    past(History(facts=()), output)
    out, err = capsys.readouterr()
    assert "no such facts" in err
    assert "no such facts" not in out


def test_the_newest_come_last(printed: Printed) -> None:
    history = History()
    past(history, "name", kind=("a", "b"), job="j", limit=7)
    assert printed() == "f1\nf2\nf3\n"
    assert sorted(history.asked[0].params.multi_items()) == [
        ("job", "j"),
        ("kind", "a"),
        ("kind", "b"),
        ("limit", "7"),
        ("order", "desc"),
    ]


def test_since_a_moment_begins_there(printed: Printed) -> None:
    history = History()
    past(history, "name", since=SINCE)
    assert printed() == "f1\nf2\nf3\n"
    params = history.asked[0].params
    assert (params["order"], params["received_since"]) == ("asc", "2026-11-21T08:00:00+00:00")
    assert not {"since", "until", "received_until"} & {*params}, "a sender's clock may be wrong"


def test_an_older_api_is_asked_by_the_times_that_it_knows(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Releases N and N-1 work together."""
    history = History()
    known = history.__call__

    def older(request: httpx2.Request) -> httpx2.Response:
        if "received_since" in request.url.params:
            detail = {"detail": "query.received_since: unknown parameter"}
            return httpx2.Response(422, content=json.dumps(detail).encode())
        return known(request)

    options = wanted(since=SINCE, until=None, limit=None)
    with Api("http://api.test", None, transport=httpx2.MockTransport(older)) as api:
        print_past(Invocation(output="name"), api, options)
    out, err = capsys.readouterr()
    assert out == "f1\nf2\nf3\n"
    assert history.asked[0].params["since"] == "2026-11-21T08:00:00+00:00"
    assert "go by the senders' clocks" in err


def test_how_they_look(printed: Printed) -> None:
    past(History(), None)
    assert printed().splitlines()[0] == (
        "2026-11-21T08:00:00.5Z\tj\trank_exited\t\tn1\tagent/n1\trank=1 how=a b"
    )
    past(History(), "json")
    assert json.loads(printed())["items"][0] == fact(1)
    past(History(), "table")
    assert "2026-11-21 08:00:00" in printed()


def test_a_damaged_bundle_ends_the_stream_with_the_damage() -> None:
    detail = "the bundle is damaged: DecodeError: no JSON"
    data = json.dumps({"detail": detail, "code": "bundle_damaged"})
    history = History(f"event: problem\ndata: {data}\n\n".encode())
    options = wanted(since=None, until=None, limit=None)
    with history.api() as api, pytest.raises(CliError) as raised:
        print_live(Invocation(), api, options)
    assert str(raised.value) == detail


def test_following_since_a_moment_misses_nothing_and_repeats_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    event = f"event: fact\nid: e-4\ndata: {json.dumps(fact(4))}\n\n"
    reset = 'event: reset\nid: e-3\ndata: {"reason":"another\\u001b database","n":3}\n\n'
    history = History(f"id: e-3\n: welcome\n\n{reset}{event}".encode())
    options = wanted(since=SINCE, until=None, limit=None, job="j")
    with history.api() as api, pytest.raises(CliError, match="revoked"):
        print_live(Invocation(output="jsonl"), api, options)
    out, err = capsys.readouterr()
    assert [json.loads(line)["n"] for line in out.splitlines()] == [1, 2, 3, 4]
    assert "some facts may be missing here: another\\u001b database" in err
    # Asked for the end before the pages were read, and went on behind the later of the two.
    assert [url.path.rpartition("/")[2] for url in history.asked] == [
        "status",
        "facts",
        "stream",
        "stream",
    ]
    assert history.asked[2].params["after"] == "3"


def test_following_takes_no_end(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["facts", "-f", "--limit", "3"]) == 2
    assert "-f never ends" in capsys.readouterr().err
