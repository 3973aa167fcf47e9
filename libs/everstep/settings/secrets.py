"""Secrets: read from files, and masked in all text for people."""

from pathlib import Path

from everstep.evidence.files import open_regular
from everstep.settings.schema import SettingsError

MAX_SECRET_BYTES = 64 << 10
_SHORTEST = 6
"""A shorter one would blank ordinary words."""

_known: set[str] = set()


def remember_secret(text: str) -> None:
    """Mask each line of the secret wherever it would be shown, until the process ends."""
    _known.update(line for line in map(str.strip, text.splitlines()) if len(line) >= _SHORTEST)


def known_secrets() -> list[str]:
    """The values to mask, the longest first: one value may be part of another."""
    return sorted(_known.copy(), key=len, reverse=True)


def read_secret(path: Path) -> str:
    """The content of the file of a `*_file` setting, stripped. Never empty, never shown."""
    try:
        with open_regular(path) as file:
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
    """The problem of a secret file that others may read; None if its mode is right."""
    mode = path.stat().st_mode & 0o777
    if mode & 0o077:
        return f"{path} can be read by others (mode {mode:o}): chmod 600 {path}"
    return None
