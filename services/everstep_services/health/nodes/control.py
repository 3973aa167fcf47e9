"""The switches, and who may not join: how the documents in `CONTROL` change. Pure."""

import re
from collections.abc import Iterable, Mapping

from msgspec.structs import replace

from everstep.errors import EverstepError
from everstep.messages import ControlDocument, Exclusion
from everstep.messages.base import Time
from everstep.settings import KNOWN_SECTIONS

ACTUATORS = ("stop", "exclude", "restart", "replace", "shrink")
MODES = ("observe", "enforce")
COUNTS = ("catalog.keep_last", "catalog.keep_every_steps")
"""Settings that services follow while they run; all others are read when a service starts."""
_COUNT = re.compile(r"\d{1,9}", re.ASCII)


class BadSwitchError(EverstepError):
    """There is no such switch, or it cannot be set so."""


def blank() -> ControlDocument:
    """What holds where nothing was ever changed."""
    return ControlDocument(settings={}, changed_by="", reason="", modes={})


def switched(
    document: ControlDocument, changes: Mapping[str, str], by: str, reason: str
) -> ControlDocument:
    """The document after these changes; an empty value goes back to the default."""
    settings, modes, is_braked = dict(document.settings), dict(document.modes), document.is_braked
    for name, value in changes.items():
        actuator = name.removeprefix("modes.")
        if name == "brake":
            is_braked = _one_of(name, value, ("on", "off", "")) == "on"
        elif name.startswith("modes.") and actuator in ACTUATORS:
            _set(modes, actuator, _one_of(name, value, (*MODES, "")))
        elif name in COUNTS:
            _set(settings, name, _count(name, value))
        elif name in settings and not value:
            _set(settings, name, "")
        else:
            raise BadSwitchError(_no_switch(name))
    new = replace(document, settings=settings, modes=modes, is_braked=is_braked)
    return document if new == document else replace(new, changed_by=by, reason=reason)


def value_of(document: ControlDocument, name: str) -> str:
    """How a switch stands; empty for its default."""
    if name == "brake":
        return "on" if document.is_braked else ""
    if name.startswith("modes."):
        return document.modes.get(name.removeprefix("modes."), "")
    return document.settings.get(name, "")


def enforces_exclusions(document: ControlDocument) -> bool:
    """Whether health itself may exclude nodes, or only say that it would."""
    return not document.is_braked and document.modes.get("exclude") == "enforce"


def binds(document: ControlDocument) -> bool:
    """Whether exclusions by people bind: they do unless somebody has said otherwise."""
    return not document.is_braked and document.modes.get("exclude") != "observe"


def with_exclusion(document: ControlDocument, exclusion: Exclusion) -> ControlDocument:
    """The document with it, in the place of an older one of the same node."""
    kept = tuple(one for one in document.exclusions if one.node != exclusion.node)
    return replace(
        document,
        exclusions=(*kept, exclusion),
        changed_by=exclusion.by,
        reason=f"{exclusion.node} is excluded: {exclusion.reason}",
    )


def without_exclusion(document: ControlDocument, node: str) -> ControlDocument:
    """The document in which this node may join."""
    kept = tuple(one for one in document.exclusions if one.node != node)
    return replace(document, exclusions=kept)


def reconciled(
    document: ControlDocument, ours: Iterable[Exclusion], now: Time
) -> tuple[ControlDocument, list[Exclusion]]:
    """The document with exactly our own exclusions and those by people whose time is not over.

    And those by people that are over.
    """
    by_people = [one for one in document.exclusions if one.by != "health"]
    over = [one for one in by_people if one.until is not None and one.until <= now]
    kept = [one for one in by_people if one not in over]
    named = {one.node for one in kept}
    added = sorted((one for one in ours if one.node not in named), key=lambda one: one.node)
    return replace(document, exclusions=(*kept, *added)), over


def _no_switch(name: str) -> str:
    modes = ", ".join(f"modes.{one}" for one in ACTUATORS)
    known = f"there is no switch {name!r}: use brake, breaker, {modes}, {' or '.join(COUNTS)}"
    if name.partition(".")[0] in KNOWN_SECTIONS:
        return f"{known}; other settings hold from the start of their service on: everstep.toml"
    return known


def _count(name: str, value: str) -> str:
    if value and not _COUNT.fullmatch(value):
        raise BadSwitchError(f"{name} cannot be {value!r}: use a whole number, or nothing")
    return value


def _one_of(name: str, value: str, known: tuple[str, ...]) -> str:
    if value not in known:
        shown = ", ".join(repr(one) for one in known)
        raise BadSwitchError(f"{name} cannot be {value!r}: use one of {shown}")
    return value


def _set(values: dict[str, str], name: str, value: str) -> None:
    if value:
        values[name] = value
    else:
        values.pop(name, None)
