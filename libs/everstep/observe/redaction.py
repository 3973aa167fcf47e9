"""Keep secrets out of everything that is written for people, or leaves a service."""

import json
import re
from collections.abc import Iterable

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
_ALWAYS_MASKED = (
    r"(?:api|access|secret|private|signing)[_-]?key|secret|passw(?:or)?d|passphrase|auth_?token"
)
"""Names whose value is a secret whatever it is; with `_SECRET_NAME` the only table of names."""
_SECRET_NAME = re.compile(
    rf"(?i)(?:^|[-_.])(?:{_ALWAYS_MASKED}|"
    r"(?:auth|access|api|bearer|hf|github|wandb|login)?[-_]?token|credentials?)$"
)
_HARMLESS_NAME = re.compile(
    r"(?i)(?:pad|eos|bos|unk|sep|cls|mask|special|start|end|stop|next|prev|previous|first|last|new"
    r"|text|image|audio|video|prompt|input|output|label|target|word|bad|unexpected)[-_]token$"
)
"""Names of tokenizers and parsers, not of logins."""
_NAMED = re.compile(rf"(?i)((?:{_ALWAYS_MASKED})[\"']?\s?[=:]\s?[\"']?)[^\s\"',;&]{{4,}}")
_NAMED_TOKEN = re.compile(
    r"(?i)(token(?P<quote>[\"']?)\s?(?P<sign>[=:])\s?[\"']?)"
    r"(?!(?:[\d.,+-]+|0x[0-9a-f]+|none|null|true|false)(?![\w/+-]))"
    r"(?P<value>[^\s\"',;&<>(){}\[\]*]{4,})"
)
_LONG_TOKEN = 16
"""A value of this length is not a word."""
_NAME_BEFORE = re.compile(r"[\w.-]{0,64}\Z")
_OPTION_VALUE = re.compile(
    r"(?<![\w-])(?P<head>(?P<option>--[A-Za-z][\w.-]{0,63})(?:[\"'],\s?[\"']|[ \t]{1,4}[\"']?))"
    r"(?![\d.,+-]+(?:[\s\"',]|\Z))(?P<value>[^\s\"',;*-][^\s\"',;]{3,})"
)
"""An option of a command line and its value, also as the list of words that Python prints."""
_TOKEN_VALUE = re.compile(r"(?i)(token[\"']?\s?[=:]\s?[\"']?)(?=[\w.+/-]{0,64}[a-z])[\w.+/-]{16,}")
_PRIVATE_KEY = re.compile(
    r"(-----BEGIN [A-Z ]*(?:PRIVATE KEY|SEED|JWT)-----).*?(?:-{3,}END [A-Z ]*-{3,}|\Z)", re.DOTALL
)
_JWT = re.compile(r"\beyJ[A-Za-z0-9_-]{8,1024}\.[A-Za-z0-9_-]{8,4096}\.[A-Za-z0-9_-]{0,1024}")
_URL_USER = re.compile(
    r"(?i)([a-z][a-z0-9+.-]{0,20}://)(?=[^\s:/@]{0,64}[0-9])[^\s:/@\"']{20,256}@"
)
"""A token in place of a user's name."""
_CUT_PASSWORD = re.compile(
    r"(?i)([a-z][a-z0-9+.-]{0,20}://[^\s:/@\[]{1,256}):(?!(?:[0-9]{1,5}\b|PORT\Z))"
    r"[^\s:/@\"'*]{4,1024}(?=…?\Z)"
)
"""A password in a URL that was cut off before its `@`."""
_QUERY = re.compile(
    r"(?i)([?&;](?:sig|x-(?:amz|goog)-(?:signature|credential|security-token)|signature|pwd|"
    r"(?:access_|auth_|id_|refresh_)?token)=)[^\s&\"'<>#*]{4,4096}"
)
"""Signatures and tokens in the query of a URL."""
_OPTION = re.compile(r"[\w.+~-]{1,256}")
_LITERAL = re.compile(r'"([^"\\]*(?:\\.[^"\\]*)*)"(\s*:)?', re.DOTALL)
_IDENTIFIERS = frozenset({"job", "node", "incident", "id", "next"})
"""Fields of JSON that name things: they are parts of links and cursors, and are never masked."""
_HINTS = (
    "evs_", "bearer ", "basic ", "://", "hf_", "gho_", "ghp_", "ghs_", "ghu_", "github_pat_",
    "glpat-", "xox", "sk-", "akia", "asia", "key", "secret", "passw", "passphrase", "token",
    "-----begin", "eyj", "credential", "sig=", "signature=", "pwd=", "\\u",
)  # fmt: skip
"""Without one of these in lower case there is nothing to mask, whatever else a text holds."""
_SEED_HINTS = ("SU", "SA", "SO", "SX", "SC")


