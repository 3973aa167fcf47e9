"""Times as people write them: a moment, or how long ago or ahead."""

import re
from datetime import MAXYEAR, MINYEAR, UTC, datetime, timedelta

import click

_SPAN = re.compile(r"(\d{1,9})([smhdw])")
_SECONDS = re.compile(r"(\d{1,9}(?:\.\d{1,6})?)([smhdw])")
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


class SpanParameter(click.ParamType[int]):
    """A length of time: 90s, 10m, 2h, 7d, 1w. The value is in seconds."""

    name = "span"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> int:
        if isinstance(value, int):
            return value
        match = _SPAN.fullmatch(str(value).strip())
        if not match or int(match[1]) == 0:
            self.fail(
                f"{value!r} is not a length of time: write 90s, 10m, 2h, 7d or 1w", param, ctx
            )
        return int(match[1]) * _UNITS_S[match[2]]


def seconds(text: str) -> float | None:
    """A length of time in seconds: 1.5s, 30s, 10m, 2h; None if it is not one."""
    match = _SECONDS.fullmatch(text.strip())
    if match is None:
        return None
    return float(match[1]) * _UNITS_S[match[2]]


class SecondsParameter(click.ParamType[float]):
    """A length of time that may have a fraction: 0.5s, 10m, 264d. The value is in seconds."""

    name = "span"

    def __init__(self, *, above_zero: bool = False) -> None:
        self._above_zero = above_zero

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        length_s = value if isinstance(value, float) else seconds(str(value))
        if length_s is None:
            self.fail(f"{value!r} is not a length of time: write 0.5s, 10m, 2h or 7d", param, ctx)
        if self._above_zero and not length_s:
            self.fail(f"{value!r} must be above 0", param, ctx)
        return length_s


class MomentParameter(click.ParamType[datetime]):
    """A moment: 2026-11-21T08:00:00Z, or how long ago, as in 10m. The value is in UTC."""

    name = "moment"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> datetime:
        if isinstance(value, datetime):
            return value
        text = str(value).strip()
        moment = _moment(text)
        if moment is None or not MINYEAR < moment.year < MAXYEAR:
            self.fail(
                f"{value!r} is not a moment: write 2026-11-21T08:00:00Z, or 10m for 10 minutes ago",
                param,
                ctx,
            )
        return moment.astimezone(UTC)


def _moment(text: str) -> datetime | None:
    try:
        if _SPAN.fullmatch(text):
            ago_s = SpanParameter().convert(text, None, None)
            return datetime.now(UTC) - timedelta(seconds=ago_s)
        return datetime.fromisoformat(text)
    except (ValueError, OverflowError):
        return None
