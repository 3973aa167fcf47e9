"""The notes of checks: one file for each node, replaced as a whole."""

import contextlib
import os
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

Notes = dict[str, dict[str, Any]]
"""For each check, what it wants to find at the next look."""

_MOST_BYTES = 4 << 20


class NotesLostError(Exception):
    """The notes cannot be read or kept: checks begin anew. The text says why."""


def place(state_dir: Path, node: str) -> Path:
    """The file for the notes of a node: other nodes may share the state directory."""
    return state_dir / "checks" / f"{node}.json"


def place_of_probes(state_dir: Path, node: str) -> Path:
    """The file for the notes of probes: their looks are closer than those of examinations."""
    return state_dir / "checks" / f"{node}.probes.json"


def read(path: Path) -> Notes:
    """The notes of all checks, none if there are none yet. Raises `NotesLostError`."""
    try:
        with path.open("rb") as file:
            data = file.read(_MOST_BYTES)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise NotesLostError(f"{path} cannot be read: {error.strerror}") from error
    try:
        return msgspec.json.decode(data, type=Notes)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise NotesLostError(f"{path} holds no notes ({error}): they begin anew") from error


def keep(path: Path, changed: Notes) -> None:
    """Replace the notes of these checks, in one atomic step. Raises `NotesLostError`.

    Of two looks at the same moment the later one wins, check by check: at worst a second of
    counting is lost, which is not worth a lock that could hang.
    """
    try:
        others = read(path)
    except NotesLostError:
        others = {}
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        data = msgspec.json.encode(others | changed)
        descriptor = os.open(
            temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600
        )
        with open(descriptor, "wb") as file:
            file.write(data)
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise NotesLostError(f"{path} cannot be written: {error.strerror}") from error


_KEPT = 64
"""A window with more looks than this forgets its oldest ones."""

Sample = list[float]
"""The time of a reading and its value; a list, since notes are JSON."""


@dataclass(frozen=True, slots=True)
class Growth:
    """The growth of one counter."""

    steps: tuple[float, ...]
    """The growth from each look to the next one within the window."""

    @property
    def total(self) -> float:
        """The growth in the whole window."""
        return sum(self.steps)

    @property
    def last(self) -> float:
        """The growth since the last look."""
        return self.steps[-1] if self.steps else 0.0

    def looks_past(self, limit: float) -> int:
        """The number of looks in which it had grown by more than the limit."""
        return sum(step > limit for step in self.steps)


def note(samples: list[Sample], value: float, *, at: float, window_s: float) -> Growth:
    """Add a reading, forget old ones, and return the growth.

    A counter that went back has begun anew, as after a reset of its device.
    """
    samples.append([at, value])
    begin = at - window_s
    # the newest sample from before the window stays: growth is counted from there
    while len(samples) > 2 and (samples[1][0] <= begin or len(samples) > _KEPT):
        del samples[0]
    values = [value for _, value in samples]
    return Growth(tuple(new - old if new >= old else new for old, new in pairwise(values)))
