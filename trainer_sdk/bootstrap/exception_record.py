"""The exception record: the exception that ended a rank, in two files that outlive it."""

import json
import os
import sys
import sysconfig
import traceback
from collections.abc import Mapping
from datetime import UTC, datetime
from types import TracebackType

from trainer_sdk import layout

_TEXT_BYTES = 4096
_TRACEBACK_BYTES = 65536
_LONGEST_CHAIN = 16
_ASKS = {16: "move", 17: "stop"}
_ASKING = ("trainer_sdk.numerics.rollback", "megatron.core.rerun_state_machine")
"""The modules by which these exit codes are meant; in any other script they mean nothing."""
_DUMPS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
"""Torch has a recorder of its own for NCCL."""
_ALL_TO_ALL, _DISTRIBUTED = "all_to_all_single", "torch/distributed/distributed_c10d.py"


def write(error: BaseException, environ: Mapping[str, str], folder: str) -> None:
    """Write our record, and torchelastic's unless the script has; OSError if a write fails."""
    trace = "".join(traceback.format_exception(error))
    now = datetime.now(UTC)
    ours = {
        "name": _name(error),
        "text": _text(error),
        "traceback": _last(trace, _TRACEBACK_BYTES),
        "place": _place(error),
        "at": now.isoformat(),
        "chain": _chain(error),
        "asks": _asks(error),
    }
    _replace(os.path.join(folder, layout.ERROR_FILE), ours)
    path = environ.get("TORCHELASTIC_ERROR_FILE", "")
    if path and not (os.path.exists(path) and os.path.getsize(path)):
        extra = {"py_callstack": trace, "timestamp": str(int(now.timestamp()))}
        message = {"message": f"{type(error).__name__}: {_text(error)}", "extraInfo": extra}
        _replace(path, {"message": message})


def write_flight_recorder(
    environ: Mapping[str, str], folder: str, error: BaseException | None = None
) -> None:
    """Write what torch's flight recorder holds, where torch would dump it; OSError if that fails.

    A rank that is ended by an exception takes its recorder with it, and the ranks that a wrong
    collective ends are gone before anybody can ask them. Nothing is written without collectives,
    over a dump of torch, or where the user wants the dumps elsewhere. The sizes that a call of
    all_to_all was given, which the exception has left, are added: the recorder lacks them.
    """
    bindings = sys.modules.get("torch._C._distributed_c10d")
    prefix = os.path.join(folder, layout.FLIGHT_PREFIX)
    path = prefix + environ.get("RANK", "")
    if bindings is None or environ.get("TORCH_FR_DUMP_TEMP_FILE", prefix) != prefix:
        return
    if path == prefix or os.path.exists(path):
        return
    dumps = [dump() for name in _DUMPS if (dump := getattr(bindings, name, None)) is not None]
    content = max((dump for dump in dumps if b'"entries"' in dump), key=len, default=b"")
    if content:
        sizes = _split_sizes(error) if error is not None and content.endswith(b"}") else None
        if sizes is not None:
            content = content[:-1] + b', "all_to_all": ' + json.dumps(sizes).encode() + b"}"
        temporary = f"{path}.{os.getpid()}"
        with open(temporary, "wb") as file:
            file.write(content)
        os.replace(temporary, path)


def _split_sizes(error: BaseException) -> Mapping[str, object] | None:
    """What the innermost call of all_to_all_single was given; None if there is none."""
    trace = error.__traceback__
    call = None
    while trace is not None:
        code = trace.tb_frame.f_code
        if code.co_name == _ALL_TO_ALL and code.co_filename.endswith(_DISTRIBUTED):
            call = trace.tb_frame
        trace = trace.tb_next
    if call is None:
        return None
    told = call.f_locals
    try:
        ranks = call.f_globals["get_process_group_ranks"](told["group"])
        own = told["input_split_sizes"] or [told["input"].size(0) // len(ranks)] * len(ranks)
        others = told["output_split_sizes"] or [told["output"].size(0) // len(ranks)] * len(ranks)
        return {"ranks": ranks, "sends": list(map(int, own)), "receives": list(map(int, others))}
    except Exception:  # noqa: BLE001 - another release has other names
        return None


def _replace(path: str, content: Mapping[str, object]) -> None:
    temporary = f"{path}.{os.getpid()}"
    with open(temporary, "w", encoding="utf-8", errors="backslashreplace") as file:
        json.dump(content, file)
    os.replace(temporary, path)


def _name(error: BaseException) -> str:
    kind = type(error)
    return kind.__qualname__ if kind.__module__ == "builtins" else _full(kind)


def _full(kind: type[BaseException]) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _asks(error: BaseException) -> str:
    """What the script asks for by its exit code; empty for nothing."""
    is_meant = isinstance(error, SystemExit) and any(name in sys.modules for name in _ASKING)
    code = error.code if isinstance(error, SystemExit) else None
    return _ASKS.get(code, "") if is_meant and isinstance(code, int) else ""


def _text(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception as broken:  # noqa: BLE001 - the user's __str__ may raise anything
        text = f"(its text raised {type(broken).__name__})"
    return _octets(text)[:_TEXT_BYTES].decode(errors="ignore")


def _last(text: str, octets: int) -> str:
    return _octets(text)[-octets:].decode(errors="ignore")


def _octets(text: str) -> bytes:
    return text.encode(errors="backslashreplace")


def _chain(error: BaseException) -> list[str]:
    """The classes of the exceptions that it was raised from, outermost first."""
    chain: list[str] = []
    seen = {id(error)}
    before = _before(error)
    while before is not None and id(before) not in seen and len(chain) < _LONGEST_CHAIN:
        seen.add(id(before))
        chain.append(_name(before))
        before = _before(before)
    return chain


def _before(error: BaseException) -> BaseException | None:
    if error.__cause__ is not None or error.__suppress_context__:
        return error.__cause__
    return error.__context__


def _place(error: BaseException) -> str:
    """The innermost frame of the user's code; the innermost of all frames, if there is none."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{_short(error.filename)}:{error.lineno}"
    frames = list(_frames(error.__traceback__))
    own = [frame for frame in frames if not _is_installed(frame[0])]
    if not frames:
        return ""
    path, line, function = (own or frames)[-1]
    return f"{_short(path)}:{line} in {function}"


def _frames(trace: TracebackType | None) -> "list[tuple[str, int, str]]":
    frames: list[tuple[str, int, str]] = []
    while trace is not None:
        code = trace.tb_frame.f_code
        frames.append((code.co_filename, trace.tb_lineno, code.co_name))
        trace = trace.tb_next
    return frames


def _is_installed(path: str) -> bool:
    library = {*sysconfig.get_paths().values(), sys.prefix, sys.base_prefix}
    folders = tuple(f"{folder}{os.sep}" for folder in library - {"", os.sep})
    if path.startswith("<") or "site-packages" in path or "dist-packages" in path:
        return True
    return path.startswith(tuple(f for f in folders if os.sep + "lib" in f))


def _short(path: str) -> str:
    here = os.path.join(os.getcwd(), "")
    return path.removeprefix(here)
