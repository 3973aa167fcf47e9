"""The files that keep the ranks' output, and their last lines.

    <log dir>/<job>/round-<round>/rank-<global rank>/{stdout,stderr,about.json}

Ranks write to the files themselves. Nothing here is ever cut off or deleted: how long logs are
kept is the user's decision. Everything blocks: call it in a thread.
"""

import contextlib
import os
import re
import stat
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import msgspec

from everstep.errors import EverstepError
from everstep.ids import checked_name
from everstep.observe.redaction import redact

STREAMS = ("stdout", "stderr")
TAIL_BYTES = 64 * 1024
LINE_BYTES = 1024
_SEARCHED_BYTES = 8 << 20
_CHUNK_BYTES = 64 * 1024
"""Small, because a search lets no other thread run."""
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
_ERROR = re.compile(
    rb"^(?:\[[^\]\n]{0,80}\]:?\s*)*(?:"
    rb"(?!\s)[\w.]*(?:Error|Exception|Interrupt|Fault|Exit)(?::|$)"  # the last line of a traceback
    rb"|.{0,200}\b(?:ERROR|FATAL|CRITICAL|PANIC)\b(?!\s*[=:]\s*0\b)"
    rb"|(?:Fatal Python error|Segmentation fault|Bus error|Aborted|Killed|terminate called)"
    rb"|.{0,200}(?:CUDA error|NCCL WARN|NCCL error|[Oo]ut of memory|core dumped)"
    rb"|\[[EF]\d{3,4} .*"  # torch's own logger: [E1121 10:00:00…
    rb"|[EF]\d{4} \d\d:\d\d:\d\d"
    rb").*$",
    re.MULTILINE,
)
_UNCAUGHT = b"terminate called"
_TEXT = re.compile(rb"\s*what\(\):(.*)")


class LogFolderError(EverstepError):
    """The output of a rank cannot be kept where it should be."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(
            f"the output of ranks cannot be kept in {path}: {why}; choose another with --log-dir"
        )
        self.path = path


class LogOwner(msgspec.Struct, frozen=True, kw_only=True):
    """`about.json`: whose output lies in this folder. Of several runs, the last."""

    job: str
    round: int
    rank: int
    node: str
    slot: int
    local_rank: int
    pid: int
    started_at: datetime


class LogFiles:
    """The files of one job on this node. Each folder is for this user only."""

    def __init__(self, root: Path, job: str) -> None:
        self._root = root
        self._job = checked_name("job", job)
        self._starts: dict[Path, int] = {}

    @property
    def of_job(self) -> Path:
        """The folder of the job's rounds."""
        return self._root / self._job

    def folder(self, round: int, rank: int) -> Path:
        """The folder of this rank's output."""
        return self.of_job / f"round-{round}" / f"rank-{rank}"

    def file(self, round: int, rank: int, stream: str) -> Path:
        """Its `stdout` or `stderr`."""
        return self.folder(round, rank) / stream

    def make(self, round: int, rank: int) -> Path:
        """Make the folder and its files, to be appended to; existing output stays.

        Raises `LogFolderError` for a link, another user's folder, a full or read-only disk.
        """
        path = self.folder(round, rank)
        try:
            self._root.mkdir(parents=True, exist_ok=True, mode=0o700)
            folder = _opened(self._root, self._job, f"round-{round}", f"rank-{rank}")
            try:
                for stream in STREAMS:
                    self._starts[path / stream] = _made(stream, folder)
            finally:
                os.close(folder)
        except OSError as error:
            raise LogFolderError(path, error.strerror or str(error)) from error
        return path

    def start(self, round: int, rank: int, stream: str) -> int:
        """Where the output of this run begins; earlier runs wrote the bytes before."""
        return self._starts.get(self.file(round, rank, stream), 0)

    def say(self, about: LogOwner) -> None:
        """Write next to the output whose it is."""
        path = self.folder(about.round, about.rank) / "about.json"
        fresh = path.with_name(f".about.{os.getpid()}")
        try:
            fresh.write_bytes(msgspec.json.encode(about))
            fresh.replace(path)
        except OSError as error:
            raise LogFolderError(path.parent, error.strerror or str(error)) from error


def tail(path: Path, most_bytes: int = TAIL_BYTES, *, start: int = 0) -> str:
    """The end of a file from a line's beginning, without secrets; empty when there is none.

    Never before `start`. Bytes that are not UTF-8 are replaced. The text also has at most
    `most_bytes`.
    """
    try:
        with _reading(path) as file:
            size = file.seek(0, os.SEEK_END)
            begin = max(start, size - most_bytes)
            # One more byte shows whether a line begins exactly there.
            before = 1 if begin > start else 0
            file.seek(begin - before)
            data = file.read(most_bytes + before)
    except OSError:
        return ""
    if before:
        _, newline, rest = data.partition(b"\n")
        data = rest if newline and rest else data[before:].lstrip(_CONTINUED)
    return _cut(redact(data.decode("utf-8", "replace")), most_bytes)


def first_error(path: Path, *, start: int = 0) -> str:
    """The first line that reports an error, in the last 8 MiB; at most 1 KiB, without secrets.

    If it only names the type of a C++ exception, the exception's text follows.
    """
    blocks = _blocks(path, start)
    for block in blocks:
        match = _ERROR.search(block)
        if match:
            line = match[0].strip()
            if line.startswith(_UNCAUGHT):
                text = _TEXT.match(block[match.end() :].lstrip(b"\n") or next(blocks, b""))
                line += b"; what(): " + text[1].strip() if text else b""
            return _shown(line)
    return ""


def _shown(line: bytes) -> str:
    text = line[: LINE_BYTES * 2].decode("utf-8", "replace")
    text = redact("".join(c if c.isprintable() or c == "\t" else "�" for c in text))
    return text.encode()[:LINE_BYTES].decode("utf-8", "ignore")


_CONTINUED = bytes(range(0x80, 0xC0))
"""The bytes that continue a character of UTF-8."""


def _blocks(path: Path, start: int) -> Iterator[bytes]:
    """Whole lines, 64 KiB at a time; a longer line is cut."""
    try:
        with _reading(path) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(start, size - _SEARCHED_BYTES))
            held = b""
            while chunk := file.read(_CHUNK_BYTES):
                lines, newline, held = (held + chunk).rpartition(b"\n")
                yield lines + newline
                if len(held) > _CHUNK_BYTES:
                    yield held
                    held = b""
            yield held
    except OSError:
        return


def _reading(path: Path):  # type: ignore[no-untyped-def]
    return open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK), "rb")


def _cut(text: str, most_bytes: int) -> str:
    """The end of a text that replacements made longer."""
    data = text.encode("utf-8", "replace")
    return text if len(data) <= most_bytes else data[-most_bytes:].decode("utf-8", "ignore")


def _opened(root: Path, *names: str) -> int:
    """A descriptor of the folder below the root, made if it is missing; links are refused."""
    here = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    for name in names:
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=here)
            below = os.open(name, _FOLDER, dir_fd=here)
        finally:
            os.close(here)
        here = below
        if os.fstat(here).st_uid != os.geteuid():
            os.close(here)
            raise PermissionError(1, f"{name} in it belongs to another user")
    return here


def _made(stream: str, folder: int) -> int:
    """Make a file if it is missing; return its length."""
    file = os.open(stream, _APPEND | os.O_NONBLOCK, 0o600, dir_fd=folder)
    try:
        about = os.fstat(file)
        if not stat.S_ISREG(about.st_mode) or about.st_uid != os.geteuid():
            raise PermissionError(1, f"{stream} in it is not a file of this user")
        return about.st_size
    finally:
        os.close(file)
