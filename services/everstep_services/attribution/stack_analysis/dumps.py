"""Reads the output of py-spy and faulthandler into stacks. Pure; it ends for any bytes.

A dump comes from a faulty process, and may be truncated anywhere: its complete parts are used, and
the rest is reported.
"""

import json
import re
from collections.abc import Iterator

import msgspec

from everstep.evidence.py_spy import DISTRIBUTED, PEERS, SPY_THREADS, SpyFrame, SpyThread
from everstep_services.attribution.stack_analysis.stacks import Frame, RankStacks, Thread

_MOST_BYTES = 64 << 20
_MOST_THREADS = 4096
_MOST_FRAMES = 512
_MOST_CHARACTERS = 512

_FAULT_HEAD = re.compile(
    r"^\W{0,4}(?:Current thread|Thread) 0x(?P<id>[0-9a-fA-F]{1,16})"
    r"(?: \[(?P<name>[^\]]{0,200})\])? \(most recent call first\):"
)
_FAULT_FRAME = re.compile(
    r'^\s*File "(?P<file>[^"]{1,4096})", line (?P<line>\d{1,9}|\?\?\?) in (?P<name>.{1,1000})$'
)
_SPY_HEAD = re.compile(
    r"^\s*Thread (?:(?P<id>\d{1,20}|0x[0-9a-fA-F]{1,16}) )?\((?P<state>[a-z+ ]{1,40})\)"
    r'(?:: "(?P<name>[^"]{0,200})")?\s*$'
)
_SPY_FRAME = re.compile(r"^\s{4,}(?P<name>.{1,4000}?) \((?P<file>.{1,4096}?)(?::(?P<line>\d+))?\)$")
_SPY_PROCESS = re.compile(r"^Process (?P<pid>\d{1,10}):")
_RANK = re.compile(r"[0-9]{1,9}")
_GLOO_WAIT = re.compile(r"ProcessGroupGloo::(Send|Recv)Work::wait")
"""The wait for a transfer of gloo: a call that has returned began it."""
_NATIVE_FILE = re.compile(r"\.so(\.|$)|^lib[\w+-]+\.so")


class BadStacksError(Exception):
    """Bytes that hold no stacks."""


def read_stacks(content: bytes, rank: int) -> RankStacks:
    """The stacks in what py-spy (JSON or text) or faulthandler has printed."""
    if len(content) > _MOST_BYTES:
        raise BadStacksError(f"it has {len(content)} bytes; at most {_MOST_BYTES} are read")
    if not content.strip():
        raise BadStacksError("it is empty")
    if content.lstrip()[:1] == b"[":
        return _of_json(content, rank)
    text = content.decode("utf-8", "replace")
    threads = list(_of_faulthandler(text)) or list(_of_spy_text(text))
    if not threads:
        raise BadStacksError(
            "it has no stack: what py-spy dump (--json, too) and faulthandler print can be read"
        )
    return RankStacks(rank=rank, threads=tuple(threads), problems=_cut(len(threads)))


def _cut(threads: int) -> tuple[str, ...]:
    most = f"only its first {_MOST_THREADS} threads were read"
    return (most,) if threads >= _MOST_THREADS else ()


# --- py-spy's JSON ---


def _of_json(content: bytes, rank: int) -> RankStacks:
    problems: list[str] = []
    try:
        spied = SPY_THREADS.decode(content)
    except (ValueError, RecursionError) as error:
        spied = list(_whole_threads(content))
        if not spied:
            raise BadStacksError(f"it is not what py-spy dump --json prints: {error}") from None
        problems.append(f"its dump is cut or damaged after {len(spied)} threads")
    problems += _cut(len(spied))
    own = spied[0].pid if spied else 0
    threads = [_of_spy(thread, own) for thread in spied[:_MOST_THREADS]]
    if threads and not any(thread.is_main for thread in threads):
        problems.append("its main thread is not in the dump")
    if not threads:
        raise BadStacksError("it lists no thread: the process was ending, or is not Python's")
    return RankStacks(rank=rank, threads=tuple(threads), problems=tuple(problems))


def _whole_threads(content: bytes) -> Iterator[SpyThread]:
    """The threads before the place where the JSON is cut or damaged."""
    text = content.decode("utf-8", "replace")
    decoder, at = json.JSONDecoder(), text.find("{")
    for _ in range(_MOST_THREADS):
        if at < 0:
            return
        try:
            value, end = decoder.raw_decode(text, at)
            yield msgspec.convert(value, SpyThread)
        except (ValueError, RecursionError):  # msgspec's errors are ValueErrors, too
            return
        at = text.find("{", end)


