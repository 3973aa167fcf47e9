"""The switches that operators have set at run time, which override the settings."""

from dataclasses import dataclass, replace
from typing import Any, Literal

from everstep.messages import ControlDocument, SwitchInForce
from everstep.messages.documents.health import combined
from everstep.slow_rank_causes import CURABLE, OF_NODE

Mode = Literal["observe", "enforce"]

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
    switches = combined(*documents)
    changed: dict[str, Any] = {
        field: _read(switches.settings.get(name), getattr(default, field))
        for name, field in SETTINGS.items()
    }
    for name, field in _MODES.items():
        mode = switches.modes.get(name.removeprefix("modes."))
        is_enforced = mode == "enforce" and not switches.is_braked
        changed[field] = "enforce" if is_enforced else "observe"
    return replace(default, **changed)


SETTINGS = {
    "straggler.timings": "is_on",
    "straggler.cpu": "is_cpu_timed",
    **{
        f"straggler.{name}": name
        for name in (
            *("window_s", "window_steps", "slower_ratio", "stop_below", "stop_reports"),
            *("exclude_after_s", "exclude_confidence", "exclude_causes"),
        )
    },
}
"""Each switch that has the name of a setting, and the field that it changes."""
_MODES = {"modes.stop": "stop_mode", "modes.exclude": "exclude_mode"}
_FIELDS = {**SETTINGS, **_MODES}

Source = Literal["default", "settings", "control", "control of the job", "brake"]


def explained(
    settings: StragglerSwitches, cluster: ControlDocument | None, job: ControlDocument | None
) -> tuple[SwitchInForce, ...]:
    """Every switch by name. `settings` is what holds where nothing was switched."""
    now = in_force(settings, cluster, job)
    return tuple(
        SwitchInForce(
            name=name,
            value=_written(getattr(now, field)),
            source=_source(name, settings, (cluster, job)),
        )
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
    value, text = getattr(settings, _FIELDS[name]), document.settings.get(name)
    return bool(_read(text, value) == _read(text, _different(value)))


def _different(value: Any) -> Any:
    match value:
        case bool():
            return not value
        case tuple():
            return ()
        case _:
            return value + 1


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


def _read(text: str | None, default: Any) -> Any:
    """The value that an operator has written; the default for a text that makes no sense."""
    match default:
        case bool():
            return {"on": True, "off": False}.get(text or "", default)
        case tuple():
            causes = tuple(text.split(",")) if text else default
            return causes if set(causes) <= set(CURABLE) else default
        case _:
            try:
                value = type(default)(text)
            except (TypeError, ValueError):
                return default
            return value if 0 < value < 1e9 else default  # not a NaN either
