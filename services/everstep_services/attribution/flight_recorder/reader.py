"""Reads dumps in processes of their own, with limits on memory and processor time.

A dump comes from a process that is sick, or from somebody else: reading it must not be able to
take the machine down. A file that ends its reader is left out, and the next gets another reader.
The readers import nothing from the present folder, which may be that of the dumps.
"""

import gc
import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Literal, NamedTuple

import msgspec

from everstep.evidence.files import read_regular
from everstep_services.attribution.flight_recorder.dump import read_dump
from everstep_services.attribution.flight_recorder.dump_file import BadDumpError
from everstep_services.attribution.flight_recorder.entries import RankEntries, read_entries
from everstep_services.attribution.flight_recorder.summary import RankSummary

_REASON_MOST = 300
_MOST_BYTES = 1 << 30
_AHEAD = 4
"""How many files are given to a reader before it asks."""
_SIZE_BYTES = 8


class ReaderLimits(NamedTuple):
    """The limits of reading one file."""

    memory_bytes: int
    cpu_s: int


class ReadRequest(msgspec.Struct, frozen=True):
    """A file to read."""

    path: bytes
    rank: int
    wanted: Literal["summary", "entries"] = "summary"
    verbose: bool = False
    group_world: int = 0


class SummaryAnswer(msgspec.Struct):
    """The summary of a file, or why there is none."""

    summary: RankSummary | None = None
    reason: str = ""


class EntriesAnswer(msgspec.Struct):
    """The entries of a file, or why there are none."""

    entries: RankEntries | None = None
    reason: str = ""


def answers(requests: Iterable[ReadRequest], readers: int, limits: ReaderLimits) -> Iterator[bytes]:
    """The answer to each request, in order; also where a reader ended without one."""
    idle: SimpleQueue[_Reader] = SimpleQueue()
    every = [_Reader(limits) for _ in range(readers)]
    for reader in every:
        idle.put(reader)

    def answer(request: ReadRequest) -> bytes:
        reader = idle.get()
        try:
            return reader.answer(request)
        finally:
            idle.put(reader)

    threads = ThreadPoolExecutor(readers)
    waiting: deque[Future[bytes]] = deque()
    try:
        for request in requests:
            waiting.append(threads.submit(answer, request))
            if len(waiting) >= readers * _AHEAD:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        threads.shutdown(cancel_futures=True)
        for reader in every:
            reader.close()


class _Reader:
    """A process that reads one file after the other; the next request after its end starts one."""

    def __init__(self, limits: ReaderLimits) -> None:
        self._limits = limits
        self._process: subprocess.Popen[bytes] | None = None
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - `close` closes it

    def answer(self, request: ReadRequest) -> bytes:
        if self._process is None:
            self._process = subprocess.Popen(  # noqa: S603 - our own module
                [sys.executable, "-P", "-m", __name__, *map(str, self._limits)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
            )
        process = self._process
        assert process.stdin is not None, "a pipe"
        assert process.stdout is not None, "a pipe"
        try:
            _write(process.stdin, msgspec.msgpack.encode(request))
            octets = _read(process.stdout)
        except BrokenPipeError:
            octets = b""
        if not octets:
            process.kill()
            self._end()
            return msgspec.msgpack.encode(SummaryAnswer(reason=self._why_ended(process.returncode)))
        return octets

    def close(self) -> None:
        self._end()
        self._errors.close()

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.communicate()

    def _why_ended(self, code: int) -> str:
        self._errors.seek(0)
        error = self._errors.read().decode(errors="replace").strip().rpartition("\n")[2]
        self._errors.seek(0)
        self._errors.truncate()
        if code == -signal.SIGXCPU or error.startswith("MemoryError"):
            return (
                f"it ended its reader, which may take {self._limits.memory_bytes >> 20} MiB and "
                f"{self._limits.cpu_s} s of a processor: no dump needs as much"
            )
        if code < 0:
            return f"its reader was ended by {signal.Signals(-code).name}"
        return f"its reader failed: {error}"[:_REASON_MOST]


def _write(pipe: IO[bytes], octets: bytes) -> None:
    pipe.write(len(octets).to_bytes(_SIZE_BYTES) + octets)
    pipe.flush()


def _read(pipe: IO[bytes]) -> bytes:
    """The next message; empty at the end of the pipe."""
    size = int.from_bytes(pipe.read(_SIZE_BYTES))
    octets = pipe.read(size)
    return octets if len(octets) == size else b""


def read_file(file: Path, rank: int) -> RankSummary:
    """The summary of one file; its time of change says when it was written."""
    status = file.stat()
    summary = read_dump(_checked_content(file), rank, status.st_mtime_ns)
    if summary.taken_ns < summary.newest_ns:  # the clock of another host is useless here
        return msgspec.structs.replace(summary, taken_ns=0)
    return summary


def _checked_content(file: Path) -> bytes:
    size = file.stat().st_size
    if size > _MOST_BYTES:
        raise BadDumpError(f"it has {size} bytes; at most {_MOST_BYTES} are read")
    if not size:
        raise BadDumpError("it is empty")
    return read_regular(file)


def _answered(request: ReadRequest) -> SummaryAnswer | EntriesAnswer:
    file = Path(os.fsdecode(request.path))
    answer = SummaryAnswer if request.wanted == "summary" else EntriesAnswer
    try:
        if request.wanted == "summary":
            return SummaryAnswer(summary=read_file(file, request.rank))
        entries = read_entries(
            _checked_content(file),
            request.rank,
            verbose=request.verbose,
            group_world=request.group_world,
        )
        return EntriesAnswer(entries=entries)
    except (BadDumpError, OSError, MemoryError) as error:
        return answer(reason=str(error) or "it needs more memory than a dump may take")
    except Exception as error:  # noqa: BLE001  a file may hold anything: it costs its own rank only
        return answer(reason=f"it cannot be read: {type(error).__name__}: {error}"[:_REASON_MOST])


def _limit_cpu(cpu_s: int) -> None:
    """Have the kernel end this process if the next file takes longer."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(
        resource.RLIMIT_CPU, (int(usage.ru_utime + usage.ru_stime) + 1 + cpu_s, hard)
    )


def main(limits: ReaderLimits, requests: IO[bytes], to: IO[bytes]) -> None:
    """Answer requests until there are no more."""
    gc.disable()  # dumps have no cycles: looking for them takes as long as reading
    resource.setrlimit(resource.RLIMIT_AS, (limits.memory_bytes, limits.memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    while octets := _read(requests):
        _limit_cpu(limits.cpu_s)
        _write(
            to, msgspec.msgpack.encode(_answered(msgspec.msgpack.decode(octets, type=ReadRequest)))
        )


if __name__ == "__main__":
    main(ReaderLimits(*map(int, sys.argv[1:])), sys.stdin.buffer, sys.stdout.buffer)
