"""The services that `everstep up` and `everstep run` alone run: one line each.

A service is imported when it starts, so that the first ones serve while the next are imported.
"""

import importlib
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from socket import socket
from typing import Any

import msgspec

from everstep.bus import BusSettings
from everstep.runtime import Parts
from everstep.settings import DEFAULT, Loaded, Settings
from everstep_services.agent.runtime.urgent_work import imports_stand_back
from everstep_services.cli.machine.state import StateDir
from everstep_services.cli.settings_sections import SECTIONS, section_class


@dataclass(frozen=True, slots=True)
class StackContext:
    """The parts that a service gets."""

    state: StateDir
    settings: Loaded
    bus: BusSettings
    """How a service logs in."""
    listener: socket
    """Where the API is served."""
    report_unsent: Callable[[str], None] | None = None
    """Reports messages to people that could not be sent, where history ends with a job."""


Service = Callable[[StackContext], AbstractAsyncContextManager[Parts]]


def stack_sections() -> dict[str, type[Settings]]:
    """The settings of everything that runs here."""
    names = (*SECTIONS_OF_ALL, *(name for name in SERVICES if name in SECTIONS))
    return {name: section_class(name) for name in names}


def imported(name: str) -> Service:
    """How a service is opened. Its import stands back for ranks that are started meanwhile."""
    with imports_stand_back():
        return SERVICES[name](name)


def _replica(name: str) -> Service:
    """As in production, with its facts in the state directory until the bus has them."""
    open_service: Any = importlib.import_module(f"everstep_services.{name}.replica").opened
    settings = section_class(name)

    def opened(context: StackContext) -> AbstractAsyncContextManager[Parts]:
        spool = context.state.path / "spool" / name
        parts: AbstractAsyncContextManager[Parts] = open_service(
            context.settings.section(settings), context.bus, spool
        )
        return parts

    return opened


def _logins(_: str) -> Service:
    """As in production, with keys that follow from the operator's in the state directory."""
    from everstep.bus.auth.accounts import Operator
    from everstep_services.logins.service import opened as open_service
    from everstep_services.logins.settings import LoginSettings

    def opened(context: StackContext) -> AbstractAsyncContextManager[Parts]:
        valid_s = context.settings.section(LoginSettings).valid_s
        operator = Operator.opened(context.state.path / "nats")
        return open_service(operator.signers.valid_for(valid_s), context.bus)

    return opened


def _history(_: str) -> Service:
    """As in production, with its database in the state directory unless a setting names one."""
    from everstep_services.history.notifications.settings import NotifySettings
    from everstep_services.history.replica import opened as open_service
    from everstep_services.history.settings import ApiSettings, HistorySettings

    def opened(context: StackContext) -> AbstractAsyncContextManager[Parts]:
        settings = context.settings.section(HistorySettings)
        if context.settings.origins["history.database_url"] == DEFAULT:
            url = f"sqlite:///{context.state.path / 'history.db'}"
            settings = msgspec.structs.replace(settings, database_url=url)
        api = context.settings.section(ApiSettings)
        token_file = context.state.token_file
        notify = context.settings.section(NotifySettings)
        return open_service(
            settings, api, context.bus, context.listener, token_file, notify, context.report_unsent
        )

    return opened


SECTIONS_OF_ALL = ("api", "bus", "log", "notify", "observe")
"""Sections of the settings that several services read, or the process."""
SERVICES: dict[str, Callable[[str], Service]] = {
    "rendezvous": _replica,
    "health": _replica,
    "catalog": _replica,
    "straggler": _replica,
    "attribution": _replica,
    "logins": _logins,
    "history": _history,
}
"""In the order of their start: first what ranks wait for, last what takes longest to import."""
