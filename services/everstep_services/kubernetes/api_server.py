"""The API server of Kubernetes: nodes listed, watched and patched, and what may go wrong."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Mapping
from typing import Any, Literal, TypeVar

import httpx2
import msgspec

from everstep.errors import EverstepError
from everstep.evidence.files import read_regular
from everstep_services.kubernetes.domain.nodes import ClusterNode
from everstep_services.kubernetes.settings import KubernetesSettings

T = TypeVar("T")
_NODES = "/api/v1/nodes"
_PAGE = 500
_ANSWER_S = 30.0
_WATCH_S = 300
"""The API server ends a watch after this; it is opened again where it ended."""
_LONGEST_LINE = 4 << 20
ChangeKind = Literal["put", "gone", "seen"]


class ApiServerError(EverstepError):
    """The API server did not do it; another attempt may succeed."""


class ApiServerRefusalError(ApiServerError):
    """It does not let us: the token or the rights are wrong."""


class VersionExpiredError(ApiServerError):
    """It no longer knows what came after this version: list everything again."""


class ChangedMeanwhileError(ApiServerError):
    """The object has changed since it was read."""


class NodeChange(msgspec.Struct, frozen=True):
    """One event of a watch; `seen` only moves the version."""

    kind: ChangeKind
    version: str
    node: ClusterNode | None = None


class _ListMetadata(msgspec.Struct, frozen=True):
    resourceVersion: str = ""  # noqa: N815
    next: str = msgspec.field(name="continue", default="")


class _NodeList(msgspec.Struct, frozen=True):
    metadata: _ListMetadata
    items: tuple[ClusterNode, ...] = ()


class _Event(msgspec.Struct, frozen=True):
    type: str
    object: msgspec.Raw


class _Status(msgspec.Struct, frozen=True):
    code: int = 0
    message: str = ""


class ApiServer:
    """One API server. Use it as a context manager."""

    def __init__(self, settings: KubernetesSettings) -> None:
        self._settings = settings
        self._client: httpx2.AsyncClient | None = None

    async def __aenter__(self) -> "ApiServer":
        self._client = await asyncio.to_thread(self._new_client)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._client is not None:
            await self._client.aclose()

    async def list_nodes(self) -> tuple[tuple[ClusterNode, ...], str]:
        """All nodes, and the version after which to watch."""
        nodes: list[ClusterNode] = []
        params: dict[str, str] = {"limit": str(_PAGE), **self._selected()}
        while True:
            body = await self._answer("GET", _NODES, params=params)
            page = _decoded(body, _NodeList)
            nodes += page.items
            if not page.metadata.next:
                return tuple(nodes), page.metadata.resourceVersion
            params["continue"] = page.metadata.next

    async def watch_nodes(self, version: str) -> AsyncIterator[NodeChange]:
        """Yield the changes after a version, until the API server ends the watch."""
        params = {
            "watch": "1",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(_WATCH_S),
            **self._selected(),
        }
        headers = await self._headers()
        patience = httpx2.Timeout(_ANSWER_S, read=_WATCH_S + _ANSWER_S)
        try:
            async with self._open.stream(
                "GET", _NODES, params=params, headers=headers, timeout=patience
            ) as response:
                if not response.is_success:
                    raise _refused(response.status_code, await response.aread())
                async for line in response.aiter_lines():
                    if len(line) > _LONGEST_LINE:
                        raise ApiServerError("the API server sent a line of more than 4 MiB")
                    if line.strip():
                        yield _change(line)
        except httpx2.HTTPError as error:
            raise _away(error) from error

    async def node(self, name: str) -> ClusterNode:
        """One node as it is now."""
        return _decoded(await self._answer("GET", f"{_NODES}/{name}"), ClusterNode)

    async def patch_node(self, name: str, patch: Mapping[str, Any]) -> ClusterNode:
        """Change a node; `ChangedMeanwhileError` if it is no longer the version in the patch."""
        body = await self._answer(
            "PATCH",
            f"{_NODES}/{name}",
            params={"fieldManager": "everstep"},
            content=msgspec.json.encode(patch),
        )
        return _decoded(body, ClusterNode)

    @property
    def _open(self) -> httpx2.AsyncClient:
        assert self._client is not None, "use it as a context manager"
        return self._client

    def _selected(self) -> dict[str, str]:
        selector = self._settings.node_selector
        return {"labelSelector": selector} if selector else {}

    def _new_client(self) -> httpx2.AsyncClient:
        settings = self._settings
        verify: ssl.SSLContext | bool = True
        if settings.api_url.startswith("https://"):
            try:
                verify = ssl.create_default_context(cafile=str(settings.ca_file))
            except OSError as error:
                raise ApiServerRefusalError(
                    f"the authority in {settings.ca_file} cannot be read: {error.strerror}; this "
                    f"service needs a pod with a service account, or ca_file in [kubernetes]"
                ) from error
        return httpx2.AsyncClient(
            base_url=settings.api_url, verify=verify, timeout=_ANSWER_S, trust_env=False
        )

    async def _headers(self) -> dict[str, str]:
        token = await asyncio.to_thread(self._token)
        return {"Authorization": f"Bearer {token}", "Accept": "application/json"}

    def _token(self) -> str:
        try:
            return read_regular(self._settings.token_file).decode().strip()
        except OSError as error:
            raise ApiServerRefusalError(
                f"the token in {self._settings.token_file} cannot be read: {error.strerror}; this "
                f"service needs a pod with a service account, or token_file in [kubernetes]"
            ) from error

    async def _answer(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        content: bytes | None = None,
    ) -> bytes:
        headers = await self._headers()
        if content is not None:
            headers["Content-Type"] = "application/merge-patch+json"
        try:
            response = await self._open.request(
                method, path, params=params, headers=headers, content=content
            )
        except httpx2.HTTPError as error:
            raise _away(error) from error
        if not response.is_success:
            raise _refused(response.status_code, response.content)
        return response.content


def _change(line: str) -> NodeChange:
    event = _decoded(line.encode(), _Event)
    if event.type == "ERROR":
        status = _decoded(bytes(event.object), _Status)
        raise _refused(status.code, bytes(event.object))
    node = _decoded(bytes(event.object), ClusterNode)
    version = node.metadata.resourceVersion
    match event.type:
        case "ADDED" | "MODIFIED":
            return NodeChange("put", version, node)
        case "DELETED":
            return NodeChange("gone", version, node)
        case _:  # BOOKMARK, and what later releases may send
            return NodeChange("seen", version)


def _decoded(data: bytes, of: type[T]) -> T:
    try:
        return msgspec.json.decode(data, type=of)
    except msgspec.DecodeError as error:  # also of a wrong shape
        raise ApiServerError(f"the API server's answer cannot be read: {error}") from error


def _refused(status: int, body: bytes) -> ApiServerError:
    try:
        text = " ".join(msgspec.json.decode(body, type=_Status).message.split())[:300]
    except msgspec.DecodeError:
        text = ""
    text = text or f"status {status}"
    match status:
        case 401 | 403:
            return ApiServerRefusalError(
                f"the API server refuses it: {text}; see the ClusterRole in deploy/kubernetes"
            )
        case 409:
            return ChangedMeanwhileError(text)
        case 410:
            return VersionExpiredError(text)
        case _:
            return ApiServerError(f"the API server cannot do it: {text}")


def _away(error: httpx2.HTTPError) -> ApiServerError:
    return ApiServerError(f"the API server is away: {str(error) or type(error).__name__}")
