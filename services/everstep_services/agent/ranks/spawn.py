"""How the warden starts a process: forked, in a session of its own, bound to the warden's life."""

import os
import socket
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from trainer_sdk import bootstrap, layout
from trainer_sdk.bootstrap import process_setup
from trainer_sdk.bootstrap.deferred_signals import HELD
from trainer_sdk.wire import RankCommand, RankEntry, WardenPlan, unpack

_MAIN = str(Path(bootstrap.__file__).with_name("__main__.py"))
# With these, importing numpy and the like starts no pool of threads, which would forbid a fork.
_NO_POOLS = ("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS")
# Python and the loader read these at their start: a forked rank would have the forge's values.
_READ_AT_START = ("PYTHON", "LD_", "GLIBC_TUNABLES", "MALLOC_")
# The place of a process on its node: its devices, and its processors.
_OF_PLACE = (
    "LOCAL_RANK", layout.CPUS_VARIABLE, layout.MEMORY_NODES_VARIABLE, layout.STRICT_VARIABLE
)  # fmt: skip


def start_cold(entry: RankEntry, plan: WardenPlan) -> int:
    """Start one rank through the bootstrap, or a program as it is; its process id."""
    program = _argv(plan.command, plan.python)
    held = () if plan.command.kind == "program" else HELD  # a program would never unblock them
    streams = _Streams(entry.stdout, entry.stderr)
    return _start(program, unpack(entry.environ), streams, cwd=plan.cwd, held=held)


def start_forge(plan: WardenPlan, channel: socket.socket) -> int:
    """Start a forge that talks over `channel`; its process id."""
    log = os.path.join(plan.folder, "forge.log")
    environ = unpack(plan.environ) | dict.fromkeys(_NO_POOLS, "1")
    channel.set_inheritable(True)
    argv = [plan.python, _MAIN, "forge", str(channel.fileno()), process_setup.TITLE_PADDING]
    return _start(argv, environ, _Streams(log, log), cwd=plan.cwd, held=HELD)


def why_not_warm(entry: RankEntry, plan: WardenPlan) -> str:
    """The variable that a forked rank could not honour; empty if there is none."""
    for name in sorted(entry.environ.keys() | plan.environ.keys()):
        if name.startswith(_READ_AT_START) and entry.environ.get(name) != plan.environ.get(name):
            return name
    return ""


def can_go_on(before: RankEntry, entry: RankEntry) -> bool:
    """Whether the process that was started for an entry can take another entry's place."""
    names = before.environ.keys() | entry.environ.keys()
    return all(
        before.environ.get(name) == entry.environ.get(name)
        for name in names
        if name in _OF_PLACE or name.startswith(_READ_AT_START) or name.endswith("_VISIBLE_DEVICES")
    )


def _argv(command: RankCommand, python: str) -> list[str]:
    if command.kind == "program":
        return [command.target, *command.arguments]
    return [python, _MAIN, "rank", command.kind, command.target, *command.arguments]


class _Streams(NamedTuple):
    stdout: str
    stderr: str


def _start(
    argv: Sequence[str],
    environ: Mapping[str, str],
    streams: _Streams,
    *,
    cwd: str,
    held: Iterable[int],
) -> int:
    warden = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        process_setup.become_session(
            stdout=streams.stdout, stderr=streams.stderr, cwd=cwd, held=held
        )
        process_setup.die_with(warden, born_of=warden)
        os.execvpe(argv[0], list(argv), dict(environ))  # noqa: S606 - the user's own program
    except BaseException as error:  # noqa: BLE001 - this is a copy of the warden; it must end here
        process_setup.refuse(f"the rank cannot start: {argv[0]}: {error}")
    raise AssertionError("refuse does not return")
