"""Moments as the tables keep them: microseconds since 1970, in UTC."""

from datetime import UTC, datetime, timedelta

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_FIRST_US = (datetime.min.replace(tzinfo=UTC) - _EPOCH) // _MICROSECOND
_LAST_US = (datetime.max.replace(tzinfo=UTC) - _EPOCH) // _MICROSECOND


def to_us(moment: datetime) -> int:
    """Exact; the moment must have a zone."""
    return (moment - _EPOCH) // _MICROSECOND


def from_us(us: int) -> datetime:
    """Moments beyond the calendar, as an hour from a broken clock may be, become its end."""
    return _EPOCH + timedelta(microseconds=min(max(us, _FIRST_US), _LAST_US))
