"""The switches that operators have set at run time, which override the settings."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

from everstep.messages import ControlDocument
from everstep.slow_rank_causes import CURABLE, OF_NODE

Mode = Literal["observe", "enforce"]
T = TypeVar("T", int, float)

SWITCHED_OFF = "timings were switched off"
"""Why a finding is over, whichever path noticed it first."""


@dataclass(frozen=True, slots=True)
class StragglerSwitches:
    """How slow ranks of one job are sought, and what may be done about them."""

    is_on: bool = True
    is_cpu_timed: bool = True
    window_s: float = 10.0
    window_steps: int = 0
    """0 for as many as `window_s` says."""
    slower_ratio: float = 0.03
    stop_below: float = 0.7
    stop_reports: int = 10
    exclude_after_s: float = 900.0
    exclude_confidence: float = 0.7
    exclude_causes: tuple[str, ...] = OF_NODE
    stop_mode: Mode = "observe"
    exclude_mode: Mode = "observe"


def in_force(default: StragglerSwitches, *documents: ControlDocument | None) -> StragglerSwitches:
    """The switches with the changes of documents: a later one overrides an earlier one.

    The brake is on if any document has it on. A value that makes no sense, as a newer release may
    have written it, changes nothing.
    """
    values: dict[str, str] = {}
    modes: dict[str, str] = {}
    is_braked = False
    for document in documents:
        if document is not None:
            values |= document.settings
            modes |= document.modes
            is_braked = is_braked or document.is_braked
    return replace(
        default,
        is_on=_is_on(values, "straggler.timings", default.is_on),
        is_cpu_timed=_is_on(values, "straggler.cpu", default.is_cpu_timed),
        window_s=_number(values, "straggler.window_s", default.window_s),
        window_steps=_number(values, "straggler.window_steps", default.window_steps),
        slower_ratio=_number(values, "straggler.slower_ratio", default.slower_ratio),
        stop_below=_number(values, "straggler.stop_below", default.stop_below),
        stop_reports=_number(values, "straggler.stop_reports", default.stop_reports),
        exclude_after_s=_number(values, "straggler.exclude_after_s", default.exclude_after_s),
        exclude_confidence=_number(
            values, "straggler.exclude_confidence", default.exclude_confidence
        ),
        exclude_causes=_causes(values.get("straggler.exclude_causes"), default.exclude_causes),
        stop_mode=_mode(modes, "stop", is_braked=is_braked),
        exclude_mode=_mode(modes, "exclude", is_braked=is_braked),
    )


_FIELDS = {
    "straggler.timings": "is_on",
    "straggler.cpu": "is_cpu_timed",
    **{
        f"straggler.{name}": name
        for name in (
            *("window_s", "window_steps", "slower_ratio", "stop_below", "stop_reports"),
            *("exclude_after_s", "exclude_confidence", "exclude_causes"),
        )
    },
    "modes.stop": "stop_mode",
    "modes.exclude": "exclude_mode",
}
"""Each switch, and the field that it changes."""


Source = Literal["default", "settings", "control", "control of the job", "brake"]


@dataclass(frozen=True, slots=True)
class SwitchValue:
    """The value of one switch in force, and where it is from."""

    name: str
    value: str
    source: Source


def explained(
    settings: StragglerSwitches, cluster: ControlDocument | None, job: ControlDocument | None
) -> tuple[SwitchValue, ...]:
    """Every switch by name. `settings` is what holds where nothing was switched."""
    now = in_force(settings, cluster, job)
    return tuple(
        SwitchValue(name, _written(getattr(now, field)), _source(name, settings, (cluster, job)))
        for name, field in sorted(_FIELDS.items())
    )


def _source(
    name: str,
    settings: StragglerSwitches,
    documents: tuple[ControlDocument | None, ControlDocument | None],
) -> Source:
    field = _FIELDS[name]
    is_braked = any(document is not None and document.is_braked for document in documents)
    for document, source in zip(reversed(documents), _OF_DOCUMENTS, strict=True):
        if document is not None and _acts(document, name, settings):
            return "brake" if is_braked and name.startswith("modes.") else source
    return (
        "default" if getattr(settings, field) == getattr(StragglerSwitches(), field) else "settings"
    )


_OF_DOCUMENTS: tuple[Source, Source] = ("control of the job", "control")


def _acts(document: ControlDocument, name: str, settings: StragglerSwitches) -> bool:
    """Whether a document decides a switch, whatever the settings say."""
    if name.startswith("modes."):
        return name.removeprefix("modes.") in document.modes
    field = _FIELDS[name]
    changed: dict[str, Any] = {field: _different(getattr(settings, field))}
    other = replace(settings, **changed)
    return bool(
        getattr(in_force(settings, document), field) == getattr(in_force(other, document), field)
    )


def _different(value: object) -> object:
    match value:
        case bool():
            return not value
        case tuple():
            return ()
        case int() | float():
            return value + 1
        case _:
            return None


def _written(value: object) -> str:
    """As an operator writes it."""
    match value:
        case bool():
            return "on" if value else "off"
        case tuple():
            return ",".join(value)
        case float():
            return f"{value:g}"
        case _:
            return str(value)


def _is_on(values: Mapping[str, str], name: str, default: bool) -> bool:
    return {"on": True, "off": False}.get(values.get(name, ""), default)


def _number(values: Mapping[str, str], name: str, default: T) -> T:
    try:
        value = type(default)(values[name])
    except (KeyError, ValueError):
        return default
    return value if 0 < value < 1e9 else default  # not a NaN either


def _causes(value: str | None, default: tuple[str, ...]) -> tuple[str, ...]:
    causes = tuple(value.split(",")) if value else default
    return causes if set(causes) <= set(CURABLE) else default


def _mode(modes: Mapping[str, str], actuator: str, *, is_braked: bool) -> Mode:
    return "enforce" if modes.get(actuator) == "enforce" and not is_braked else "observe"
