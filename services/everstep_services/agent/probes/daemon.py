"""Check `daemon`: what a health daemon of this node answers, by gRPC over a unix socket.

The service is the one that NVRx asks: `nvhcd.HealthCheckService.RunHealthCheck`.
"""

import functools
import importlib
import json
from collections.abc import Iterator
from typing import Any

from everstep.messages import CheckResult
from everstep_services.agent.probes.base import CheckState, FailureClass, Look

_METHOD = "/nvhcd.HealthCheckService/RunHealthCheck"
_NAME = "daemon"
_FAIL_COUNT = "fail_count"
_SHOWN_MOST = 300
_RECEIVED_MOST = 4 << 20
_MARGIN_S = 0.3


class DaemonProbe:
    """Asks the daemon to run its checks; without a socket in the settings there is no daemon."""

    name = _NAME
    about = "a health daemon of this node, by gRPC over a unix socket"
    beside_training = True

    def examine(self, look: Look) -> Iterator[CheckResult]:
        """One result, whatever the daemon does."""
        settings = look.settings
        if settings.daemon is None:
            yield _result("unsupported", "no socket is set: daemon under [checks]")
            return
        try:
            grpc = importlib.import_module("grpc")
            _messages()
        except ImportError:
            yield _result("unknown", "grpcio is not installed: pip install 'everstep[daemon]'")
            return
        target = str(settings.daemon)
        if not look.path(target).exists():
            yield _without_answer(look, f"{target} does not exist; does the daemon run?")
            return
        try:
            answer = _ask(grpc, str(look.path(target)), look)
        except grpc.RpcError as error:
            yield _without_answer(look, f"{target}: {_described(error)}")
            return
        yield _judged(look, answer)


def _ask(grpc: Any, path: str, look: Look) -> Any:
    request, response = _messages()
    options = [("grpc.max_receive_message_length", _RECEIVED_MOST), ("grpc.enable_http_proxy", 0)]
    with grpc.insecure_channel(f"unix:{path}", options=options) as channel:
        call = channel.unary_unary(
            _METHOD,
            request_serializer=request.SerializeToString,
            response_deserializer=response.FromString,
        )
        within_s = max(look.within_s - _MARGIN_S, _MARGIN_S)
        return call(request(args=list(look.settings.daemon_arguments)), timeout=within_s)


def _judged(look: Look, answer: Any) -> CheckResult:
    """The node has failed if the run had no success, or if the daemon counts failures."""
    if not answer.success:
        why = answer.error or answer.output or f"exit code {answer.exit_code}"
        return _result("failed", _short(why), "drain")
    try:
        counted = json.loads(answer.output)[_FAIL_COUNT]
    except (ValueError, KeyError, TypeError, RecursionError):
        return _without_answer(look, f"its output has no {_FAIL_COUNT}: {_short(answer.output)!r}")
    if not isinstance(counted, int) or isinstance(counted, bool) or counted < 0:
        return _without_answer(look, f"its {_FAIL_COUNT} is {_short(repr(counted))}")
    if counted:
        return _result("failed", f"{counted} of its checks fail: {_short(answer.output)}", "drain")
    return _result("ok")


def _without_answer(look: Look, reason: str) -> CheckResult:
    """The settings decide what a daemon without a clear answer means."""
    state = look.settings.daemon_silent
    return _result(state, reason if state != "ok" else f"counted as ok: {reason}", "report")


def _result(state: CheckState, reason: str = "", failure_class: FailureClass = "") -> CheckResult:
    return CheckResult(
        check=_NAME,
        state=state,
        reason=reason,
        failure_class=failure_class if state in {"failed", "warning"} else "",
    )


def _described(error: Any) -> str:
    code, details = getattr(error, "code", None), getattr(error, "details", None)
    name = code().name if callable(code) else type(error).__name__
    return f"{name}: {_short(details() or '')}" if callable(details) else name


def _short(text: str) -> str:
    return " ".join(text.split())[:_SHOWN_MOST]


@functools.cache
def _messages() -> tuple[Any, Any]:
    """The classes of the request and the response. Raises ImportError without protobuf."""
    descriptors = importlib.import_module("google.protobuf.descriptor_pb2")
    pools = importlib.import_module("google.protobuf.descriptor_pool")
    factory = importlib.import_module("google.protobuf.message_factory")
    field = descriptors.FieldDescriptorProto
    file = descriptors.FileDescriptorProto(name="nvhcd.proto", package="nvhcd", syntax="proto3")
    layouts = {
        "HealthCheckRequest": [("args", 1, field.TYPE_STRING, field.LABEL_REPEATED)],
        "HealthCheckResponse": [
            ("success", 1, field.TYPE_BOOL, field.LABEL_OPTIONAL),
            ("exit_code", 2, field.TYPE_INT32, field.LABEL_OPTIONAL),
            ("output", 3, field.TYPE_STRING, field.LABEL_OPTIONAL),
            ("error", 4, field.TYPE_STRING, field.LABEL_OPTIONAL),
        ],
    }
    for message, fields in layouts.items():
        described = file.message_type.add(name=message)
        for name, number, kind, label in fields:
            described.field.add(name=name, number=number, type=kind, label=label)
    pool = pools.DescriptorPool()
    pool.Add(file)
    request, response = (
        factory.GetMessageClass(pool.FindMessageTypeByName(f"nvhcd.{message}"))
        for message in layouts
    )
    return request, response
