"""Sets a rank up before the user's script: streams, fault handler, flight recorder, torch hooks."""

import os
import sys

from trainer_sdk import layout
from trainer_sdk.bootstrap import agent_link as links
from trainer_sdk.bootstrap.agent_link import AgentLink
from trainer_sdk.bootstrap.cpu_affinity import bind
from trainer_sdk.bootstrap.deferred_signals import defer
from trainer_sdk.bootstrap.torch_hooks import arm_flight_recorder, set_up_torch

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import MutableMapping


def set_up_rank(environ: "MutableMapping[str, str]") -> AgentLink:
    """Open the link to the agent, and prepare the evidence for the case that the rank dies.

    This changes nothing that the user has set, takes no signal from a script that handles it, and
    never keeps the script from running.
    """
    _streams(environ)
    bind(environ)
    _fault_handler()
    links.bootstrap_link = link = AgentLink(environ)
    defer(link)
    if link.folder:
        arm_flight_recorder(environ, link.folder)
        environ.setdefault(
            "TORCHELASTIC_ERROR_FILE", os.path.join(link.folder, layout.ELASTIC_ERROR_FILE)
        )
    set_up_torch(link, environ)
    if link.folder and environ.get(layout.INJECTION_VARIABLE) == "1":
        _injection(environ, link)
    return link


def _streams(environ: "MutableMapping[str, str]") -> None:
    # stdout and stderr are files, which Python buffers in blocks: a killed rank would lose its
    # last lines.
    at_once = bool(environ.get("PYTHONUNBUFFERED"))
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(line_buffering=True, write_through=at_once)


def _fault_handler() -> None:
    import faulthandler  # imported after the streams are set

    if not faulthandler.is_enabled() and sys.stderr is not None:
        faulthandler.enable()


def _injection(environ: "MutableMapping[str, str]", link: AgentLink) -> None:
    from trainer_sdk import inject  # imported only where faults are allowed

    try:
        inject.arm(environ, link)
    except (OSError, ValueError) as error:
        sys.stderr.write(f"everstep: faults cannot be injected as requested: {error}\n")
