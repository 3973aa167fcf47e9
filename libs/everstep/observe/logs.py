"""Logs: one event a line, as columns on a terminal and as JSON for programs."""

import logging
import re
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TextIO

import msgspec

from everstep.observe.printable import printable
from everstep.observe.redaction import redact
from everstep.observe.settings import LogSettings

_CONVERSION = re.compile(r"%(?:\((?P<name>[^)]*)\))?[#0\- +]*(?:\d+|\*)?(?:\.\d+|\.\*)?[a-zA-Z%]")
_PAIR = re.compile(r"(?P<key>[A-Za-z_][A-Za-z0-9_.]*)=(?P<value>\S+)")
_EVENT = re.compile(r"[a-z][a-z0-9_]*\Z")
_RESERVED = frozenset({"at", "level", "service", "event", "text", "exception"})
_LONGEST_VALUE = 8192
_COLORS = {"DEBUG": "2", "WARNING": "33", "ERROR": "31", "CRITICAL": "1;31"}
_CONTROL = {code: f"\\x{code:02x}" for code in (*range(32), 127) if code != ord("\t")}
_CONTROL |= {ord("\n"): "\\n", ord("\r"): "\\r"}
_QUIET = (
    "alembic",
    "uvicorn",
    "uvicorn.error",
    "httpx2",
    "httpcore2",
    "asyncio",
    "nats",
    "aiosqlite",
)
"""Libraries that report what our own events already say."""


def configure(
    settings: LogSettings, service: str, *, environ: Mapping[str, str], stream: TextIO | None = None
) -> None:
    """Send every log record of the process to stderr, or `stream`, once, without secrets."""
    stream = sys.stderr if stream is None else stream
    on_terminal = stream.isatty()
    formatter: logging.Formatter
    if settings.format == "json" or (settings.format == "auto" and not on_terminal):
        formatter = JsonFormatter(service)
    else:
        formatter = ConsoleFormatter(service, color=on_terminal and not environ.get("NO_COLOR"))
    handler = logging.StreamHandler(stream)
    handler.setFormatter(formatter)
    logging.basicConfig(level=settings.level.upper(), handlers=[handler], force=True)
    for name in _QUIET:
        logging.getLogger(name).setLevel(max(logging.WARNING, logging.root.level))


class JsonFormatter(logging.Formatter):
    """One JSON object a line.

    `log.info("round_formed round=%d", 3)` is written with `"event": "round_formed"` and
    `"round": 3`: the keys come from the template, and the values keep their types. What does
    not have that form is written as `"event": "log"` with its text.
    """

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "at": _instant(record).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "service": service_of(record, self._service),
        }
        line |= fields(record)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return redact(msgspec.json.encode(line, enc_hook=_plain).decode())


class ConsoleFormatter(logging.Formatter):
    """Time, level, service and event in columns; a traceback below."""

    def __init__(self, service: str, *, color: bool) -> None:
        super().__init__()
        self._service = service
        self._color = color

    def format(self, record: logging.LogRecord) -> str:
        event, _, rest = printable(record.getMessage().translate(_CONTROL)).partition(" ")
        level = f"{record.levelname.lower():<7}"
        if self._color and record.levelname in _COLORS:
            level = f"\x1b[{_COLORS[record.levelname]}m{level}\x1b[0m"
        at = _instant(record).astimezone().strftime("%H:%M:%S.%f")[:-3]
        service = service_of(record, self._service)
        line = f"{at}  {level}  {service:<10}  {event:<22} {rest}".rstrip()
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return redact(line)


def service_of(record: logging.LogRecord, default: str) -> str:
    """The service that a record belongs to: one process may run several."""
    package, _, rest = record.name.partition(".")
    return rest.partition(".")[0] if package == "everstep_services" and rest else default


def fields(record: logging.LogRecord) -> dict[str, object]:
    """The event's name and values of a record, or its text when it has no such form."""
    event, _, rest = str(record.msg).partition(" ")
    args = list(record.args) if isinstance(record.args, tuple) else []
    if event.count("%s") == 1 and args:  # `stream_%s name=%s`
        event = event.replace("%s", str(args.pop(0)))
    values = _values(rest, args)
    if values is None or not _EVENT.match(event):
        return {"event": "log", "text": _short(_text(record))}
    entry: dict[str, object] = {"event": event}
    for key, value in values.items():
        entry[f"{key}_" if key in _RESERVED else key] = _short(value)
    return entry


def _values(template: str, given: list[object]) -> dict[str, object] | None:
    """The keys of the `key=%x` pairs of a template; None when it holds anything else."""
    values: dict[str, object] = {}
    for pair in _PAIR.finditer(template):
        written = pair["value"]
        conversion = _CONVERSION.fullmatch(written)
        if conversion is None and "%" not in written:
            values[pair["key"]] = written
        elif conversion is None or not given or "*" in written or conversion["name"]:
            return None
        else:
            values[pair["key"]] = given.pop(0)
    return None if given or _PAIR.sub("", template).strip() else values


def _text(record: logging.LogRecord) -> str:
    try:
        return record.getMessage()
    except (TypeError, ValueError):  # the arguments do not fit; better unformatted than lost
        return f"{record.msg} {record.args!r}"


def _plain(value: object) -> str:
    return str(value)


def _short(value: object) -> object:
    """A value as it is written: long text is cut, values that JSON lacks become text."""
    if value is None or isinstance(value, bool | int | float):
        return value
    text = value if isinstance(value, str) else str(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}…"


def _instant(record: logging.LogRecord) -> datetime:
    return datetime.fromtimestamp(record.created, UTC)