def _of_spy(thread: SpyThread, own: int) -> Thread:
    is_own = thread.pid == own
    is_first = (
        thread.os_thread_id == thread.pid
        if thread.os_thread_id
        else thread.thread_name == "MainThread"
    )
    call, arguments = _call_of(thread.frames)
    return Thread(
        call=call,
        arguments=arguments,
        name=_short(thread.thread_name or ("MainThread" if is_first else "")),
        frames=tuple(_of_spy_frame(frame) for frame in thread.frames[:_MOST_FRAMES]),
        is_main=is_own and is_first,
        is_idle=not thread.active,
        has_interpreter=thread.owns_gil,
        child=0 if is_own else thread.pid,
    )


def _call_of(frames: list[SpyFrame]) -> tuple[str, dict[str, int]]:
    waits = ""
    for frame in frames[:_MOST_FRAMES]:
        if match := _GLOO_WAIT.search(frame.name):
            waits = match[1].lower()
        told = {it.name: it.repr or "" for it in frame.locals or () if it.name in PEERS}
        peers = {name: int(text) for name, text in told.items() if _RANK.fullmatch(text)}
        call = frame.name if frame.filename.endswith(DISTRIBUTED) else waits
        if peers and call:
            return _short(call), peers
    return "", {}


def _of_spy_frame(frame: SpyFrame) -> Frame:
    is_native = bool(frame.module) or bool(_NATIVE_FILE.search(frame.filename))
    file = frame.module or frame.filename
    return Frame(_short(frame.name), _short_path(file), frame.line or 0, is_native)


# --- text ---


def _of_spy_text(text: str) -> Iterator[Thread]:
    """Reads the text of `py-spy dump`."""
    own = child = pid = 0
    head: re.Match[str] | None = None
    frames: list[Frame] = []
    count = 0
    for line in [*text.splitlines(), "Thread (end)"]:
        if process := _SPY_PROCESS.match(line):
            pid = int(process["pid"])
            own = own or pid
        elif new := _SPY_HEAD.match(line):
            if head is not None and count < _MOST_THREADS:
                yield _of_spy_head(head, frames, child, is_first=count == 0)
                count += 1
            head, frames, child = new, [], pid if pid != own else 0
        elif (frame := _SPY_FRAME.match(line)) and len(frames) < _MOST_FRAMES:
            is_native = bool(_NATIVE_FILE.search(frame["file"]))
            number = int((frame["line"] or "0")[:9])
            frames.append(
                Frame(_short(frame["name"]), _short_path(frame["file"]), number, is_native)
            )


def _of_spy_head(head: re.Match[str], frames: list[Frame], child: int, *, is_first: bool) -> Thread:
    name = head["name"] or ""
    return Thread(
        name=_short(name),
        frames=tuple(frames),
        is_main=not child and (name == "MainThread" or (is_first and not name)),
        is_idle="idle" in head["state"],
        has_interpreter="gil" in head["state"],
        child=child,
    )


def _of_faulthandler(text: str) -> Iterator[Thread]:
    """What `faulthandler.dump_traceback(all_threads=True)` writes: the main thread comes last.

    The current thread is the one that writes the dump: that it has the lock says nothing.
    """
    threads: list[tuple[str, list[Frame]]] = []
    for line in text.splitlines():
        if head := _FAULT_HEAD.match(line):
            if len(threads) == _MOST_THREADS:
                break
            threads.append((head["name"] or "", []))
        elif threads and len(threads[-1][1]) < _MOST_FRAMES and (frame := _FAULT_FRAME.match(line)):
            number = int(frame["line"]) if frame["line"].isdecimal() else 0
            threads[-1][1].append(Frame(_short(frame["name"]), _short_path(frame["file"]), number))
    for number, (name, frames) in enumerate(threads):
        is_main = number == len(threads) - 1
        yield Thread(
            name=_short(name) or ("MainThread" if is_main else ""),
            frames=tuple(frames),
            is_main=is_main,
        )


def _short(text: str) -> str:
    return text.replace("\n", " ").strip()[:_MOST_CHARACTERS]


def _short_path(text: str) -> str:
    """The end of a path, which tells more than its beginning."""
    return text.replace("\n", " ").replace("\\", "/")[-_MOST_CHARACTERS:]
