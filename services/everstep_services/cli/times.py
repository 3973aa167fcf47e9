"""Times as people write them: a moment, or how long ago or ahead."""

import re
from datetime import UTC, datetime, timedelta

import click

_SPAN = re.compile(r"(\d{1,9})([smhdw])")
_SECONDS = re.compile(r"(\d{1,9}(?:\.\d{1,6})?)([smhdw])")
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}


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
        return int(timedelta(**{_UNITS[match[2]]: int(match[1])}).total_seconds())


def seconds(text: str) -> float | None:
    """A length of time in seconds: 1.5s, 30s, 10m, 2h; None if it is not one."""
    match = _SECONDS.fullmatch(text.strip())
    if match is None:
        return None
    return float(match[1]) * timedelta(**{_UNITS[match[2]]: 1}).total_seconds()


class MomentParameter(click.ParamType[datetime]):
    """A moment: 2026-11-21T08:00:00Z, or how long ago, as in 10m. The value is in UTC."""

    name = "moment"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> datetime:
        if isinstance(value, datetime):
            return value
        text = str(value).strip()
        try:
            if _SPAN.fullmatch(text):
                return datetime.now(UTC) - timedelta(
                    seconds=SpanParameter().convert(text, param, ctx)
                )
            moment = datetime.fromisoformat(text)
        except (ValueError, OverflowError):
            self.fail(
                f"{value!r} is not a moment: write 2026-11-21T08:00:00Z, or 10m for 10 minutes ago",
                param,
                ctx,
            )
        return moment.astimezone(UTC)
