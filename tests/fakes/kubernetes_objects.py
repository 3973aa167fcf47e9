"""An emulator of a Kubernetes API server that keeps objects, as far as kubectl needs one.

It has discovery, and takes, lists and deletes objects of the kinds below. As in a real one a
namespace must exist before its objects. What it does not have: TLS, logins, admission, schemas,
controllers, watches.
"""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

Json = dict[str, Any]
_CLUSTER_WIDE = {"Namespace", "ClusterRole", "ClusterRoleBinding"}
_KINDS: dict[str, dict[str, str]] = {
    "v1": {
        "namespaces": "Namespace", "secrets": "Secret", "configmaps": "ConfigMap", "pods": "Pod",
        "services": "Service", "serviceaccounts": "ServiceAccount",
    },
    "apps/v1": {"statefulsets": "StatefulSet", "deployments": "Deployment"},
    "batch/v1": {"jobs": "Job"},
    "policy/v1": {"poddisruptionbudgets": "PodDisruptionBudget"},
    "networking.k8s.io/v1": {"networkpolicies": "NetworkPolicy"},
    "rbac.authorization.k8s.io/v1": {
        "clusterroles": "ClusterRole", "clusterrolebindings": "ClusterRoleBinding",
    },
}  # fmt: skip


class EmulatedObjects:
    """The objects by kind, namespace and name, and the address."""

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str, str], Json] = {}
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def of_kind(self, kind: str) -> list[Json]:
        return [each for (name, _, _), each in self.objects.items() if name == kind]

    def get(self, kind: str, namespace: str, name: str) -> Json | None:
        return self.objects.get((kind, namespace, name))

    @contextmanager
    def running(self) -> Iterator[None]:
        thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._server.shutdown()
            thread.join()
            self._server.server_close()

    def answer(self, method: str, path: str, body: Json | None) -> tuple[int, Json]:
        """The status and the object or list that a request gets."""
        parts = path.strip("/").split("/")
        found = _discovery(parts)
        if found is not None:
            return 200, found
        group, rest = (
            (parts[1], parts[2:]) if parts[0] == "api" else ("/".join(parts[1:3]), parts[3:])
        )
        namespace = ""
        if rest[0] == "namespaces" and len(rest) > 2:
            namespace, rest = rest[1], rest[2:]
        kind = _KINDS.get(group, {}).get(rest[0])
        if kind is None:
            return _failure(404, "the server could not find the requested resource")
        if method == "POST":
            assert body is not None
            return self._create(group, kind, namespace, body)
        if len(rest) == 1:
            items = [each for key, each in self.objects.items() if key[:2] == (kind, namespace)]
            return 200, {"kind": f"{kind}List", "apiVersion": group, "metadata": {}, "items": items}
        return self._one(method, (kind, namespace, rest[1]))

    def _one(self, method: str, key: tuple[str, str, str]) -> tuple[int, Json]:
        if key not in self.objects:
            return _failure(404, f'{key[0]} "{key[2]}" not found', "NotFound")
        return 200, self.objects.pop(key) if method == "DELETE" else self.objects[key]

    def _create(self, group: str, kind: str, namespace: str, body: Json) -> tuple[int, Json]:
        is_namespaced = kind not in _CLUSTER_WIDE
        if is_namespaced and ("Namespace", "", namespace) not in self.objects:
            return _failure(404, f'namespaces "{namespace}" not found', "NotFound")
        assert (body["kind"], body["apiVersion"]) == (kind, group)
        key = (kind, namespace, body["metadata"]["name"])
        if key in self.objects:
            return _failure(409, f"{key[2]} already exists", "AlreadyExists")
        self.objects[key] = body
        return 201, body

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        state = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _serve(self) -> None:
                data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                body = json.loads(data) if data else None
                status, found = state.answer(self.command, urlsplit(self.path).path, body)
                text = json.dumps(found).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def do_GET(self) -> None:
                self._serve()

            def do_POST(self) -> None:
                self._serve()

            def do_DELETE(self) -> None:
                self._serve()

            def log_message(self, format: str, *args: object) -> None:
                pass

        return Handler


def _discovery(parts: list[str]) -> Json | None:
    match parts:
        case ["api"]:
            return {"kind": "APIVersions", "versions": ["v1"]}
        case ["apis"]:
            return {"kind": "APIGroupList", "apiVersion": "v1", "groups": _groups()}
        case ["api", version] | ["apis", _, version]:
            group = version if parts[0] == "api" else f"{parts[1]}/{version}"
            return _resources(group)
        case _:
            return None


def _groups() -> list[Json]:
    found = []
    for name in _KINDS:
        if "/" in name:
            version = {"groupVersion": name, "version": name.partition("/")[2]}
            entry = {"name": name.partition("/")[0], "versions": [version]}
            found.append({**entry, "preferredVersion": version})
    return found


def _resources(group: str) -> Json:
    resources = [
        {
            "name": plural, "singularName": kind.lower(), "kind": kind,
            "namespaced": kind not in _CLUSTER_WIDE,
            "verbs": ["create", "delete", "get", "list", "patch"],
        }
        for plural, kind in _KINDS[group].items()
    ]  # fmt: skip
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": group,
            "resources": resources}  # fmt: skip


def _failure(code: int, message: str, reason: str = "") -> tuple[int, Json]:
    return code, {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code,
                  "message": message, "reason": reason}  # fmt: skip
