"""The state directory of `everstep up`: who runs on it, and what it wrote there."""

import contextlib
import fcntl
import os
import select
import signal
import time
from collections.abc import Generator, Mapping
from pathlib import Path

import msgspec

from everstep.evidence.files import check_regular, open_regular, read_regular
from everstep.settings.file_owners import stranger_of
from everstep_services.cli.errors import CliError, Exit

_LOCK = "up.lock"
_RUNNING = "up.json"
_LOOKS_WITHIN_S = 2.0
_READY_WITHIN_S = 60.0
_LOOK_EVERY_S = 0.05
_LOOK_AGAIN_S = 0.01


class StateHolder(msgspec.Struct, frozen=True):
    """Which process holds the directory; pid and start time together name one process."""

    pid: int
    started: str


class RunningServices(msgspec.Struct, frozen=True, kw_only=True):
    """The addresses and names that a ready `everstep up` announces to other commands."""

    pid: int
    version: str
    api: str
    observe: str
    token_file: str
    bus: str
    bus_version: str
    bus_pid: int
    services: list[str]
    command: str = "up"
    """`up`, or `run` for one that ends with its job."""


class StateDir:
    """One state directory. Nothing is made before `create`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def token_file(self) -> Path:
        return self.path / "token"

    @property
    def log_file(self) -> Path:
        return self.path / "up.log"

    def create(self) -> None:
        """Make it, for this user only."""
        try:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            about = self.path.stat()
        except OSError as error:
            raise CliError(
                f"the state directory {self.path} cannot be made: {error.strerror}; "
                f"choose another with --state-dir"
            ) from error
        if about.st_uid != os.getuid():
            raise CliError(
                f"the state directory {self.path} belongs to another user; "
                f"choose another with --state-dir"
            )
        if about.st_mode & 0o077:
            self.path.chmod(0o700)

    @contextlib.contextmanager
    def held(self) -> Generator[None]:
        """Hold the directory: one process at a time. Raises at once when another has it."""
        descriptor = self._opened_lock()
        try:
            self._lock(descriptor)
            os.ftruncate(descriptor, 0)  # first: who held it before is not who holds it now
            holder = StateHolder(os.getpid(), _started(os.getpid()) or "")
            os.pwrite(descriptor, msgspec.json.encode(holder), 0)
            (self.path / _RUNNING).unlink(missing_ok=True)
            yield
            (self.path / _RUNNING).unlink(missing_ok=True)
        finally:
            os.close(descriptor)

    def _opened_lock(self) -> int:
        path = self.path / _LOCK
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            check_regular(descriptor, path)
        except OSError as error:
            raise CliError(f"{path} cannot be written: {error.strerror}") from error
        return descriptor

    def _lock(self, descriptor: int) -> None:
        until = time.monotonic() + _LOOKS_WITHIN_S
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                holder = self._holder()
                if holder is None or _started(holder.pid) != holder.started:
                    if time.monotonic() > until:
                        raise CliError(
                            f"the state directory {self.path} is in use, and not by a process "
                            f"that is seen here: is it on a file system that another host or "
                            f"container uses, too? Use another --state-dir"
                        ) from error
                    time.sleep(_LOOK_AGAIN_S)  # a command that only looks has it for a moment
                    continue
                raise CliError(
                    f"everstep up already runs on {self.path} (pid {holder.pid}): stop it "
                    f"with `everstep down`, or use another --state-dir"
                ) from error
            return

    def announce(self, running: RunningServices) -> None:
        """Tell other commands that all is ready, in one atomic step."""
        _write(self.path / _RUNNING, msgspec.json.encode(running))

    def holder(self) -> StateHolder | None:
        """The process that holds the directory now, if any does.

        One that has only just taken it is waited for, until it has written who it is.
        """
        began = time.monotonic()
        while self._is_held():
            holder = self._holder()
            waited_s = time.monotonic() - began
            if holder is not None and _started(holder.pid) == holder.started:
                return holder
            if holder is not None and waited_s > _LOOKS_WITHIN_S:
                return holder  # in another container: not seen here, and no less there
            if waited_s > _READY_WITHIN_S:
                raise CliError(
                    f"{self.path / _LOCK} is held, and does not say by whom: end that process, or "
                    f"use another --state-dir"
                )
            time.sleep(_LOOK_AGAIN_S)
        return None

    def _is_held(self) -> bool:
        if why := stranger_of(self.path / _LOCK):
            # What it names would be ended, or asked with a token from any file that it names.
            raise CliError(f"{self.path} is not trusted: {why}; ask as that user", Exit.FORBIDDEN)
        try:
            file = open_regular(self.path / _LOCK)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except PermissionError as error:
            text = f"{self.path / _LOCK} cannot be read: {error.strerror}"
            raise CliError(text, Exit.FORBIDDEN) from error
        except OSError as error:
            raise CliError(f"{self.path / _LOCK} cannot be read: {error.strerror}") from error
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False

    def running(self) -> RunningServices | None:
        """The announcement of the running, ready `everstep up`."""
        holder = self.holder()
        if holder is None:
            return None
        try:
            running = msgspec.json.decode(read_regular(self.path / _RUNNING), type=RunningServices)
        except (OSError, msgspec.DecodeError, msgspec.ValidationError):
            return None
        return running if running.pid == holder.pid else None

    def running_at_last(self, within_s: float = _READY_WITHIN_S) -> RunningServices | None:
        """As `running`; what is just being started is waited for."""
        until = time.monotonic() + within_s
        while (running := self.running()) is None and time.monotonic() < until:
            if self.holder() is None:
                return None
            time.sleep(_LOOK_EVERY_S)
        return running

    def _holder(self) -> StateHolder | None:
        try:
            return msgspec.json.decode(read_regular(self.path / _LOCK), type=StateHolder)
        except (OSError, msgspec.DecodeError, msgspec.ValidationError):
            return None


def find_state_dir(environ: Mapping[str, str], chosen: Path | None) -> StateDir:
    """The chosen directory, else $EVERSTEP_STATE_DIR, else everstep in $XDG_STATE_HOME."""
    if chosen is None and environ.get("EVERSTEP_STATE_DIR"):
        chosen = Path(environ["EVERSTEP_STATE_DIR"])
    if chosen is None:
        home = Path(environ["HOME"]) if environ.get("HOME") else Path("~").expanduser()
        chosen = Path(environ.get("XDG_STATE_HOME") or home / ".local" / "state") / "everstep"
    return StateDir(chosen.expanduser().absolute())


def terminate(holder: StateHolder, within_s: float) -> None:
    """Ask exactly this process to end, and wait until it has. Never touches another one."""
    try:
        handle = os.pidfd_open(holder.pid)
    except ProcessLookupError:
        return
    try:
        # Read after the handle was taken: from here on the pid cannot become another process.
        if _started(holder.pid) != holder.started:
            raise CliError(
                f"pid {holder.pid} is not the `everstep up` that holds this directory (does "
                f"that one run in another container?): stop it there"
            )
        signal.pidfd_send_signal(handle, signal.SIGTERM)
        ended, _, _ = select.select([handle], [], [], within_s)
        if not ended:
            raise CliError(
                f"everstep up (pid {holder.pid}) has not ended within {within_s:g} s of "
                f"SIGTERM; end it with: kill -9 {holder.pid}",
                Exit.TIMED_OUT,
            )
    except ProcessLookupError:
        return
    except PermissionError as error:
        raise CliError(f"pid {holder.pid} belongs to another user", Exit.FORBIDDEN) from error
    finally:
        os.close(handle)


def _started(pid: int) -> str | None:
    """When a process started, in ticks since the boot that is named with it."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None
    return f"{boot}/{stat.rpartition(')')[2].split()[19]}"


def _write(path: Path, data: bytes) -> None:
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fresh.unlink(missing_ok=True)
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with open(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)


def age_ms() -> float:
    """How long this process has been running: the start of Python, and its imports."""
    ticks = int((_started(os.getpid()) or "/0").rpartition("/")[2])
    now_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    return round((now_s - ticks / os.sysconf("SC_CLK_TCK")) * 1000)
