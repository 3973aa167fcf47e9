"""Keep secrets out of everything that is written for people."""

import json
import re

from everstep.settings import known_secrets

MASK = "***"

# Ranks print lines of any length: each pattern looks at each character a bounded number of times.
_TOKEN = re.compile(r"\bevs_[A-Za-z0-9_-]{4,}")
_BEARER = re.compile(r"(?i)\b(bearer|basic) [A-Za-z0-9._~+/=-]{8,}")
_URL_PASSWORD = re.compile(r"(?i)([a-z][a-z0-9+.-]{0,20}://[^\s:/@]{0,256}):[^\s/]{1,1024}@")
_ISSUED = re.compile(
    r"\b(?:hf_|gh[opsu]_|github_pat_|glpat-|xox[abprs]-|sk-|S[UAOXC](?=[A-Z2-7]{56}\b)|AKIA|ASIA)"
    r"[A-Za-z0-9_-]{12,}"
)
"""Tokens whose first letters show their issuer."""
_NAMED = re.compile(
    r"(?i)((?:api[_-]?key|access[_-]?key|secret|passw(?:or)?d|auth_?token)[\"']?\s?[=:]\s?[\"']?)[^\s\"',;&]{4,}"
)
_TOKEN_VALUE = re.compile(r"(?i)(token[\"']?\s?[=:]\s?[\"']?)(?=[\w.+/-]{0,64}[a-z])[\w.+/-]{16,}")
_PRIVATE_KEY = re.compile(
    r"(-----BEGIN [A-Z ]*(?:PRIVATE KEY|SEED|JWT)-----).*?(?:-{3,}END [A-Z ]*-{3,}|\Z)", re.DOTALL
)


def redact(text: str) -> str:
    """The text without anything that looks like a token, a password or a private key.

    Whatever this process has read as a secret is masked, too.
    """
    for secret in known_secrets():
        as_json = json.dumps(secret, ensure_ascii=False)
        for form in {secret, as_json[1:-1], repr(secret)[1:-1]}:
            text = text.replace(form, MASK)
    text = _TOKEN.sub(f"evs_{MASK}", text)
    text = _ISSUED.sub(MASK, text)
    text = _PRIVATE_KEY.sub(rf"\g<1> {MASK}", text)
    text = _NAMED.sub(rf"\g<1>{MASK}", text)
    text = _TOKEN_VALUE.sub(rf"\g<1>{MASK}", text)
    text = _BEARER.sub(rf"\g<1> {MASK}", text)
    return _URL_PASSWORD.sub(rf"\g<1>:{MASK}@", text)
