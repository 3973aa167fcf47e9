"""Sizes and lengths of time, as people read and write them."""

import re


def size(count: int) -> str:
    """Bytes: `812 B`, `4.0 KiB`, `1.5 GiB`."""
    if count < 1024:
        return f"{count} B"
    value, units = count / 1024, ["KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        del units[0]
    return f"{value:.1f} {units[0]}"


_SECONDS = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*(ms|s|m|h)?")
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, None: 1.0}


def seconds(text: str) -> float | None:
    """A time as people write it: `90`, `90s`, `10m`, `2h`; None for anything else."""
    match = _SECONDS.fullmatch(text.strip().lower())
    return float(match[1]) * _UNITS[match[2]] if match else None
