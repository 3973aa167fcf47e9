"""Keep secrets out of everything that is written for people."""

import json
import re

MASK = "***"

_SHORTEST = 6
"""A shorter secret would blank ordinary words."""
_TOKEN = re.compile(r"\bevs_[A-Za-z0-9_-]{4,}")
_BEARER = re.compile(r"(?i)\b(bearer|basic) [A-Za-z0-9._~+/=-]{8,}")
_URL_PASSWORD = re.compile(r"(?i)([a-z][a-z0-9+.-]*://[^\s:/@]*):[^\s/]+@")

_registered: set[str] = set()


def register_secret(value: str) -> None:
    """Have this value replaced wherever it would be shown, for the life of the process."""
    if len(value) >= _SHORTEST:
        _registered.update({value, json.dumps(value)[1:-1], repr(value)[1:-1]})


def redact(text: str) -> str:
    """The text without tokens, passwords in URLs, and whatever was registered."""
    for secret in _registered:
        text = text.replace(secret, MASK)
    text = _TOKEN.sub(f"evs_{MASK}", text)
    text = _BEARER.sub(rf"\g<1> {MASK}", text)
    return _URL_PASSWORD.sub(rf"\g<1>:{MASK}@", text)
