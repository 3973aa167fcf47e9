"""Sets up torch once the script has imported it: counted steps, worker server, fast starts.

It also keeps torch's compiler from being imported by a training that does not compile: to import
the compiler takes as long as to import torch. The base class of all optimizers has four methods
that exclude themselves from compilation at each call, and the first call imports the compiler for
that. While the compiler is not loaded, nothing is compiled, so the plain methods can run instead.
"""

import os
import sys
from time import monotonic_ns

from trainer_sdk import layout
from trainer_sdk.bootstrap.agent_link import AgentLink, ShortPath
from trainer_sdk.bootstrap.fast_store_wait import wait_for_store_fast
from trainer_sdk.bootstrap.import_hook import watch_compiling, when_imported
from trainer_sdk.bootstrap.torch_exit import served_at, wait_at_exit

TYPE_CHECKING = False  # `typing` would cost every rank a third of the whole bootstrap
if TYPE_CHECKING:
    from collections.abc import Callable, MutableMapping
    from types import CodeType
    from typing import Any


_RENAMED_IN = (2, 9)
RERUN_MACHINE = "megatron.core.rerun_state_machine"
"""Megatron's module that runs iterations with unexpected results again."""


def set_up_torch(link: AgentLink, environ: "MutableMapping[str, str]") -> None:
    """Set torch up when it is loaded; a script without torch pays nothing."""
    wait_at_exit()
    when_imported("torch", lambda: _set_up(link, environ))


def _set_up(link: AgentLink, environ: "MutableMapping[str, str]") -> None:
    try:
        _use_old_names(environ)
        _count_steps(link)
        watch_compiling(link)
        wait_for_store_fast()
        bypass_compiler()
        if link.attached:
            when_imported("torch.utils.data._utils.signal_handling", _guard_data_workers)
            when_imported(RERUN_MACHINE, lambda: _watch_reruns(link, environ))
        if link.folder:
            _serve(link.folder)
    # A torch without distributed, a release that has moved a name, a folder that is gone: to
    # watch a training must never end it.
    except Exception as error:  # noqa: BLE001
        sys.stderr.write(f"everstep: torch cannot be watched completely: {error}\n")


def serve_torch(folder: str) -> None:
    """Start torch's worker server in a rank that another launcher has started.

    This sets no environment variables: torch's flight recorder stays as the user has it.
    """
    wait_at_exit()
    when_imported("torch", lambda: _serve_attached(folder))


def _serve_attached(folder: str) -> None:
    try:
        if os.path.lexists(path := os.path.join(folder, layout.WORKER_SOCKET)):
            os.unlink(path)  # of an earlier process of this rank
        _serve(folder)
    except Exception as error:  # noqa: BLE001  as in `_set_up`
        sys.stderr.write(f"everstep: torch's collectives cannot be watched: {error}\n")


def _watch_reruns(link: AgentLink, environ: "MutableMapping[str, str]") -> None:
    from trainer_sdk.bootstrap import megatron_rerun  # other scripts pay nothing

    megatron_rerun.watch(link, environ)


def _guard_data_workers() -> None:
    from trainer_sdk.bootstrap import data_workers  # a script_runner without torch pays nothing

    data_workers.guard()


def _use_old_names(environ: "MutableMapping[str, str]") -> None:
    import torch  # the script has imported it

    release = tuple(int(part) for part in torch.__version__.split(".")[:2])
    for new, old in OLD_NAMES.items():
        if release < _RENAMED_IN and new in environ:
            environ.setdefault(old, environ[new])


def _count_steps(link: AgentLink) -> None:
    from torch.optim.optimizer import (  # the script has imported it
        register_optimizer_step_post_hook,
    )

    from trainer_sdk.bootstrap.group_timeout import (
        group_timeout_ns,  # only a script with torch pays for it
    )

    step, steps, by = layout.STEP, layout.STEPS, layout.COUNTED_BY
    progress, longest = layout.PROGRESS_NS, layout.LONGEST_STEP_NS
    compiled, ends = layout.COMPILED_NS, layout.ENDS_AT
    in_ends = layout.ENDS_ENTRIES - 1

    def after_step(*_: object) -> None:
        words = link.words
        if words[by] != layout.BY_OPTIMIZER:
            if words[by] == layout.BY_SDK:
                return
            words[by] = layout.BY_OPTIMIZER
        now = monotonic_ns()
        made = words[steps] + 1
        words.cast("B").cast("d")[ends + (made & in_ends)] = now / 1e9
        words[steps] = made
        words[step] = link.resumed_at + made
        if made == 1:
            words[layout.GROUP_TIMEOUT_NS] = group_timeout_ns() or 0
            if not link.has_session:  # it may be about to report the step with the script's number
                link.first_step()
        else:
            if made == 2 and not words[layout.FIRST_STEP_NS]:
                link.first_step(words[step] - 1)
            if now - words[progress] > words[longest]:
                words[longest] = max(words[longest], now - max(words[progress], words[compiled]))
        words[progress] = now

    register_optimizer_step_post_hook(after_step)


