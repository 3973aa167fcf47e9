"""An emulator of the nodes' part of a Kubernetes API server: real HTTP, behaviour as documented.

It lists in pages, watches from a version with bookmarks, forgets old versions (410), applies merge
patches, refuses a patch of an old version (409), a wrong token (401) and missing rights (403).
What it does not have: TLS, admission, other objects, field selectors.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, urlsplit

Json = dict[str, Any]
TOKEN = "a-token"


@dataclass
class EmulatedNodes:
    """The state of the emulator, and its switches."""

    url: str = ""
    nodes: dict[str, Json] = field(default_factory=dict)
    version: int = 100
    log: list[tuple[int, str, Json]] = field(default_factory=list)
    forgotten: int = 0
    """Changes up to this version cannot be watched any more."""
    rights: set[str] = field(default_factory=lambda: {"list", "watch", "get", "patch"})
    is_up: bool = True
    conflicts: int = 0
    """Before so many patches another client changes the node."""
    page: int = 500
    requests: list[tuple[str, str]] = field(default_factory=list)
    """Verb and path."""
    patches: list[tuple[str, Json]] = field(default_factory=list)
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    _streams: set[asyncio.StreamWriter] = field(default_factory=set)

    async def put(self, name: str, **changes: Any) -> Json:
        """Create or change a node: its taints, unschedulable, conditions, labels, annotations."""
        before = self.nodes.get(name)
        node = json.loads(json.dumps(before or {"metadata": {"name": name}, "spec": {}}))
        for key, value in changes.items():
            part = {"conditions": "status", "labels": "metadata", "annotations": "metadata"}
            node.setdefault(part.get(key, "spec"), {})[key] = value
        await self._store("MODIFIED" if before else "ADDED", node)
        return self.nodes[name]

    async def remove(self, name: str) -> None:
        await self._store("DELETED", self.nodes[name])

    async def forget(self) -> None:
        """Compact the history, and end all watches, as a restart of the server does."""
        self.version += 1
        self.forgotten = self.version
        self.log.clear()
        await self.cut()

    async def bookmark(self) -> None:
        self.version += 1
        await self._announce("BOOKMARK", {"metadata": {"resourceVersion": str(self.version)}})

    async def cut(self) -> None:
        """Break all connections."""
        for writer in list(self._streams):
            writer.transport.abort()
        async with self.changed:
            self.changed.notify_all()

    async def _store(self, event: str, node: Json) -> None:
        self.version += 1
        node = json.loads(json.dumps(node))
        node["metadata"]["resourceVersion"] = str(self.version)
        name = node["metadata"]["name"]
        if event == "DELETED":
            self.nodes.pop(name, None)
        else:
            self.nodes[name] = node
        await self._announce(event, node)

    async def _announce(self, event: str, node: Json) -> None:
        async with self.changed:
            self.log.append((self.version, event, node))
            self.changed.notify_all()

    # -- HTTP --------------------------------------------------------------------------------------

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._streams.add(writer)
        try:
            while self.is_up and await self._request(reader, writer):
                pass
        except (OSError, asyncio.IncompleteReadError, ValueError):
            pass
        finally:
            self._streams.discard(writer)
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    async def _request(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        line = (await reader.readline()).decode()
        if not line:
            return False
        method, target, _ = line.split(" ", 2)
        headers: dict[str, str] = {}
        while (header := (await reader.readline()).decode().strip()) != "":
            name, _, value = header.partition(":")
            headers[name.lower()] = value.strip()
        body = await reader.readexactly(int(headers.get("content-length", "0")))
        parts = urlsplit(target)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        verb = _verb(method, parts.path, query)
        self.requests.append((verb, parts.path))
        refusal = self._refusal(verb, headers)
        if refusal is not None:
            return await _answer(writer, int(refusal["code"]), refusal)
        match verb:
            case "list":
                return await _answer(writer, 200, self._list(query))
            case "watch":
                await self._watch(writer, int(query["resourceVersion"]), query)
                return False
            case "get":
                return await self._one(writer, parts.path)
            case _:
                return await self._patch(writer, parts.path, headers, json.loads(body))

    def _refusal(self, verb: str, headers: dict[str, str]) -> Json | None:
        if headers.get("authorization") != f"Bearer {TOKEN}":
            return _status(401, "Unauthorized")
        if verb not in self.rights:
            text = f'nodes is forbidden: User "system:serviceaccount:e:e" cannot {verb} resource'
            return _status(403, text)
        return None

    def _list(self, query: dict[str, str]) -> Json:
        names = sorted(self.nodes)
        begin = int(query.get("continue", "0"))
        size = min(int(query.get("limit", "500")), self.page)
        metadata: Json = {"resourceVersion": str(self.version)}
        if begin + size < len(names):
            metadata["continue"] = str(begin + size)
        items = [self.nodes[name] for name in names[begin : begin + size]]
        return {"kind": "NodeList", "metadata": metadata, "items": items}

    async def _watch(self, writer: asyncio.StreamWriter, after: int, query: dict[str, str]) -> None:
        await _head(writer, 200, "Transfer-Encoding: chunked")
        if after < self.forgotten:
            gone = _status(410, f"too old resource version: {after} ({self.forgotten})")
            await _chunk(writer, {"type": "ERROR", "object": gone})
            return
        while not writer.is_closing():
            async with self.changed:
                for version, event, node in self.log:
                    if version > after and (
                        event != "BOOKMARK" or query.get("allowWatchBookmarks") == "true"
                    ):
                        await _chunk(writer, {"type": event, "object": node})
                        after = version
                await self.changed.wait()

    async def _one(self, writer: asyncio.StreamWriter, path: str) -> bool:
        node = self.nodes.get(path.rpartition("/")[2])
        if node is None:
            return await _answer(writer, 404, _status(404, "not found"))
        return await _answer(writer, 200, node)

    async def _patch(
        self, writer: asyncio.StreamWriter, path: str, headers: dict[str, str], patch: Json
    ) -> bool:
        name = path.rpartition("/")[2]
        if headers.get("content-type") != "application/merge-patch+json":
            return await _answer(writer, 415, _status(415, "unsupported media type"))
        if self.conflicts:
            self.conflicts -= 1
            await self.put(name, labels={"changed-by": f"another-{self.conflicts}"})
        node = self.nodes.get(name)
        if node is None:
            return await _answer(writer, 404, _status(404, "not found"))
        wanted = patch.get("metadata", {}).get("resourceVersion")
        if wanted and wanted != node["metadata"]["resourceVersion"]:
            text = "the object has been modified; please apply your changes to the latest version"
            return await _answer(writer, 409, _status(409, text))
        self.patches.append((name, patch))
        await self._store("MODIFIED", _merged(node, patch))
        return await _answer(writer, 200, self.nodes[name])


@asynccontextmanager
async def emulated_nodes() -> AsyncIterator[EmulatedNodes]:
    """A server on a free port of loopback."""
    state = EmulatedNodes()
    server = await asyncio.start_server(state.serve, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()[:2]
    state.url = f"http://{host}:{port}"
    try:
        yield state
    finally:
        state.is_up = False
        await state.cut()
        server.close()
        await server.wait_closed()


def _verb(method: str, path: str, query: dict[str, str]) -> str:
    if method == "PATCH":
        return "patch"
    if "watch" in query:
        return "watch"
    return "list" if path == "/api/v1/nodes" else "get"


def _merged(value: Any, patch: Any) -> Any:
    """RFC 7386."""
    if not isinstance(patch, dict):
        return patch
    merged = dict(value) if isinstance(value, dict) else {}
    for key, change in patch.items():
        if change is None:
            merged.pop(key, None)
        else:
            merged[key] = _merged(merged.get(key), change)
    return merged


def _status(code: int, message: str) -> Json:
    return {"kind": "Status", "status": "Failure", "code": code, "message": message}


async def _head(writer: asyncio.StreamWriter, status: int, more: str) -> None:
    writer.write(
        f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\n{more}\r\n\r\n".encode()
    )
    await writer.drain()


async def _answer(writer: asyncio.StreamWriter, status: int, body: Json) -> bool:
    data = json.dumps(body).encode()
    await _head(writer, status, f"Content-Length: {len(data)}")
    writer.write(data)
    await writer.drain()
    return True


async def _chunk(writer: asyncio.StreamWriter, body: Json) -> None:
    data = json.dumps(body).encode() + b"\n"
    writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
    await writer.drain()
