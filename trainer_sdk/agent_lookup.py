"""Finds the agent that watches this process, if there is one."""

import _signal  # type: ignore[import-not-found]  # `signal` imports more than all of this
import os

from trainer_sdk import layout
from trainer_sdk.bootstrap import agent_link as links
from trainer_sdk.bootstrap.agent_link import AgentLink
from trainer_sdk.sdk_log import warn_once

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

_HEAD_BYTES = 8 * (layout.PID + 1)
_ALONE = (
    "no agent watches this process, so its session reports nothing; start it with `everstep run`"
)
_OFF = frozenset({"off", "no", "0"})


def own_link(environ: "Mapping[str, str]") -> AgentLink:
    """The rank's link to its agent; without an agent, a link to nowhere, after one warning.

    The bootstrap has opened the link of every Python script. If the rank is another program, the
    first of its Python processes that asks opens the link here.
    """
    if links.bootstrap_link is not None and links.bootstrap_link.attached:
        return links.bootstrap_link  # the bootstrap has deferred the signals that would end it
    if layout.PAGE_VARIABLE in environ:
        _ignore_notices()
    link = AgentLink({} if _is_taken(environ) else environ)
    if link.attached:
        link.up()
    elif layout.PAGE_VARIABLE not in environ:
        _attach_if_launched(link, environ)
    if link.attached:
        from trainer_sdk.bootstrap.import_hook import watch_compiling  # the bootstrap has done it

        watch_compiling(link)
    return link


def _ignore_notices() -> None:
    """Ignore the notices of Slurm, which go to every process of a step: this one asks its page."""
    for number in (_signal.SIGUSR1, _signal.SIGUSR2):
        if _signal.getsignal(number) == _signal.SIG_DFL:
            try:
                _signal.signal(number, _signal.SIG_IGN)
            except ValueError:  # only a program's first thread may
                return


def _attach_if_launched(link: AgentLink, environ: "Mapping[str, str]") -> None:
    """Attach to an agent if another launcher has started this rank; else warn once."""
    if environ.get("EVERSTEP_ATTACH", "").lower() not in _OFF:
        from trainer_sdk import attachment, launchers  # our own ranks do not need it

        place = launchers.launched_rank(environ)
        if place is not None:
            attachment.attach(environ, place, link)
            return
    if environ.get("LOCAL_RANK", "0") == "0":
        warn_once(_ALONE)


def _is_taken(environ: "Mapping[str, str]") -> bool:
    """Whether another process is the rank, and has started this one."""
    try:
        with open(environ[layout.PAGE_VARIABLE], "rb") as page:
            words = memoryview(page.read(_HEAD_BYTES)).cast("q")
            return words[layout.MAGIC_AT] == layout.MAGIC and words[layout.PID] != os.getpid()
    except (KeyError, OSError, ValueError, TypeError, IndexError):
        return False
