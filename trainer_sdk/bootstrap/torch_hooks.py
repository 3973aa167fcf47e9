"""Sets up torch once the script has imported it: counted steps, worker server, fast starts."""

import os
import sys
from time import monotonic_ns

from trainer_sdk import layout
from trainer_sdk.bootstrap.agent_link import AgentLink, ShortPath
from trainer_sdk.bootstrap.compiler_bypass import bypass_compiler
from trainer_sdk.bootstrap.fast_store_wait import wait_for_store_fast
from trainer_sdk.bootstrap.import_hook import watch_compiling, when_imported
from trainer_sdk.bootstrap.recorder_settings import OLD_NAMES

TYPE_CHECKING = False  # `typing` would cost every rank a third of the whole bootstrap
if TYPE_CHECKING:
    from collections.abc import MutableMapping


_RENAMED_IN = (2, 9)


def set_up_torch(link: AgentLink, environ: "MutableMapping[str, str]") -> None:
    """Set torch up when it is loaded; a script without torch pays nothing."""
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
    when_imported("torch", lambda: _serve_attached(folder))


def _serve_attached(folder: str) -> None:
    try:
        if os.path.lexists(path := os.path.join(folder, layout.WORKER_SOCKET)):
            os.unlink(path)  # of an earlier process of this rank
        _serve(folder)
    except Exception as error:  # noqa: BLE001  as in `_set_up`
        sys.stderr.write(f"everstep: torch's collectives cannot be watched: {error}\n")


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

    from trainer_sdk.group_timeout import group_timeout_ns  # only a script with torch pays for it

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
        made = words[step] + 1
        words.cast("B").cast("d")[ends + (made & in_ends)] = now / 1e9
        words[steps] = words[step] = made
        if made == 1:
            words[layout.GROUP_TIMEOUT_NS] = group_timeout_ns() or 0
            link.first_step()
        elif now - words[progress] > words[longest]:
            words[longest] = max(words[longest], now - max(words[progress], words[compiled]))
        words[progress] = now

    register_optimizer_step_post_hook(after_step)


def _serve(folder: str) -> None:
    from torch._C._distributed_c10d import _WorkerServer  # likewise

    with ShortPath(os.path.join(folder, layout.WORKER_SOCKET)) as path, _Silence():
        server = _WorkerServer(path)
    # It lives as long as the process: to stop it prints a line on stderr and gains nothing.
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
