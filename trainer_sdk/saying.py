"""What a training is told of its own calls: a line on stderr, and each only once."""

import sys

_MOST = 64
_LONGEST = 200

_said: set[str] = set()


def say_once(text: str) -> None:
    """Write the line if it was not written before; where it cannot be, nothing happens."""
    if text in _said or len(_said) >= _MOST:
        return
    _said.add(text)
    try:
        sys.stderr.write(f"everstep: {text}\n")
    except (OSError, ValueError, AttributeError):
        return  # closed, or there is none


def quoted(said: object) -> str:
    """As JSON, shortened; whatever it is."""
    from json import dumps  # only what is rare is said so

    try:
        return dumps(str(said)[:_LONGEST])
    except Exception:  # noqa: BLE001 - a `__str__` of the script's own
        return f'"{type(said).__name__}"'
