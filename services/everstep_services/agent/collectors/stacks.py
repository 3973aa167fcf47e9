"""The Python stacks of each rank: read by py-spy from outside, else from torch's faulthandler.

py-spy needs a tenth of a second of a processor for each rank, for which no restart after a crash
waits: there, each rank writes its own stacks as the warden ends it.
"""

import asyncio
import re
import shutil
import sysconfig
from asyncio.subprocess import DEVNULL, PIPE, Process
from contextlib import suppress
from pathlib import Path

import msgspec

from everstep.clock import Clock
from everstep.evidence.archive import ArchiveMember
from everstep.evidence.py_spy import DISTRIBUTED, PEERS, SPY_THREADS, SpyFrame, SpyLocal, SpyThread
from everstep_services.agent.collectors.collection import (
    EvidenceFound,
    NothingFoundError,
    RankPiece,
    Scene,
    from_each,
    left_file,
)
from everstep_services.agent.ranks.protocol import RankSeen
from everstep_services.agent.stalls.torch_server import TorchServerError, answer, has_server
from trainer_sdk import layout
from trainer_sdk.page import BadPageError
from trainer_sdk.page_content import RankPhase

_AT_ONCE = 4
LEAST_S = 1.0
"""py-spy is not used where the limit is shorter."""
_MOST_BYTES = 8 << 20
_NAME_MOST = 300
"""Names of C++ frames may have kilobytes."""
_AGAIN_AFTER_S = 0.5
"""A rank that holds the lock may be on its way to where it will wait: the second look counts."""
_TRIES = 3
"""A process that runs on may be read in the middle of a change."""
_FALLBACK_SHARE = 0.3
"""The share of the time for faulthandler, after py-spy has failed."""
_WORK = "<torch._C._distributed_c10d.Work at "
_BY_PEER = re.compile(r"\{(\d{1,9}): [^:]*\}")
"""A dictionary of the transfers with one peer, as torch's pipelines have it."""
_FORBIDDEN = "permission denied"
_WRITTEN_FRAME = re.compile(rb'File "(?:[^"\n]*/)?([^"\n]*)", line (\d+) in ([^\n]*)')
"""What faulthandler prints of a frame."""


class StacksReader:
    """Reads them with py-spy; with `native` frames too if the ranks may stand still meanwhile."""

    def __init__(self, *, native: bool = False, program: str | None = None) -> None:
        self._native = native
        self._program = find_program() if program is None else program

    async def stacks(self, scene: Scene, clock: Clock) -> EvidenceFound | None:
        """The stacks of each rank's threads."""
        turns = asyncio.Semaphore(_AT_ONCE)
        is_native = self._native and scene.may_pause

        async def read(rank: RankSeen) -> RankPiece:
            until = clock.now() + scene.each_within_s * (1 - _FALLBACK_SHARE)
            threads, why = list[SpyThread](), "py-spy read no thread"
            try:
                async with turns, asyncio.timeout(max(until - clock.now(), 0)):
                    threads = await self._read(rank, is_native=is_native)
                    if any(thread.owns_gil for thread in threads):
                        await clock.sleep(_AGAIN_AFTER_S)
                        threads = await self._read(rank, is_native=is_native)
            except TimeoutError:
                why = "py-spy has not ended in time"
            except NothingFoundError as error:
                why = str(error)
            if threads:
                return _piece(rank.rank, threads)
            return await _by_its_own(rank, scene.each_within_s * _FALLBACK_SHARE * 0.9, why)

        return await from_each(scene, read)

    async def _read(self, rank: RankSeen, *, is_native: bool) -> list[SpyThread]:
        if not self._program:
            raise NothingFoundError("py-spy is not installed: pip install 'everstep[agent]'")
        errors = ""
        for attempt in range(_TRIES):
            how = ["--native" if is_native else "--nonblocking"]
            if not attempt:  # a process that runs on may change them meanwhile
                how.append("--locals")
            code, output, errors = await _run(
                self._program, "dump", "--pid", str(rank.pid), "--json", "--full-filenames", *how
            )
            if code == 0:
                return _decoded(output)
            if _FORBIDDEN in errors.lower():
                break
            is_native = False  # a stopped process cannot be stopped again
        raise NothingFoundError(_reason(errors))


async def written_stacks(scene: Scene, clock: Clock) -> EvidenceFound | None:
    """The stacks that ranks have written as the warden ended them."""
    del clock

    async def living(_: RankSeen) -> RankPiece:
        raise NothingFoundError("it has not ended")

    async def written(rank: RankSeen) -> RankPiece | None:
        text = await asyncio.to_thread(left_file, rank.folder / layout.STACKS_FILE, _MOST_BYTES)
        if text is None:
            return None
        # the main thread comes last
        frame = _WRITTEN_FRAME.search(text, text.rfind(b"hread 0x"))
        where = "no Python frame" if frame is None else "{2} ({0}:{1})".format(
            *(part.decode(errors="replace")[:80] for part in frame.groups())
        )  # fmt: skip
        return RankPiece(where, ArchiveMember(rank.rank, "txt", text))

    return await from_each(scene, living, gone=written)


