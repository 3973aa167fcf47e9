"""Secrets: read from files, and kept out of whatever is written for people."""

from pathlib import Path

from everstep.settings.schema import SettingsError

MAX_SECRET_BYTES = 64 << 10
_SHORTEST = 6
"""A shorter one would blank ordinary words."""

_known: set[str] = set()


def remember_secret(text: str) -> None:
    """Have each of its lines masked wherever it would be shown, for the life of the process."""
    _known.update(line for line in map(str.strip, text.splitlines()) if len(line) >= _SHORTEST)


def known_secrets() -> list[str]:
    """The values to mask, the longest first: one value may be part of another."""
    return sorted(_known.copy(), key=len, reverse=True)


def read_secret(path: Path) -> str:
    """What a `*_file` setting points to, without the space around it. Never empty, never shown."""
    try:
        with path.open("rb") as file:
            text = file.read(MAX_SECRET_BYTES + 1).decode().strip()
    except OSError as error:
        raise SettingsError(f"the secret in {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SettingsError(f"the secret in {path} is not text") from error
    if not text:
        raise SettingsError(f"the secret in {path} is empty")
    if len(text) > MAX_SECRET_BYTES:
        raise SettingsError(f"{path} is larger than {MAX_SECRET_BYTES >> 10} KiB: no secret")
    remember_secret(text)
    return text


def wrong_mode(path: Path) -> str | None:
    """What is wrong with a secret file's mode, if others may read it."""
    mode = path.stat().st_mode & 0o777
    if mode & 0o077:
        return f"{path} can be read by others (mode {mode:o}): chmod 600 {path}"
    return None
