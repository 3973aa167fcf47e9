"""Arms a rank before the user's script: streams, fault handler, flight recorder, torch's hooks."""

import os
import sys

from trainer_sdk import layout
from trainer_sdk.bootstrap import agent_link as links
from trainer_sdk.bootstrap.agent_link import AgentLink
from trainer_sdk.bootstrap.deferred_signals import defer
from trainer_sdk.bootstrap.recorder_settings import arm_flight_recorder
from trainer_sdk.bootstrap.torch_hooks import arm_torch

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import MutableMapping


def arm(environ: "MutableMapping[str, str]") -> AgentLink:
    """Open the way to the agent, and prepare what tells later why a rank died.

    Nothing that the user has set is changed, no signal is taken from a script that handles it,
    and nothing here may keep the script from running.
    """
    _streams(environ)
    _fault_handler()
    links.bootstrap_link = link = AgentLink(environ)
    defer(link)
    if link.folder:
        arm_flight_recorder(environ, link.folder)
        environ.setdefault(
            "TORCHELASTIC_ERROR_FILE", os.path.join(link.folder, layout.ELASTIC_ERROR_FILE)
        )
    arm_torch(link, environ)
    if link.folder and environ.get(layout.INJECTION_VARIABLE) == "1":
        _injection(environ, link)
    return link


def _streams(environ: "MutableMapping[str, str]") -> None:
    # They are files, which Python buffers by the block: a rank that is killed would take its
    # last lines with it.
    at_once = bool(environ.get("PYTHONUNBUFFERED"))
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(line_buffering=True, write_through=at_once)


def _fault_handler() -> None:
    import faulthandler  # after the streams are in place

    if not faulthandler.is_enabled() and sys.stderr is not None:
        faulthandler.enable()


def _injection(environ: "MutableMapping[str, str]", link: AgentLink) -> None:
    from trainer_sdk import inject  # only where faults are allowed

    try:
        inject.arm(environ, link)
    except (OSError, ValueError) as error:
        sys.stderr.write(f"everstep: faults cannot be injected as wished: {error}\n")
