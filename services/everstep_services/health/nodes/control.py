"""Switches and exclusions: how the documents in `CONTROL` change; pure."""

import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial

from msgspec.structs import replace

from everstep.errors import EverstepError
from everstep.messages import ControlDocument, Exclusion
from everstep.messages.base import Time
from everstep.settings import KNOWN_SECTIONS

ACTUATORS = ("stop", "exclude", "restart", "replace", "shrink")
MODES = ("observe", "enforce")
_COUNT = re.compile(r"\d{1,9}", re.ASCII)
_DECIMAL = re.compile(r"\d{1,9}(\.\d{1,9})?", re.ASCII)
_ON_OFF = ("on", "off", "")


class BadSwitchError(EverstepError):
    """The switch does not exist, or cannot have this value."""


def _one_of(allowed: tuple[str, ...], name: str, value: str) -> str:
    if value not in allowed:
        shown = ", ".join(map(repr, allowed))
        raise BadSwitchError(f"{name} cannot be {value!r}: use one of {shown}")
    return value


def _count(name: str, value: str) -> str:
    if value and not _COUNT.fullmatch(value):
        raise BadSwitchError(f"{name} cannot be {value!r}: use a whole number, or nothing")
    return value


def _whole(least: int, most: int, name: str, value: str) -> str:
    if value and not (_COUNT.fullmatch(value) and least <= int(value) <= most):
        text = f"use a whole number from {least} to {most}, or nothing"
        raise BadSwitchError(f"{name} cannot be {value!r}: {text}")
    return value


def _number(least: float, most: float, name: str, value: str) -> str:
    if value and not (_DECIMAL.fullmatch(value) and least <= float(value) <= most):
        text = f"use a number from {least:g} to {most:.10g}, or nothing"
        raise BadSwitchError(f"{name} cannot be {value!r}: {text}")
    return value


def _some_of(allowed: tuple[str, ...], name: str, value: str) -> str:
    if value and not set(value.split(",")) <= set(allowed):
        text = f"use some of {','.join(allowed)}, or nothing"
        raise BadSwitchError(f"{name} cannot be {value!r}: {text}")
    return value


SETTINGS: Mapping[str, Callable[[str, str], str]] = {
    "catalog.keep_last": _count,
    "catalog.keep_every_steps": _count,
    "straggler.timings": partial(_one_of, _ON_OFF),
    "straggler.cpu": partial(_one_of, _ON_OFF),
    "straggler.window_s": partial(_number, 1, 3600),
    "straggler.window_steps": partial(_whole, 1, 1_000_000),
    "straggler.slower_ratio": partial(_number, 0.005, 10),
    "straggler.stop_below": partial(_number, 0.05, 0.95),
    "straggler.stop_reports": partial(_whole, 1, 10_000),
    "straggler.exclude_after_s": partial(_number, 1, 30 * 86400),
    "straggler.exclude_confidence": partial(_number, 0.05, 1),
    "straggler.exclude_causes": partial(
        _some_of, ("host", "device", "network", "compute", "unknown")
    ),
    "attribution.user_errors": partial(_one_of, (*MODES, "")),
    "attribution.repeat_offenders": partial(_one_of, (*MODES, "")),
    "attribution.offences": partial(_whole, 1, 1000),
    "attribution.offences_within_s": partial(_number, 60, 30 * 86400),
}
"""Settings that services follow while they run, each with the check of its value. A service reads
all others when it starts."""


def blank() -> ControlDocument:
    """The document where nobody has changed anything."""
    return ControlDocument(settings={}, changed_by="", reason="", modes={})


def switched(
    document: ControlDocument, changes: Mapping[str, str], by: str, reason: str
) -> ControlDocument:
    """The document with these changes; an empty value restores the default."""
    settings, modes, is_braked = dict(document.settings), dict(document.modes), document.is_braked
    for name, value in changes.items():
        actuator = name.removeprefix("modes.")
        if name == "brake":
            is_braked = _one_of(_ON_OFF, name, value) == "on"
        elif name.startswith("modes.") and actuator in ACTUATORS:
            _set(modes, actuator, _one_of((*MODES, ""), name, value))
        elif name in SETTINGS:
            _set(settings, name, SETTINGS[name](name, value))
        elif name in settings and not value:
            _set(settings, name, "")
        else:
            raise BadSwitchError(_no_switch(name))
    new = replace(document, settings=settings, modes=modes, is_braked=is_braked)
    if is_braked != document.is_braked:
        brake = (by, reason) if is_braked else ("", "")
        new = replace(new, braked_by=brake[0], brake_reason=brake[1])
    return document if new == document else replace(new, changed_by=by, reason=reason)


def value_of(document: ControlDocument, name: str) -> str:
    """The value of a switch; empty for its default."""
    if name == "brake":
        return "on" if document.is_braked else ""
    if name.startswith("modes."):
        return document.modes.get(name.removeprefix("modes."), "")
    return document.settings.get(name, "")


def enforces_exclusions(document: ControlDocument) -> bool:
    """Whether exclusions by health bind; by default health only records them."""
    return not document.is_braked and document.modes.get("exclude") == "enforce"


def binds(document: ControlDocument) -> bool:
    """Whether exclusions by people bind; by default they do."""
    return not document.is_braked and document.modes.get("exclude") != "observe"


def with_exclusion(document: ControlDocument, exclusion: Exclusion) -> ControlDocument:
    """The document with this exclusion, which replaces an older one of the same node."""
    kept = tuple(other for other in document.exclusions if other.node != exclusion.node)
    return replace(
        document,
        exclusions=(*kept, exclusion),
        changed_by=exclusion.by,
        reason=f"{exclusion.node} is excluded: {exclusion.reason}",
    )


def others_by(document: ControlDocument, exclusion: Exclusion, now: Time) -> int:
    """The number of other nodes that the author of this exclusion keeps out now."""
    return sum(
        other.by == exclusion.by
        and other.node != exclusion.node
        and (other.until is None or other.until > now)
        for other in document.exclusions
    )


def without_exclusion(
    document: ControlDocument, node: str, by: str, reason: str
) -> ControlDocument:
    """The document without exclusions of this node; the same document if it has none."""
    kept = tuple(other for other in document.exclusions if other.node != node)
    if kept == document.exclusions:
        return document
    why = f"{node} is included: {reason}"
    return replace(document, exclusions=kept, changed_by=by, reason=why)


def reconciled(
    document: ControlDocument, ours: Iterable[Exclusion], now: Time
) -> tuple[ControlDocument, list[Exclusion]]:
    """The document with exactly the exclusions in force, and those by people that are over.

    In force are `ours`, by health, and those by people whose time is not over.
    """
    by_people = [e for e in document.exclusions if e.by != "health"]
    over = [e for e in by_people if e.until is not None and e.until <= now]
    kept = [e for e in by_people if e not in over]
    named = {e.node for e in kept}
    added = sorted((e for e in ours if e.node not in named), key=lambda e: e.node)
    return replace(document, exclusions=(*kept, *added)), over


def _no_switch(name: str) -> str:
    modes = ", ".join(f"modes.{actuator}" for actuator in ACTUATORS)
    text = f"there is no switch {name!r}: use brake, breaker, {modes}, {', '.join(SETTINGS)}"
    if name.partition(".")[0] in KNOWN_SECTIONS:
        return f"{text}; a service reads other settings when it starts: change everstep.toml"
    return text


def _set(values: dict[str, str], name: str, value: str) -> None:
    if value:
        values[name] = value
    else:
        values.pop(name, None)
