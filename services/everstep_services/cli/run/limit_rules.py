"""How long ranks may go without progress, from the settings and the command line."""

from collections.abc import Iterable, Mapping

from everstep.units import seconds
from everstep_services.agent.settings import AgentSettings
from everstep_services.agent.stalls.limits import (
    BY_SETTING,
    OUTSIDE,
    LimitRules,
    read_limits,
)
from everstep_services.cli.run.arguments import Given, UsageError

_OPTION = "--limit"
_NVRX_SECTIONS = "--ft-rank-section-timeouts"
_NVRX_OUTSIDE = "--ft-rank-out-of-section-timeout"


def limits_of(given: Given, agent: AgentSettings) -> LimitRules:
    """The rules; `--limit` wins over the settings."""
    texts = given.repeated.get("limit", ())
    configured = _read(agent.limits, BY_SETTING)
    origins = dict.fromkeys(configured, BY_SETTING)
    of_others = dict(given.limit_origins)
    for text in texts:
        # The same once more was given as --limit, too.
        origin = of_others.pop(text, _OPTION)
        limits = _read((text,), _OPTION) if origin == _OPTION else _read_of_nvrx(text, origin)
        configured.update(limits)
        origins.update(dict.fromkeys(limits, origin))
    return LimitRules(
        agent,
        given.whole("warmup_steps") or agent.warmup_steps,
        configured,
        origins,
        is_outside_late=_is_outside_late(origins, given),
    )


def _is_outside_late(origins: Mapping[str, str], given: Given) -> bool:
    """NVRx looks at the time outside of sections only after the first step, unless it warms up."""
    of_sections = [
        text for text, origin in given.limit_origins.items() if _is_from(origin, _NVRX_SECTIONS)
    ]
    is_theirs = _is_from(origins.get(OUTSIDE, ""), _NVRX_OUTSIDE) and bool(of_sections)
    return is_theirs and not any(text.startswith("first-step=") for text in of_sections)


def _is_from(origin: str, option: str) -> bool:
    """Whether a limit is from this option, or from its key in a file of NVRx's launcher."""
    return origin == option or origin.endswith(f": {option[5:].replace('-', '_')}")


def _read_of_nvrx(text: str, origin: str) -> dict[str, float]:
    """A limit from an option or a key of NVRx, whose user has not written NAME=SECONDS."""
    section, _, value = text.rpartition("=")
    if not seconds(value):
        wrong = f"{section}: {value}" if _is_from(origin, _NVRX_SECTIONS) else value
        raise UsageError(f"{origin} {wrong!r}: write a number of seconds above 0, for instance 90")
    return _read((text,), origin)


def _read(texts: Iterable[str], origin: str) -> dict[str, float]:
    try:
        return read_limits(texts, origin)
    except ValueError as error:
        raise UsageError(str(error)) from error
