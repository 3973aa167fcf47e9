"""A hash that tells two attempts of a job apart."""

import re
from collections.abc import Iterable, Mapping
from hashlib import sha256

from everstep.observe.redaction import names_a_secret

_TELLING = re.compile(r"(?:NCCL|TORCH|PYTORCH|CUDA|GLOO|OMP|MKL|PYTHON|UCX|HF|TRITON)_")
_OFTEN_DIFFERENT = frozenset({"CUDA_VISIBLE_DEVICES"})


def fingerprint(command: Iterable[str], settings: Iterable[str], environ: Mapping[str, str]) -> str:
    """A hash that tells two attempts apart: command, settings, and what steers the libraries.

    Nothing in it differs from node to node, and no secret goes into it.
    """
    telling = sorted(
        f"{name}={value}"
        for name, value in environ.items()
        if _TELLING.match(name) and name not in _OFTEN_DIFFERENT and not names_a_secret(name)
    )
    digest = sha256()
    for part in (*command, "", *settings, "", *telling):
        digest.update(part.encode("utf-8", "surrogateescape") + b"\0")
    return digest.hexdigest()[:16]
