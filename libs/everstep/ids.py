"""Names and ids: which are allowed, and how new ones are made."""

import hashlib
import os
import re
import time

from everstep.errors import EverstepError

_LONGEST = 128
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}")


class BadNameError(EverstepError):
    """A job or node has a name that cannot be part of a subject, a path or a URL."""

    def __init__(self, kind: str, name: str) -> None:
        super().__init__(
            f"{name!r} cannot name a {kind}: use 1 to 128 letters, digits, '_' and '-', "
            f"the first a letter or digit"
        )
        self.name = name


def checked_name(kind: str, name: str) -> str:
    """The name itself, when it is safe in a subject, a file name and a URL."""
    if not _NAME.fullmatch(name):
        raise BadNameError(kind, name)
    return name


def name_of_host(host: str) -> str:
    """The node id of a host or node of a scheduler: `-` for characters that an id must not have.

    Names that are too long end with their hash, so that they stay different.
    """
    safe = re.sub(r"[^A-Za-z0-9_-]+", "-", host).strip("-_") or "node"
    if len(safe) <= _LONGEST:
        return safe
    digest = hashlib.blake2b(host.encode(), digest_size=6).hexdigest()
    return f"{safe[: _LONGEST - len(digest) - 1]}-{digest}"


def new_id() -> str:
    """32 hex digits that sort by the time they were made, to the millisecond."""
    return f"{time.time_ns() // 1_000_000:012x}{os.urandom(10).hex()}"


def id_from(*parts: str, key: bytes = b"") -> str:
    """32 hex digits that depend on the parts and the key only: every replica makes the same id.

    Ids of facts need a key that only services have: see `everstep.bus.derived_ids`.
    """
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=16, key=key).hexdigest()