def find_program() -> str:
    """The py-spy of this installation, else that of PATH; empty for none."""
    own = Path(sysconfig.get_path("scripts"), "py-spy")
    return str(own) if own.is_file() else shutil.which("py-spy") or ""


async def _run(*command: str) -> tuple[int, bytes, str]:
    """Its exit code, stdout and stderr. On cancellation it leaves no process behind."""
    process = await asyncio.create_subprocess_exec(
        *command, stdin=DEVNULL, stdout=PIPE, stderr=PIPE, env={"PATH": "/usr/bin:/bin"}
    )
    try:
        assert process.stdout is not None
        assert process.stderr is not None
        output, error_text = await asyncio.gather(
            _bounded(process.stdout), _bounded(process.stderr)
        )
        code = await process.wait()
    finally:
        await _end(process)
    return code, output, error_text.decode(errors="replace")


async def _bounded(stream: asyncio.StreamReader) -> bytes:
    parts = bytearray()
    while part := await stream.read(1 << 16):
        parts += part
        if len(parts) > _MOST_BYTES:
            raise NothingFoundError(f"py-spy wrote more than {_MOST_BYTES} bytes")
    return bytes(parts)


async def _end(process: Process) -> None:
    if process.returncode is None:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def _decoded(output: bytes) -> list[SpyThread]:
    try:
        threads = SPY_THREADS.decode(output)
    except msgspec.MsgspecError as error:
        raise NothingFoundError(f"the output of py-spy cannot be parsed: {error}") from error
    for thread in threads:
        for frame in thread.frames:
            frame.name, frame.filename = frame.name[:_NAME_MOST], frame.filename[:_NAME_MOST]
            frame.module = None if frame.module is None else frame.module[:_NAME_MOST]
        _keep_peers(thread.frames)
    return threads


def _keep_peers(frames: list[SpyFrame]) -> None:
    """Keep the ranks that a call of torch.distributed was given; other values stay in the rank.

    Where the thread waits for a transfer that such a call has begun, its variables name the peer.
    """
    may_wait = True
    for frame in frames:
        told, frame.locals = frame.locals or [], None
        if frame.module is not None:
            continue  # a native frame, which has none
        peers = [it for it in told if it.name in PEERS and (it.repr or "").isdecimal()]
        if frame.filename.endswith(DISTRIBUTED):
            frame.locals, may_wait = peers or None, False
        elif may_wait:
            works = [it.repr for it in told if _WORK in (it.repr or "")]
            keys = [match[1] for text in works if (match := _BY_PEER.fullmatch(text or ""))]
            frame.locals = ([SpyLocal("peer", keys[0])] if keys else works and peers) or None
            may_wait = bool(works) and frame.locals is None


def _piece(rank: int, threads: list[SpyThread]) -> RankPiece:
    holds = any(thread.owns_gil for thread in threads)
    return RankPiece(
        _where(threads) + (", holds the interpreter's lock" if holds else ""),
        ArchiveMember(rank, "json", msgspec.json.encode(threads)),
    )


def _where(threads: list[SpyThread]) -> str:
    """The innermost frame of the main thread."""
    main = next((thread for thread in threads if thread.os_thread_id == thread.pid), None)
    if main is None or not main.frames:
        return f"{len(threads)} threads"
    frame = main.frames[0]
    return f"{frame.name[:80]} ({frame.filename.rpartition('/')[2][:80]}:{frame.line})"


async def _by_its_own(rank: RankSeen, within_s: float, why: str) -> RankPiece:
    """The traceback that torch's server in the rank makes; it needs the interpreter's lock.

    A rank that leaves is not asked: a thread that asks for the lock of an interpreter that shuts
    down ends its whole process by SIGABRT.
    """
    if not has_server(rank.folder):
        raise NothingFoundError(why)
    if _has_ended(rank):
        raise NothingFoundError(f"{why}; and its script has ended")
    try:
        text = await answer(rank.folder, "dump_traceback", within_s)
    except TorchServerError as error:
        raise NothingFoundError(f"{why}; and its own traceback: {error}") from error
    member = ArchiveMember(rank.rank, "txt", text[:_MOST_BYTES])
    return RankPiece(f"its own traceback, as {why}", member)


def _has_ended(rank: RankSeen) -> bool:
    try:
        page = rank.page.read()
    except BadPageError:
        return False
    return page is not None and page.phase is RankPhase.ENDED


def _reason(errors: str) -> str:
    """The error of py-spy, without its own stack."""
    if _FORBIDDEN in errors.lower():
        return "py-spy may not read it (ptrace is forbidden): see `everstep check ptrace`"
    told = errors.partition("Stack backtrace:")[0].replace("Caused by:", "")
    return f"py-spy: {' '.join(told.removeprefix('Error: ').split())[:200] or 'it said nothing'}"
