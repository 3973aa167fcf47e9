"""The session of a training, as the callbacks of frameworks use it; knows no framework.

A callback must never end a training: `harmless` turns what it raises into one warning. If two
integrations are at work, as Accelerate below Hugging Face's Trainer, the first one that reports a
step reports them all, and the other one is silent.
"""

import functools
import itertools
import re
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TypeVar, cast

from trainer_sdk.rank_session import Session, session
from trainer_sdk.sdk_log import warn_once

_KINDS = {"checkpoint": "checkpoint", "evaluation": "evaluation"}

Method = TypeVar("Method", bound=Callable[..., None])

_reporting: list[str] = []
"""The integration that reports this process's steps; empty before the first."""


def harmless(method: Method) -> Method:
    """The method, without its exceptions: each is one warning, and the training goes on."""

    @functools.wraps(method)
    def call(self: object, *arguments: Any, **named: Any) -> None:
        try:
            method(self, *arguments, **named)
        except Exception as error:  # noqa: BLE001 - the training must not end by a report
            warn_once(
                f"{type(self).__name__}.{method.__name__} has failed, and the training goes on "
                f"without it: {type(error).__name__}: {error}"
            )

    return cast("Method", call)


def check_version(distribution: str, lowest: str, below: str) -> bool:
    """Whether the installed release is in the tested range; if it is not, one line is printed."""
    try:
        installed = version(distribution)
    except PackageNotFoundError:
        return True  # it was put on the path by other means
    if _numbers(lowest) <= _numbers(installed) < _numbers(below):
        return True
    warn_once(
        f"{distribution} {installed} is not among the releases with which Everstep is tested "
        f"({lowest} up to, not including, {below}); the training goes on"
    )
    return False


def _numbers(release: str) -> tuple[int, ...]:
    """The leading numbers of a release, as (2, 6, 1) of 2.6.1rc1+cpu."""
    parts = (re.match(r"\d+", part) for part in release.partition("+")[0].split("."))
    return tuple(int(part[0]) for part in itertools.takewhile(bool, parts) if part)


class FrameworkSession:
    """The session of this rank, for one integration."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._session = session()
        self._open: list[str] = []

    @property
    def session(self) -> Session:
        """The session itself, always the same object."""
        return self._session

    @property
    def is_reporting(self) -> bool:
        """Whether this integration reports steps and sections; the first one that asks does."""
        if not _reporting:
            _reporting.append(self._name)
        if _reporting[0] == self._name:
            return True
        warn_once(
            f"{_reporting[0]} and {self._name} both report to Everstep: steps and sections are "
            f"those of {_reporting[0]}, so that none counts twice"
        )
        return False

    @property
    def should_stop(self) -> bool:
        """Whether the training must save and end now."""
        return self._session.should_stop

    @property
    def should_save(self) -> bool:
        """Whether the training must save now, and go on."""
        return self._session.should_save

    def start_at(self, step: int, total: int | None) -> None:
        """Note the step after which the training continues, and its last step, if it has one."""
        if self.is_reporting:
            self._session.start_at(step, total=total if total and total > 0 else None)

    def step(self, number: int) -> None:
        """Note a finished step."""
        if self.is_reporting:
            self._session.step(number)

    def heartbeat(self) -> None:
        """Note progress that is not a step."""
        if self.is_reporting:
            self._session.heartbeat()

    def begin(self, section: str) -> None:
        """Enter a section, unless it is open."""
        if section not in self._open and self.is_reporting:
            self._open.append(section)
            self._session.begin(section, _KINDS.get(section, ""))

    def end(self, section: str) -> None:
        """Leave a section and those that began after it, if it is open."""
        if section in self._open:
            del self._open[self._open.index(section) :]
            self._session.end(section)

    def end_all(self) -> None:
        """Leave every section that this integration has entered."""
        if self._open:
            self.end(self._open[0])
