"""Lengths of time as people write them."""

import re

_SECONDS = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*(ms|s|m|h)?")
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, None: 1.0}


def seconds(text: str) -> float | None:
    """A time as people write it: `90`, `90s`, `10m`, `2h`; None for anything else."""
    match = _SECONDS.fullmatch(text.strip().lower())
    return float(match[1]) * _UNITS[match[2]] if match else None
