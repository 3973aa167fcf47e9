"""Bytes as people read them."""


def size(count: int) -> str:
    """Bytes: `812 B`, `4.0 KiB`, `1.5 GiB`."""
    if count < 1024:
        return f"{count} B"
    value, units = count / 1024, ["KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        del units[0]
    return f"{value:.1f} {units[0]}"
