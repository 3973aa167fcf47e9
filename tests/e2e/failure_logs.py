"""The logs of processes in the report of a test that failed: often nobody sees more of it."""

import os
import subprocess
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

ENDINGS = (".log", ".out", ".err")
_NAMES = ("stdout", "stderr", "log")
"""Of ranks, and of PostgreSQL."""
LINES_MOST = 60
_BYTES_MOST = 32 * 1024
_LOGS_MOST = 40
"""The newest ones."""
_shared: dict[str, Path] = {}


@contextmanager
def shared(fixture: str, folder: Path) -> Iterator[None]:
    """Meanwhile the reports of tests that use this fixture have the logs of its folder."""
    _shared[fixture] = folder
    yield
    del _shared[fixture]  # not after an exception: the logs tell why the fixture has failed


def ends(own: Path | None, fixtures: Collection[str]) -> list[tuple[str, str]]:
    """The path and the last lines of each log in a test's own folder, and in its fixtures'."""
    folders = [folder for fixture, folder in _shared.items() if fixture in fixtures]
    folders += [] if own is None else [own]
    return [(f"end of {path}", text) for folder in folders for path, text in _ends(folder)]


def output(error: BaseException) -> list[tuple[str, str]]:
    """What a program said that has failed, or was too slow: its error does not tell."""
    if not isinstance(error, subprocess.CalledProcessError | subprocess.TimeoutExpired):
        return []
    streams = {"stdout": error.stdout, "stderr": error.stderr}
    return [(f"end of its {name}", _last_lines(text)) for name, text in streams.items() if text]


def _ends(folder: Path) -> list[tuple[Path, str]]:
    found = []
    for parent, _, names in os.walk(folder):
        for name in names:
            if name.endswith(ENDINGS) or name in _NAMES:
                with suppress(OSError):  # it has just been removed
                    path = Path(parent, name)
                    found.append((path.stat().st_mtime, path.relative_to(folder), _end(path)))
    newest = sorted(log for log in found if log[2])[-_LOGS_MOST:]
    return sorted((path, text) for _, path, text in newest)


def _end(path: Path) -> str:
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        file.seek(max(path.stat().st_size - _BYTES_MOST, 0))
        return _last_lines(file.read(_BYTES_MOST))


def _last_lines(text: str | bytes) -> str:
    whole = text if isinstance(text, str) else text.decode(errors="replace")
    return "\n".join(whole.splitlines()[-LINES_MOST:])