def redact(text: str) -> str:
    """The text without anything that looks like a token, a password or a private key.

    Whatever this process has read as a secret is masked, too.
    """
    for secret in known_secrets():
        as_json = json.dumps(secret, ensure_ascii=False)
        for form in {secret, as_json[1:-1], repr(secret)[1:-1]}:
            text = text.replace(form, MASK)
    if not _has_a_hint(text):
        return text
    text = _TOKEN.sub(f"evs_{MASK}", text)
    text = _ISSUED.sub(MASK, text)
    text = _PRIVATE_KEY.sub(rf"\g<1> {MASK}", text)
    text = _JWT.sub(MASK, text)
    text = _QUERY.sub(rf"\g<1>{MASK}", text)
    text = _NAMED.sub(rf"\g<1>{MASK}", text)
    text = _NAMED_TOKEN.sub(_masked_token, text)
    text = _OPTION_VALUE.sub(_masked_option, text)
    text = _TOKEN_VALUE.sub(rf"\g<1>{MASK}", text)
    text = _BEARER.sub(rf"\g<1> {MASK}", text)
    text = _URL_USER.sub(rf"\g<1>{MASK}@", text)
    text = _CUT_PASSWORD.sub(rf"\g<1>:{MASK}", text)
    return _URL_PASSWORD.sub(rf"\g<1>:{MASK}@", text)


def _has_a_hint(text: str) -> bool:
    lower = text.lower()
    return any(hint in lower for hint in _HINTS) or any(hint in text for hint in _SEED_HINTS)


def _masked_token(match: re.Match[str]) -> str:
    """The value of a name that ends in `token`, masked if it is a login's.

    Tokenizers and parsers report words as `token: 'hello'`: after the bare word and a colon, only
    a value with a digit or a long one is a secret.
    """
    begin = _NAME_BEFORE.search(match.string, max(0, match.start() - 64), match.start())
    name = (begin[0] if begin else "") + "token"
    if not names_a_secret(name):
        return match[0]
    value = match["value"]
    is_bare = name.lower() == "token" and match["sign"] == ":" and not match["quote"]
    if is_bare and len(value) < _LONG_TOKEN and not any(map(str.isdigit, value)):
        return match[0]
    return f"{match[1]}{MASK}"


def _masked_option(match: re.Match[str]) -> str:
    return f"{match['head']}{MASK}" if names_a_secret(match["option"]) else match[0]


def names_a_secret(name: str) -> bool:
    """Whether the value of an option, a variable or a field of this name is a secret."""
    return bool(_SECRET_NAME.search(name)) and not _HARMLESS_NAME.search(name)


def redact_words(words: Iterable[str]) -> tuple[str, ...]:
    """The words of a command, with secrets replaced: `--api-key X`, `key=X`, tokens, URLs."""
    shown: list[str] = []
    is_value = False
    for word in words:
        name, equals, value = word.partition("=")
        if is_value and not word.startswith("--"):
            shown.append(MASK)
        elif equals and value and _OPTION.fullmatch(name) and names_a_secret(name):
            shown.append(f"{name}={MASK}")
        else:
            shown.append(redact(word))
        is_value = _is_secret_option(word)
    return tuple(shown)


def redact_json(text: str) -> str:
    """The same JSON with its strings redacted; all other characters stay as they are.

    The value of a field with the name of a secret is masked whole, and so is the string after an
    option such as `--password` in a list.
    """
    if not _has_a_hint(text) and not any(secret in text for secret in known_secrets()):
        return text
    return _LITERAL.sub(_Strings(), text)


class _Strings:
    """Redacts the strings of one JSON text in their order."""

    def __init__(self) -> None:
        self._field = ""
        self._option = False
        self._end = -1
        """Where the string before ended."""

    def __call__(self, match: re.Match[str]) -> str:
        raw, is_field = match[1], match[2] is not None
        value = _unescaped(raw)
        between = match.string[self._end : match.start()].strip() if self._end >= 0 else "["
        safe = value
        if is_field:
            safe, self._field = redact(value), value
            self._option = False
        else:
            name = "" if between else self._field
            is_value = self._option and between == "," and not value.startswith("--")
            if value and (is_value or names_a_secret(name)):
                safe = MASK
            elif name not in _IDENTIFIERS:
                safe = redact_words((value,))[0] if "=" in value else redact(value)
            self._field, self._option = "", _is_secret_option(value)
        self._end = match.end()
        if safe == value:
            return match[0]
        return json.dumps(safe) + (match[2] or "")


def _is_secret_option(word: str) -> bool:
    return word.startswith("-") and "=" not in word and names_a_secret(word)


def _unescaped(raw: str) -> str:
    if "\\" not in raw:
        return raw
    try:
        return str(json.loads(f'"{raw}"', strict=False))
    except ValueError:
        return raw
