"""A health daemon of a node: `nvhcd.HealthCheckService` on a unix socket, by real gRPC.

`python -m tests.fakes.health_daemon SOCKET [WHEEL]` is such a daemon as a process of its own. Its
answer is the text in `SOCKET.answer`, and it appends the arguments of each request to
`SOCKET.asked`. With WHEEL, an unpacked wheel of NVRx, it serves by the classes that NVRx ships.
"""

import importlib
import json
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

grpc: Any = importlib.import_module("grpc")  # it has no types

METHOD = "/nvhcd.HealthCheckService/RunHealthCheck"
HEALTHY = '{"fail_count": 0}'
Answer = Callable[[list[str], Any], bytes]
"""The bytes of a response, from the arguments of the request and gRPC's context."""


def _varint(number: int) -> bytes:
    head, rest = number & 0x7F, number >> 7
    return bytes([head | 0x80]) + _varint(rest) if rest else bytes([head])


def _text(field: int, value: str) -> bytes:
    data = value.encode()
    return _varint(field << 3 | 2) + _varint(len(data)) + data


def response(*, success: bool, code: int = 0, output: str = "", error: str = "") -> bytes:
    """The bytes of the answer, written by hand: the client's own classes prove nothing."""
    flags = (b"\x08\x01" if success else b"") + b"\x10" + _varint(code)
    return flags + _text(3, output) + _text(4, error)


def arguments(data: bytes) -> list[str]:
    """The strings of field 1; each is shorter than 128 bytes."""
    words = []
    while data:
        assert data[0] == 0x0A
        words.append(data[2 : 2 + data[1]].decode())
        data = data[2 + data[1] :]
    return words


class HealthDaemon:
    """A server that answers with the bytes that a test gives, or by the classes of a wheel."""

    def __init__(self, socket: Path, wheel: str = "") -> None:
        self.socket = socket
        self.requests: list[list[str]] = []
        self.answer: Answer = lambda _, __: response(success=True, output=HEALTHY)
        self.server = grpc.server(ThreadPoolExecutor(2))
        if wheel:
            self._serve_by(wheel)
        else:
            self.server.add_generic_rpc_handlers((self,))
        self.server.add_insecure_port(f"unix:{self.socket}")
        self.server.start()

    def service(self, details: Any) -> Any:
        if details.method != METHOD:
            return None
        return grpc.unary_unary_rpc_method_handler(self._run)

    def _run(self, request: bytes, context: Any) -> bytes:
        words = arguments(request)
        self.requests.append(words)
        return self.answer(words, context)

    def _serve_by(self, wheel: str) -> None:
        sys.path.insert(0, wheel)
        package = "nvidia_resiliency_ext.shared_utils.proto"
        classes = importlib.import_module(f"{package}.nvhcd_pb2")
        service = importlib.import_module(f"{package}.nvhcd_pb2_grpc")
        daemon = self

        class Servicer(service.HealthCheckServiceServicer):  # type: ignore[misc, name-defined]
            def RunHealthCheck(self, request: Any, context: Any) -> Any:  # noqa: N802
                data = daemon.answer(list(request.args), context)
                return classes.HealthCheckResponse.FromString(data)

        service.add_HealthCheckServiceServicer_to_server(Servicer(), self.server)


def main(socket: Path, wheel: str) -> None:
    def answer(words: list[str], _: Any) -> bytes:
        with socket.with_suffix(".asked").open("a") as asked:
            asked.write(f"{json.dumps(words)}\n")
        return response(success=True, output=socket.with_suffix(".answer").read_text())

    daemon = HealthDaemon(socket, wheel)
    daemon.answer = answer
    daemon.server.wait_for_termination()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:3] or [""])
