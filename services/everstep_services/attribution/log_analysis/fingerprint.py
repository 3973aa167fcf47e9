"""A failure's name: equal for the same failure of another run, rank or node."""

import re

_VOLATILE = (
    ("-", re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?"), ""),
    (":", re.compile(r"\b\d\d:\d\d:\d\d(?:[.,]\d+)?\b"), ""),
    ("0x", re.compile(r"\b0x[0-9a-fA-F]+\b"), ""),
    ("-", re.compile(r"\b[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}\b"), ""),
    ("", re.compile(r"\b(?=[0-9a-f]*[a-f])(?=[0-9a-f]*\d)[0-9a-f]{8,}\b"), ""),
    (".", re.compile(r"\[?\b\d{1,3}(?:\.\d{1,3}){3}\]?(?::\d+)?(?:<\d+>)?"), ""),
    (
        "",
        re.compile(
            r"(?i)\b(?:pid|tid|rank|local_rank|gpu|device|node|iteration|iter|step|epoch|attempt"
            r"|line|size|host)s?\s*[=:#]?\s*\d+\b"
        ),
        "",
    ),
    (
        "",
        re.compile(
            r"(?i)\b\d+(?:\.\d+)?\s?(?:[kmgt]i?b|bytes?|b|ms|us|ns|s|sec|seconds|minutes)\b"
        ),
        "",
    ),
    ("", re.compile(r"(?<![A-Za-z_\d])[-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?(?![A-Za-z_])"), "n"),
)
"""What each pattern needs: a look for it is cheaper."""
_DIGIT = re.compile(r"\d")
_SPACE = re.compile(r"\s+")
_MOST = 200


def normalised(text: str) -> str:
    """The text without times, addresses, ranks, sizes; a free number is `n`."""
    if _DIGIT.search(text):
        for part, pattern, instead in _VOLATILE:
            if part in text:
                text = pattern.sub(instead, text)
    return _SPACE.sub(" ", text).strip()[:_MOST]


def of_rule(failure_class: str, component: str) -> str:
    """The fingerprint of a line that a rule knows."""
    return f"{failure_class}:{component}"


def of_exception(kind: str, function: str, message: str) -> str:
    """The fingerprint of a Python exception, by its type, place and text."""
    return of_normalised(kind.rpartition(".")[2], function, normalised(message))


def of_normalised(kind: str, function: str, text: str) -> str:
    """The same, by the text without numbers."""
    return f"observed:{kind}:{function}:{text}"
