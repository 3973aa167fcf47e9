"""The messages between the agent and a process in which checks run: lines of JSON."""

from pathlib import Path
from typing import Any

import msgspec

from everstep.messages.facts.health import CheckResult
from everstep_services.agent.probes.settings import ChecksSettings


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """A request to the child: one line."""

    names: tuple[str, ...]
    settings: ChecksSettings
    notes: Path | None
    """The file for notes between looks."""
    until: float
    """When all checks must have ended, by the monotonic clock that both share."""
    root: Path
    own_pids: tuple[int, ...]


class ChildLine(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", omit_defaults=True):
    """A line of the child."""

    check: str = ""


class ProcessReady(ChildLine, frozen=True, kw_only=True, tag="ready"):
    """The process can run checks."""

    cpu_s: float
    """The processor time of its start."""


class CheckBegan(ChildLine, frozen=True, kw_only=True, tag="began"):
    """A check has begun."""


class CheckFound(ChildLine, frozen=True, kw_only=True, tag="found"):
    """A check has a result."""

    result: CheckResult


class CheckEnded(ChildLine, frozen=True, kw_only=True, tag="ended"):
    """A check has finished."""


class ChecksDone(ChildLine, frozen=True, kw_only=True, tag="done"):
    """All checks have finished or are given up, and notes are kept."""

    trouble: str = ""
    """Why notes were lost, if they were."""
    cpu_s: float = 0.0
    """The processor time of these checks, with everything that they have started."""


Line = ProcessReady | CheckBegan | CheckFound | CheckEnded | ChecksDone


def encode(value: Request | Line) -> bytes:
    """As one line."""
    return msgspec.json.encode(value, enc_hook=str) + b"\n"


def decode_request(line: bytes) -> Request:
    """Decode the request."""
    return msgspec.json.decode(line, type=Request, dec_hook=_path)


_LINES: msgspec.json.Decoder[Line] = msgspec.json.Decoder(Line)


def decode_line(line: bytes) -> Line:
    """Decode a line of the child. Raises `msgspec.MsgspecError`."""
    return _LINES.decode(line)


def _path(of: type, value: Any) -> Any:
    return Path(value) if issubclass(of, Path) else value
