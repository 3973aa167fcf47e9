"""Binds a rank to the CPUs that its agent has chosen, before anything of the script is imported."""

import os
import sys

from trainer_sdk import layout

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
_PREFERRED = 1
_BIND = 2
_PREFERRED_MANY = 5
_BITS = 1024


def bind(environ: "Mapping[str, str]") -> None:
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