def _serve(folder: str) -> None:
    from torch._C._distributed_c10d import _WorkerServer  # likewise

    socket = os.path.join(folder, layout.WORKER_SOCKET)
    with ShortPath(socket) as path, _Silence():
        server = _WorkerServer(path)
        served_at(path, socket)
    # It lives as long as the process: stopping it would hold the interpreter's lock while it joins
    # threads that may wait for that lock. `wait_at_exit` lets them finish.
    _keep_for_ever(server)


def _keep_for_ever(thing: object) -> None:
    import ctypes  # torch has loaded it

    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


class _Silence:
    """Discards stderr for a moment: the server prints a line in each rank of each round."""

    def __enter__(self) -> None:
        self._kept = os.dup(2)
        nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        os.dup2(nowhere, 2)
        os.close(nowhere)

    def __exit__(self, *_: object) -> None:
        os.dup2(self._kept, 2)
        os.close(self._kept)


_DYNAMO = "torch._dynamo"


def bypass_compiler() -> None:
    """Call the four plain methods, until something else imports the compiler."""
    if _DYNAMO in sys.modules:
        return
    from torch.optim import Optimizer  # the script has imported torch

    wrapper_code = _wrapper_code()
    if wrapper_code is None:
        return  # another release of torch: the import happens, and costs its time
    wrapped = {
        name: method for name, method in vars(Optimizer).items() if _code(method) is wrapper_code
    }
    plain = {name: _plain(method) for name, method in wrapped.items()}
    for name, method in plain.items():
        setattr(Optimizer, name, method)

    def restore() -> None:
        for name, method in wrapped.items():
            if vars(Optimizer).get(name) is plain[name]:
                setattr(Optimizer, name, method)

    when_imported(_DYNAMO, restore)


def _plain(wrapped: "Callable[..., Any]") -> "Callable[..., Any]":
    from functools import wraps  # torch has loaded it

    method = wrapped.__wrapped__  # type: ignore[attr-defined]

    @wraps(method)
    def run(*arguments: "Any", **named: "Any") -> "Any":
        # A caller may have kept this method from before the compiler was imported.
        return (wrapped if _DYNAMO in sys.modules else method)(*arguments, **named)

    return run


def _wrapper_code() -> "CodeType | None":
    """The code of the wrapper that torch puts around each such method."""
    decorate = getattr(sys.modules.get("torch._compile"), "_disable_dynamo", None)
    return None if decorate is None else _code(decorate(lambda: None))


def _code(function: "Any") -> "CodeType | None":
    return getattr(function, "__code__", None)


# A newer torch warns about the second name; an older torch knows only that name.
OLD_NAMES = {
    "TORCH_FR_BUFFER_SIZE": "TORCH_NCCL_TRACE_BUFFER_SIZE",
    "TORCH_FR_DUMP_TEMP_FILE": "TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
}
_RING_ENTRIES = "2000"


def arm_flight_recorder(environ: "MutableMapping[str, str]", folder: str) -> None:
    """Set its variables; a variable that the user has set, under either name, stays."""
    prefix = os.path.join(folder, layout.FLIGHT_PREFIX)
    for name, value in (
        ("TORCH_FR_BUFFER_SIZE", _RING_ENTRIES),
        ("TORCH_FR_DUMP_TEMP_FILE", prefix),
        ("TORCH_NCCL_DUMP_ON_TIMEOUT", "1"),
        # With stack traces, torch waits for the GIL while it dumps: a rank that holds the GIL would
        # have no dump, or would hang in the dump.
        ("TORCH_INCLUDE_STACK_TRACE", "False"),
    ):
        if OLD_NAMES.get(name, name) not in environ:
            environ.setdefault(name, value)
