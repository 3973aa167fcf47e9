"""Follows one output file of one rank, and writes its whole lines to a screen."""

import contextlib
import ctypes
import errno
import os
import select
import struct
import time
from pathlib import Path

IN_MODIFY = 0x2
IN_Q_OVERFLOW = 0x4000
_EVENT = struct.Struct("iIII")
_EVENTS_BYTES = 256 * 1024


class Inotify:
    """Watches single files. Not thread-safe. Raises OSError if the kernel has no watch left."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self.descriptor = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self.descriptor < 0:
            raise _last_error()

    def watch(self, path: Path) -> int:
        """Watch a file; return the number that `changed` will give."""
        number = self._libc.inotify_add_watch(self.descriptor, os.fsencode(path), IN_MODIFY)
        if number < 0:
            raise _last_error()
        return int(number)

    def unwatch(self, number: int) -> None:
        """Forget a file."""
        self._libc.inotify_rm_watch(self.descriptor, number)

    def changed(self) -> set[int] | None:
        """The files that changed since the last call, without a wait; None: perhaps any."""
        numbers: set[int] = set()
        while True:
            try:
                data = os.read(self.descriptor, _EVENTS_BYTES)
            except BlockingIOError:
                return numbers
            at = 0
            while at < len(data):
                number, mask, _, length = _EVENT.unpack_from(data, at)
                if mask & IN_Q_OVERFLOW:
                    return None
                numbers.add(number)
                at += _EVENT.size + length

    def close(self) -> None:
        """Give it back."""
        os.close(self.descriptor)


def _last_error() -> OSError:
    number = ctypes.get_errno() or errno.EIO
    return OSError(number, os.strerror(number))


_READ_BYTES = 64 * 1024
_TURN_BYTES = 256 * 1024
_BEHIND_BYTES = 4 << 20
"""Further behind than this, it skips to the end."""
_LONGEST_LINE_BYTES = 64 * 1024
"""A longer line is shown in parts."""
_BAR_EVERY_S = 1.0
"""How often a line is shown that only overwrites itself, as progress bars do."""
_PROMPT_S = 0.2
"""An unfinished line that does not change for this long may be a question to the user."""
_NUL = "␀".encode()


class Follower:
    """Used by the console's thread only, except for its constructor. Blocks with the screen."""

    def __init__(
        self,
        path: Path,
        start: int,
        screen: int,
        prefix: bytes,
        label: str,
        *,
        is_alone: bool = False,
    ) -> None:
        self.path = path
        self._at = start
        self._screen = screen
        self._prefix = prefix
        self._label = label
        self._file = -1
        self._held = b""
        """The beginning of an incomplete line."""
        self._bar_at = 0.0
        self._is_alone = is_alone
        """No output of another rank follows: a line may be shown before it ends."""
        self._held_at = 0.0
        self._is_begun = False
        """The beginning of this line was shown."""

    def open(self) -> bool:
        """Whether there is such a file."""
        try:
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
            self._file = os.open(self.path, flags)
        except OSError:
            return False
        return True

    def size(self) -> int:
        """The present length of the file."""
        return os.fstat(self._file).st_size

    def show_some(self, until: int | None = None) -> bool:
        """Show a bounded part of the new output; True when there is more at once.

        With `until`, only up to that offset.
        """
        size = self.size()
        if size < self._at:
            self._at = 0  # the file was made shorter: its contents were written since
        behind = (size if until is None else min(until, size)) - self._at
        if behind <= 0:
            return False
        if behind > _BEHIND_BYTES:
            self._skip(behind)
        for _ in range(_TURN_BYTES // _READ_BYTES):
            data = os.pread(self._file, _READ_BYTES, self._at)
            self._at += len(data)
            self._take(data)
            if len(data) < _READ_BYTES:
                return False
        return True

    @property
    def may_ask(self) -> bool:
        """Whether `show_question` may have something to show."""
        return self._is_alone and bool(self._held) and b"\r" not in self._held

    def show_question(self) -> None:
        """Show an unfinished line once it seems to wait for an answer."""
        if self.may_ask and time.monotonic() - self._held_at >= _PROMPT_S:
            self._write(self._held, b"")
            self._held, self._is_begun = b"", True

    def close(self) -> None:
        """Show also a last line without an end."""
        if self._held:
            self._write(self._held.rpartition(b"\r")[2] or self._held, b"\n")
            self._held = b""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _skip(self, behind: int) -> None:
        """Skip all but the last part, and say where the rest can be read."""
        skipped = behind - _READ_BYTES
        self._at += skipped
        # Continue at the beginning of a line, unless the line is very long.
        data = os.pread(self._file, _READ_BYTES, self._at)
        line, newline, _ = data.partition(b"\n")
        if newline:
            self._at += len(line) + 1
        if self._held:
            self._write(self._held, b"\n")
            self._held = b""
        note = f"[{self._label}] {_size(skipped)} skipped here; all of it is in {self.path}\n"
        put(self._screen, note.encode("utf-8", "replace"))

    def _take(self, data: bytes) -> None:
        """Write the complete lines, and keep the rest."""
        self._held_at = time.monotonic()
        lines, newline, rest = data.rpartition(b"\n")
        if newline:
            self._write(self._held + lines, newline)
            self._held = rest
        else:
            self._held += rest
        if b"\r" in self._held:
            self._show_bar()
        if len(self._held) > _LONGEST_LINE_BYTES:
            end = _whole_characters(self._held)
            self._write(self._held[:end], b"\n")
            self._held = self._held[end:]

    def _show_bar(self) -> None:
        """The newest state of a line that overwrites itself, now and then."""
        whole, _, rest = self._held.rpartition(b"\r")
        state = whole.rpartition(b"\r")[2]
        now = time.monotonic()
        if state.strip() and now - self._bar_at >= _BAR_EVERY_S:
            self._bar_at = now
            self._write(state, b"\n")
            state = b""
        # The shown state is gone; the state before the last is wanted if nothing follows.
        self._held = (state + b"\r" + rest) if rest or state else b""

    def _write(self, lines: bytes, newline: bytes) -> None:
        if b"\r" in lines:
            lines = b"\n".join(map(_overwritten, lines.split(b"\n")))
        if b"\0" in lines:
            lines = lines.replace(b"\0", _NUL)
        if not lines.isascii():
            lines = lines.decode("utf-8", "replace").encode("utf-8")
        if self._prefix:
            first = b"" if self._is_begun else self._prefix
            lines = first + lines.replace(b"\n", b"\n" + self._prefix)
        self._is_begun = False
        put(self._screen, lines + newline)


def put(screen: int, data: bytes) -> None:
    """Write to a terminal, which may make this thread wait."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(screen, view) :]
        except BlockingIOError:  # another process made the terminal so
            with contextlib.suppress(OSError):
                select.select([], [screen], [])
        except OSError:  # nobody reads it any more; the files have everything
            return


def _overwritten(line: bytes) -> bytes:
    """The line as a terminal would show it in the end."""
    line = line.rstrip(b"\r")
    return line.rpartition(b"\r")[2]


def _whole_characters(data: bytes) -> int:
    """The length up to the last whole character of UTF-8."""
    end = len(data)
    for back in range(1, min(4, end) + 1):
        byte = data[-back]
        if byte & 0xC0 == 0x80:
            continue
        length = 1 if byte < 0x80 else 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
        return end - back if back < length else end
    return end


def _size(number: int) -> str:
    return f"{number / (1 << 20):.0f} MiB" if number >= 1 << 20 else f"{number >> 10} KiB"
