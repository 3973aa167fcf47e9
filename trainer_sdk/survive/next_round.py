"""Makes a process that has survived a round the rank of the next one."""

import os
import sys
from contextlib import suppress

from trainer_sdk import layout
from trainer_sdk.bootstrap.process_setup import redirect
from trainer_sdk.bootstrap.rank_setup import write_stacks_to
from trainer_sdk.bootstrap.torch_hooks import arm_flight_recorder
from trainer_sdk.environment import environ
from trainer_sdk.rank_session import Session
from trainer_sdk.wire import GoOn, unpack

_OUTPUT = os.O_WRONLY | os.O_APPEND | os.O_CREAT
_OF_FOLDER = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
_SERVED = (layout.WORKER_SOCKET, layout.INJECTION_SOCKET)


def begin_round(run: Session, order: GoOn) -> None:
    """Have this process be the rank that the order names; OSError if it cannot."""
    before = environ.get(layout.FOLDER_VARIABLE, "")
    change_environment(unpack(order.environ), before)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    redirect(order.stderr, 2, _OUTPUT)
    redirect(order.stdout, 1, _OUTPUT)
    folder = environ[layout.FOLDER_VARIABLE]
    arm_flight_recorder(environ, folder)
    write_stacks_to(folder)
    for name in _SERVED:
        with suppress(OSError):  # it is not served, or there already
            os.link(os.path.join(before, name), os.path.join(folder, name))
    run._begin_round(environ)  # noqa: SLF001 - the same package


def change_environment(entry: dict[str, str], before: str) -> None:
    """Set the variables of the next round, and remove those that name the folder `before`.

    A variable that the script has set stays, unless it is one of the rank's.
    """
    for name in _OF_FOLDER:
        if before and environ.get(name, "").startswith(before):
            del environ[name]
    for name in [name for name in environ if name.startswith("EVERSTEP_")]:
        if name not in entry:
            del environ[name]
    environ.update(entry)
