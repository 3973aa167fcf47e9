"""Moments as the tables keep them: microseconds since 1970, in UTC."""

from datetime import UTC, datetime, timedelta

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def to_us(moment: datetime) -> int:
    """Return the exact microseconds; the moment must have a zone."""
    since = moment - _EPOCH
    return (since.days * 86400 + since.seconds) * 1_000_000 + since.microseconds


def from_us(us: int) -> datetime:
    """Return the moment; beyond the calendar, as from a broken clock, the calendar's end."""
    return _EPOCH + timedelta(microseconds=min(max(us, _FIRST_US), _LAST_US))


_FIRST_US = to_us(datetime.min.replace(tzinfo=UTC))
_LAST_US = to_us(datetime.max.replace(tzinfo=UTC))
