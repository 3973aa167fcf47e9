"""The REST API as the commands see it: deadlines, and one line for whatever goes wrong."""

import time
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, BinaryIO, Self
from urllib.parse import quote, urlsplit

import httpx2
import msgspec

from everstep import __version__
from everstep.backoff import backoff_s, jittered_s
from everstep.ids import BadNameError, checked_name
from everstep_services.cli.errors import CliError, Exit

MAX_ANSWER_BYTES = 64 << 20
STREAM_SILENCE_S = 60.0
"""The API sends something at least every 15 s; after this much silence it is gone."""
RECONNECT_MAX_S = 10.0
DOWNLOAD_SILENCE_S = 600.0
"""A file is made before its first byte is sent."""

_CODES = {
    400: Exit.USAGE,
    401: Exit.FORBIDDEN,
    403: Exit.FORBIDDEN,
    404: Exit.NOT_FOUND,
    422: Exit.USAGE,
    502: Exit.UNREACHABLE,
    503: Exit.UNREACHABLE,
    504: Exit.UNREACHABLE,
}
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})

Params = Mapping[str, str | int | list[str] | None]


def is_sendable(token: str) -> bool:
    """Whether a text can be the value of a header; every token can."""
    return token.isascii() and token.isprintable() and " " not in token


def job_path(job: str) -> str:
    """Where a job is in the API. A text that cannot name a job is refused."""
    try:
        return f"jobs/{checked_name('job', job[:200])}"
    except BadNameError as error:
        raise CliError(str(error), Exit.USAGE) from error


class ApiRefusalError(CliError):
    """The API has answered, and refuses."""

    def __init__(self, text: str, status: int, retry_after: str) -> None:
        super().__init__(text, _CODES.get(status, Exit.ERROR))
        self.status = status
        self.retry_after_s = int(retry_after) if retry_after.isdecimal() else None


class ProblemBody(msgspec.Struct):
    """What the API says when it cannot (RFC 9457); all of it may be missing."""

    title: str = ""
    detail: str = ""


def file_remedy(new_token: str = "") -> str:
    """What helps against a refused token that was read from a file."""
    new = new_token or "everstep token create NAME --scope admin --database URL"
    return (
        f"name a file with a valid token: --token-file FILE, or make one where the database of "
        f"history is: {new}"
    )


