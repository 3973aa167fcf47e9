"""Sets a rank up before the user's script: streams, CPUs, fault handler, recorder, torch hooks."""

import errno
import io
import os
import sys

from trainer_sdk import layout
from trainer_sdk.bootstrap import agent_link as links
from trainer_sdk.bootstrap.agent_link import AgentLink
from trainer_sdk.bootstrap.deferred_signals import defer
from trainer_sdk.bootstrap.torch_hooks import arm_flight_recorder, set_up_torch

TYPE_CHECKING = False  # `typing` would cost every rank a third of the whole bootstrap
if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping
    from typing import TextIO

    from _typeshed import ReadableBuffer


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class LastingOutput(io.FileIO):
    """A file that drops what its disk has no room for, and tells how much once there is room.

    The output of a rank is a file. Under another launcher it would be a pipe or a terminal, which
    is never full: a training must not end because of a `print`.
    """

    _lost = 0

    def write(self, data: "ReadableBuffer", /) -> int:
        """Write as much as fits now; what does not fit counts as written."""
        try:
            if self._lost:
                super().write(
                    b"\n[everstep: the disk was full: %d bytes of output are lost]\n" % self._lost
                )
                self._lost = 0
            return super().write(data)
        except OSError as error:
            if error.errno not in _FULL:
                raise
            size = memoryview(data).nbytes
            self._lost += size
            return size


def make_streams_last(*, at_once: bool) -> None:
    """Give the interpreter standard streams that outlive a full disk; foreign ones stay."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):
            stream.flush()
            lasting = _lasting(stream, at_once=at_once)
            setattr(sys, name, lasting)
            setattr(sys, f"__{name}__", lasting)


def _lasting(stream: io.TextIOWrapper, *, at_once: bool) -> "TextIO":
    raw = LastingOutput(stream.fileno(), "wb", closefd=False)
    raw.name = stream.name  # `<stdout>`, as scripts may ask
    lasting = io.TextIOWrapper(
        raw if at_once else io.BufferedWriter(raw),
        encoding=stream.encoding,
        errors=stream.errors,
        # Python buffers files in blocks: a killed rank would lose its last lines.
        line_buffering=True,
        write_through=at_once,
    )
    lasting.mode = stream.mode  # type: ignore[misc]  # as the interpreter itself does
    return lasting


def set_up_rank(environ: "MutableMapping[str, str]") -> AgentLink:
    """Open the link to the agent, and prepare the evidence for the case that the rank dies.

    This changes nothing that the user has set, takes no signal from a script that handles it, and
    never keeps the script from running.
    """
    make_streams_last(at_once=bool(environ.get("PYTHONUNBUFFERED")))
    bind_to_cpus(environ)
    links.bootstrap_link = link = AgentLink(environ)
    defer(link)
    _fault_handler(link.folder)
    if link.folder:
        arm_flight_recorder(environ, link.folder)
        environ.setdefault(
            "TORCHELASTIC_ERROR_FILE", os.path.join(link.folder, layout.ELASTIC_ERROR_FILE)
        )
    set_up_torch(link, environ)
    if link.folder and environ.get(layout.INJECTION_VARIABLE) == "1":
        _injection(environ, link)
    return link


def _fault_handler(folder: str) -> None:
    import faulthandler  # imported after the streams are set

    if not faulthandler.is_enabled() and sys.stderr is not None:
        faulthandler.enable()
    if folder:
        write_stacks_to(folder)


def write_stacks_to(folder: str) -> None:
    """Have the last signal write the stacks of all threads to a file in this folder."""
    import faulthandler  # as above

    try:
        file = io.FileIO(os.path.join(folder, layout.STACKS_FILE), "wb")
    except OSError:  # the rank will end without its stacks
        return
    faulthandler.register(layout.LAST_SIGNAL, file, chain=True)


def _injection(environ: "MutableMapping[str, str]", link: AgentLink) -> None:
    from trainer_sdk import inject  # imported only where faults are allowed

    try:
        inject.arm(environ, link)
    except (OSError, ValueError) as error:
        sys.stderr.write(f"everstep: faults cannot be injected as requested: {error}\n")


_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
_PREFERRED = 1
_BIND = 2
_PREFERRED_MANY = 5
_BITS = 1024


def bind_to_cpus(environ: "Mapping[str, str]") -> None:
    """Use only the chosen CPUs, and take memory near them first. A failure is one line."""
    cpus = environ.get(layout.CPUS_VARIABLE, "")
    if not cpus:
        return
    try:
        os.sched_setaffinity(0, _numbers(cpus))
        is_strict = environ.get(layout.STRICT_VARIABLE) == "1"
        _place_memory(_numbers(environ.get(layout.MEMORY_NODES_VARIABLE, "")), is_strict=is_strict)
    except (OSError, ValueError) as error:
        sys.stderr.write(f"everstep: this rank is not bound to the CPUs {cpus}: {error}\n")


def _numbers(text: str) -> set[int]:
    cpus: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return cpus


def _place_memory(nodes: set[int], *, is_strict: bool) -> None:
    """Prefer memory of these NUMA nodes; where they have none left, the kernel takes others.

    With `is_strict` it takes no others, and a kernel that forbids the call is one line. Otherwise
    such a kernel places memory near the CPU that first touches it, which is near for a bound rank.
    """
    import ctypes  # only bound ranks need it

    number = _SET_MEMPOLICY.get(os.uname().machine)
    if number is None or not nodes or max(nodes) >= _BITS:
        return
    words = (ctypes.c_ulong * (_BITS // (8 * ctypes.sizeof(ctypes.c_ulong))))()
    for node in nodes:
        bits = 8 * ctypes.sizeof(ctypes.c_ulong)
        words[node // bits] |= 1 << node % bits
    policy = _BIND if is_strict else _PREFERRED if len(nodes) == 1 else _PREFERRED_MANY
    failed = ctypes.CDLL(None, use_errno=True).syscall(
        ctypes.c_long(number), ctypes.c_int(policy), words, ctypes.c_ulong(_BITS)
    )
    if failed and is_strict:
        why = os.strerror(ctypes.get_errno())
        sys.stderr.write(f"everstep: this rank takes memory of any NUMA node: {why}\n")
