"""Keep secrets out of everything that is written for people."""

import json
import re

from everstep.settings import known_secrets

MASK = "***"

_TOKEN = re.compile(r"\bevs_[A-Za-z0-9_-]{4,}")
_BEARER = re.compile(r"(?i)\b(bearer|basic) [A-Za-z0-9._~+/=-]{8,}")
_URL_PASSWORD = re.compile(r"(?i)([a-z][a-z0-9+.-]*://[^\s:/@]*):[^\s/]+@")


def redact(text: str) -> str:
    """The text without tokens, passwords in URLs, and whatever was read as a secret."""
    for secret in known_secrets():
        as_json = json.dumps(secret, ensure_ascii=False)
        for form in {secret, as_json[1:-1], repr(secret)[1:-1]}:
            text = text.replace(form, MASK)
    text = _TOKEN.sub(f"evs_{MASK}", text)
    text = _BEARER.sub(rf"\g<1> {MASK}", text)
    return _URL_PASSWORD.sub(rf"\g<1>:{MASK}@", text)
