"""A command as others may see it: the words that look like secrets are replaced."""

import re
from collections.abc import Iterable, Mapping
from hashlib import sha256

from everstep.observe.redaction import MASK, redact

_NAMES = (
    r"(?:^|[-_.])(?:pass(?:word|wd|phrase)|secret|(?:api|access|private|secret)[-_]?key|"
    r"(?:auth|access|api|bearer|hf|github|wandb|login)?[-_]?token|credentials?)$"
)
_SECRET = re.compile(_NAMES, re.IGNORECASE)
_HARMLESS = re.compile(r"(?:pad|eos|bos|unk|sep|cls|mask|image|special)[-_]token$", re.IGNORECASE)
_TELLING = re.compile(r"(?:NCCL|TORCH|PYTORCH|CUDA|GLOO|OMP|MKL|PYTHON|UCX|HF|TRITON)_")
_OFTEN_DIFFERENT = frozenset({"CUDA_VISIBLE_DEVICES"})


def masked(words: Iterable[str]) -> tuple[str, ...]:
    """The words of a command, with secrets replaced: `--api-key X`, `key=X`, tokens, URLs."""
    shown: list[str] = []
    hide = False
    for word in words:
        name, equals, value = word.partition("=")
        if hide and not word.startswith("--"):
            shown.append(MASK)
        elif equals and value and _names_a_secret(name):
            shown.append(f"{name}={MASK}")
        else:
            shown.append(redact(word))
        hide = not equals and word.startswith("-") and _names_a_secret(word)
    return tuple(shown)


def fingerprint(command: Iterable[str], settings: Iterable[str], environ: Mapping[str, str]) -> str:
    """A hash that tells two attempts apart: command, settings, and what steers the libraries.

    Nothing in it differs from node to node, and no secret goes into it.
    """
    telling = sorted(
        f"{name}={value}"
        for name, value in environ.items()
        if _TELLING.match(name) and name not in _OFTEN_DIFFERENT and not _names_a_secret(name)
    )
    digest = sha256()
    for part in (*command, "", *settings, "", *telling):
        digest.update(part.encode("utf-8", "surrogateescape") + b"\0")
    return digest.hexdigest()[:16]


def _names_a_secret(name: str) -> bool:
    return bool(_SECRET.search(name)) and not _HARMLESS.search(name)
