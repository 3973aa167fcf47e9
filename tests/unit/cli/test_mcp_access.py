"""Who may speak to `everstep mcp --http`: what the API says of a token is not turned around."""

import logging
from typing import Any

import msgspec
import pytest
from starlette.requests import ClientDisconnect

from everstep_services.cli.api.client import ApiRefusalError
from everstep_services.cli.errors import CliError, Exit
from everstep_services.cli.mcp_server.answers import BoundedData, Bounds
from everstep_services.cli.mcp_server.start import HttpAccess
from tests.fakes.clock import FakeClock

HOST = "127.0.0.1:7077"


class Server:
    """The layer with an API behind it that answers as it is told."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.errors: dict[str, CliError] = {}
        self.asked: list[str] = []
        self._access = HttpAccess(
            self._inside, self._admit, self.clock, frozenset({HOST}), frozenset()
        )

    async def _admit(self, token: str) -> None:
        self.asked.append(token)
        if token in self.errors:
            raise self.errors[token]

    async def _inside(self, scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    async def ask(self, token: str, address: str = "10.0.0.1") -> tuple[int, str, str]:
        """The status, the text of a refusal, and `Retry-After`."""
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        async def receive() -> Any:
            raise AssertionError("the body is not read here")

        headers = {"host": HOST, "authorization": f"Bearer {token}", "content-length": "2"}
        scope = {
            "type": "http", "method": "POST", "path": "/mcp", "client": (address, 1),
            "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        }  # fmt: skip
        await self._access(scope, receive, send)
        body = msgspec.json.decode(sent[1]["body"])
        names = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
        return sent[0]["status"], body.get("error", ""), names.get("retry-after", "")


@pytest.fixture
def server() -> Server:
    return Server()


async def test_a_guesser_waits_as_long_as_the_header_says(server: Server) -> None:
    server.errors["bad"] = ApiRefusalError("unknown", 401, "")
    for _ in range(20):
        assert (await server.ask("bad"))[0] == 401
    await server.clock.advance(18.5)
    assert await server.ask("bad") == (
        429, "20 bad tokens came from this address: wait 42 s", "42",
    )  # fmt: skip
    assert (await server.ask("good", "10.0.0.2"))[0] == 200, "another client is not the guesser"
    assert (await server.ask("good"))[0] == 200, "a right token passes from any address"
    await server.clock.advance(42)
    assert (await server.ask("bad"))[0] == 401


async def test_what_the_api_refuses_after_many_guesses_is_refused_as_long(server: Server) -> None:
    """The API counts all clients of this server as one address; right tokens it admits."""
    server.errors["bad"] = ApiRefusalError("30 bad tokens came from this address", 429, "33")
    for _ in range(30):
        status, text, retry_after = await server.ask("bad")
        assert (status, retry_after) == (429, "33")
        assert "the API does not admit this token, after many bad ones" in text
        assert (await server.ask("good"))[0] == 200


async def test_a_token_of_another_scope_is_told_so(server: Server) -> None:
    server.errors["hook"] = ApiRefusalError("this needs the scope read; yours has webhook", 403, "")
    for _ in range(30):
        assert (await server.ask("hook"))[:2] == (
            403,
            "this needs the scope read; yours has webhook",
        )


async def test_an_api_that_is_away_makes_no_token_bad(server: Server) -> None:
    server.errors["good"] = CliError("the API cannot be reached", Exit.UNREACHABLE)
    assert await server.ask("good") == (503, "the API cannot be reached", "5")
    server.errors["good"] = ApiRefusalError("broken", 500, "")
    assert (await server.ask("good"))[0] == 503
    del server.errors["good"]
    assert (await server.ask("good"))[0] == 200


def test_a_client_that_goes_away_is_not_an_error_of_the_server(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pytest.importorskip("mcp")
    from everstep_services.cli.mcp_server.start import is_about_the_server

    log = logging.getLogger("mcp-of-a-test")
    log.addFilter(is_about_the_server)
    for error in (ClientDisconnect(), ValueError("ours")):
        log.error("Error handling POST request", exc_info=error)
    (record,) = caplog.records
    assert "ours" in str(record.exc_info)


def test_what_was_cut_is_counted() -> None:
    cut = BoundedData("", Bounds(characters=80, items=200), texts_cut=2, lists_cut=1)
    assert cut.notes == [
        "2 texts were cut at 80 characters.", "1 list was cut at 200 items."
    ]  # fmt: skip
