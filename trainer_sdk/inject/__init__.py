"""Injects faults on purpose, for tests of the recovery: `inject.now("hang", for_s=5)`.

It works only in a rank of a job that was started with `everstep run --allow-injection`, or where
the script itself gives `allow=True`. Other ranks do not import this package.
"""

import os
import threading
from collections.abc import Callable, Mapping

from trainer_sdk import layout
from trainer_sdk.bootstrap import agent_link as links
from trainer_sdk.bootstrap.agent_link import AgentLink
from trainer_sdk.bootstrap.import_hook import when_imported
from trainer_sdk.environment import environ
from trainer_sdk.inject.catalog import BadFaultError, FaultRequest, fault_request
from trainer_sdk.inject.rank_faults import InjectedError, check, make, take_signal
from trainer_sdk.sdk_log import quoted

__all__ = ["BadFaultError", "InjectedError", "NotAllowedError", "at_step", "now", "prepare"]

_armed = False


class NotAllowedError(RuntimeError):
    """Faults are not allowed in this process."""

    def __init__(self) -> None:
        super().__init__(
            "no faults may be injected: this job was not started with --allow-injection; a "
            "script may give allow=True itself"
        )


def now(
    fault: str,
    *,
    for_s: float | None = None,
    amount: int | None = None,
    target: str = "",
    allow: bool = False,
) -> None:
    """Make this fault here and now; `BadFaultError` if it is unknown or cannot be made."""
    wished = fault_request(fault, for_s=for_s, amount=amount, target=target)
    _inject(wished, _link(allow=allow))


def at_step(
    step: int,
    fault: str,
    *,
    for_s: float | None = None,
    amount: int | None = None,
    target: str = "",
    allow: bool = False,
) -> None:
    """Make this fault once, as soon as this step is finished."""
    wished = fault_request(fault, for_s=for_s, amount=amount, target=target)
    _at_step(step, wished, _link(allow=allow))


def prepare() -> None:
    """In the main thread: let any thread call `now` later."""
    _take_signal()


def arm(environ: Mapping[str, str], link: AgentLink) -> None:
    """Before the script: accept faults from the agent, and plan those that `environ` names."""
    from trainer_sdk.inject.catalog import planned
    from trainer_sdk.inject.listener import listen

    _take_signal()
    listen(link)
    for step, wished in planned(environ):
        _at_step(step, wished, link)


def _link(*, allow: bool) -> AgentLink:
    if not allow and environ.get(layout.INJECTION_VARIABLE) != "1":
        raise NotAllowedError
    _take_signal()
    if links.bootstrap_link is not None:
        return links.bootstrap_link
    from trainer_sdk.rank_session import session

    return session()._link  # noqa: SLF001 - the same package


def _take_signal() -> None:
    global _armed  # noqa: PLW0603 - a process has one main thread
    if not _armed and threading.current_thread() is threading.main_thread():
        take_signal()
        _armed = True
    if not _armed:
        raise BadFaultError("the first call of trainer_sdk.inject must be in the main thread")


def _inject(wished: FaultRequest, link: AgentLink) -> None:
    check(wished)
    _announce(wished, link)
    make(wished, lambda: link.words)


def _announce(wished: FaultRequest, link: AgentLink) -> None:
    """Report the fault before it is made, so that it is not taken for a real one."""
    lasts = "null" if wished.for_s is None else f"{wished.for_s!r}"
    fields = f'"fault":"{wished.fault.name}","lasts_s":{lasts},"target":{quoted(wished.target)}'
    link.send("injected", fields)
    os.write(2, f"everstep: injecting {wished.fault.name}: {wished.fault.effect}\n".encode())


def _at_step(step: int, wished: FaultRequest, link: AgentLink) -> None:
    from trainer_sdk.inject.session_hooks import after_step

    once = threading.Lock()

    def act() -> None:
        if once.acquire(blocking=False):
            _inject(wished, link)

    after_step(step, act)
    # If the script has no session, torch's optimizer counts the steps.
    when_imported("torch", lambda: _watch_optimizer(link, step, act))


def _watch_optimizer(link: AgentLink, step: int, act: Callable[[], None]) -> None:
    from torch.optim.optimizer import (  # the script has imported it
        register_optimizer_step_post_hook,
    )

    def after_step(*_: object) -> None:
        words = link.words
        if words[layout.COUNTED_BY] == layout.BY_OPTIMIZER and words[layout.STEP] >= step:
            act()

    register_optimizer_step_post_hook(after_step)