class Api:
    """One API. Use as a context manager. Every failure is a `CliError` with its exit code."""

    def __init__(
        self,
        url: str,
        token: str | None,
        *,
        timeout_s: float = 30.0,
        transport: httpx2.BaseTransport | None = None,
        remedy: str = "",
        is_record: bool = False,
    ) -> None:
        self.is_record = is_record
        self._remedy = remedy or file_remedy()
        self.url = url.rstrip("/")
        self._timeout_s = timeout_s
        self._headers: Mapping[str, str] = {}
        headers = {"User-Agent": f"everstep/{__version__}", "Accept": "application/json"}
        if token is not None:
            headers["Authorization"] = f"Bearer {token}"
        self._client = httpx2.Client(
            base_url=f"{self.url}/api/v1/",
            headers=headers,
            timeout=httpx2.Timeout(timeout_s),
            transport=transport,
            # A proxy that the environment names is for the world, not for this machine.
            trust_env=urlsplit(url).hostname not in _LOOPBACK,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._client.close()

    def get(self, path: str, params: Params | None = None) -> Any:
        """The resource, decoded from JSON."""
        return self._ask("GET", path, params=params)

    def text(self, path: str, params: Params | None = None) -> str:
        """The resource as text, for endpoints that do not answer in JSON."""
        return self._ask_bytes("GET", path, params=params).decode(errors="replace")

    def text_page(self, path: str, params: Params) -> tuple[str, str | None]:
        """A page of a text, and the cursor of the next one; None at the end."""
        text = self.text(path, params)
        return text, self._headers.get("everstep-next")

    def content(self, path: str) -> bytes:
        """The resource as bytes."""
        return self._ask_bytes("GET", path)

    def download(self, path: str, file: BinaryIO) -> Mapping[str, str]:
        """Write what is there now into a file, however large it is; the headers of the answer."""
        patience = httpx2.Timeout(self._timeout_s, read=DOWNLOAD_SILENCE_S)
        try:
            with self._client.stream("GET", path, timeout=patience) as response:
                if not response.is_success:
                    raise self._refused(response.status_code, response.read())
                for chunk in response.iter_bytes():
                    file.write(chunk)
        except httpx2.HTTPError as error:
            raise self._unreachable(error) from error
        return response.headers

    def probe(self) -> Mapping[str, str]:
        """The headers of an answer that needs a token."""
        self._ask("GET", "status")
        return self._headers

    def post(self, path: str, body: object) -> Any:
        """Make something new."""
        return self._ask("POST", path, body=body)

    def put(self, path: str, name: str, body: object) -> Any:
        """Set the one with this name."""
        return self._ask("PUT", f"{path}/{quote(name, safe='')}", body=body)

    def delete(self, path: str, name: str, params: Params | None = None) -> Any:
        """Remove the one with this name, or end it."""
        return self._ask("DELETE", f"{path}/{quote(name, safe='')}", params=params)

    def pages(
        self,
        path: str,
        params: Params,
        *,
        most: int | None,
        when_cut: Callable[[int], None] = lambda _: None,
    ) -> Iterator[dict[str, Any]]:
        """The items of all pages, at most `most` of them, each page fetched when needed.

        `when_cut` is called with their number where there are more than `most`.
        """
        cursor: str | None = None
        given = 0
        while True:
            page = self.get(path, {**params, "cursor": cursor})
            left = len(page["items"])
            for item in page["items"]:
                yield item
                given, left = given + 1, left - 1
                if given == most:
                    if left or page["next"] is not None:
                        when_cut(given)
                    return
            cursor = page["next"]
            if cursor is None:
                return

    def stream(
        self, path: str, params: Params, last_event_id: str | None
    ) -> Iterator[httpx2.ServerSentEvent]:
        """The events of one connection to a stream, after the one named."""
        headers = {"Accept": "text/event-stream"}
        if last_event_id is not None:
            headers["Last-Event-ID"] = last_event_id
        patience = httpx2.Timeout(self._timeout_s, read=STREAM_SILENCE_S)
        try:
            with self._client.stream(
                "GET", path, params=_given(params), headers=headers, timeout=patience
            ) as response:
                if response.status_code != httpx2.codes.OK:
                    raise self._refused(response.status_code, response.read())
                yield from httpx2.EventSource(response)
        except httpx2.HTTPError as error:
            raise self._unreachable(error) from error

    def _ask(
        self, method: str, path: str, *, params: Params | None = None, body: object = None
    ) -> Any:
        data = self._ask_bytes(method, path, params=params, body=body)
        try:
            return msgspec.json.decode(data) if data else None
        except msgspec.DecodeError as error:
            raise CliError(f"{self.url} did not answer in JSON: is it the Everstep API?") from error

    def _ask_bytes(
        self, method: str, path: str, *, params: Params | None = None, body: object = None
    ) -> bytes:
        deadline = time.monotonic() + self._timeout_s
        content = None if body is None else msgspec.json.encode(body)
        headers = {} if content is None else {"Content-Type": "application/json"}
        data = bytearray()
        try:
            with self._client.stream(
                method, path, params=_given(params or {}), content=content, headers=headers
            ) as response:
                for chunk in response.iter_bytes():
                    data += chunk
                    if time.monotonic() > deadline:
                        raise httpx2.ReadTimeout("")
                    if len(data) > MAX_ANSWER_BYTES:
                        raise CliError(f"{self.url} answered with more than 64 MiB; ask for less")
        except httpx2.HTTPError as error:
            raise self._unreachable(error) from error
        if not response.is_success:
            retry_after = response.headers.get("retry-after", "")
            raise self._refused(response.status_code, bytes(data), retry_after)
        self._headers = response.headers
        return bytes(data)

    def _refused(self, status: int, body: bytes, retry_after: str = "") -> CliError:
        try:
            problem = msgspec.json.decode(body, type=ProblemBody)
        except (msgspec.DecodeError, msgspec.ValidationError):
            problem = ProblemBody()
        text = problem.detail or problem.title or f"the API answered with status {status}"
        text = " ".join(text.split())
        if status == httpx2.codes.UNAUTHORIZED:
            text += f"; {self._remedy}"
        return ApiRefusalError(text, status, retry_after)

    def _unreachable(self, error: httpx2.HTTPError) -> CliError:
        if isinstance(error, httpx2.TimeoutException):
            why = f"did not answer within {self._timeout_s:g} s"
        elif isinstance(error, httpx2.ConnectError):
            why = f"cannot be reached: {error}"
        else:
            why = f"broke off: {str(error) or type(error).__name__}"
        return CliError(
            f"the API at {self.url} {why}; is it running? See everstep doctor", Exit.UNREACHABLE
        )


def follow(
    api: Api,
    path: str,
    params: Params,
    *,
    say: Callable[[str], None],
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[httpx2.ServerSentEvent]:
    """Events for ever: a lost connection is opened again, after the last event that was seen.

    Only the first connection may fail with "unreachable"; a refusal ends it at any time.
    """
    last_event_id: str | None = None
    heard, attempt = False, 0
    while True:
        try:
            for event in api.stream(path, params, last_event_id):
                heard, attempt = True, 0
                last_event_id = event.id or last_event_id
                yield event
            why = "the API closed the stream"
            heard = True
        except CliError as error:
            if error.code is not Exit.UNREACHABLE or not heard:
                raise
            why = str(error)
        if attempt == 0:
            say(f"{why}; connecting again")
        attempt += 1
        # Jittered: all followers lost the same server at the same moment.
        sleep(jittered_s(backoff_s(attempt, 0.5, RECONNECT_MAX_S)))


def _given(params: Params) -> dict[str, str | int | list[str]]:
    return {name: value for name, value in params.items() if value is not None}
