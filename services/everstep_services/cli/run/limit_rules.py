"""How long ranks may go without progress, from the settings and the command line."""

from collections.abc import Iterable, Mapping

from everstep_services.agent.settings import AgentSettings
from everstep_services.agent.stalls.limits import OUTSIDE, LimitRules
from everstep_services.cli.run.arguments import Given, UsageError, seconds
from trainer_sdk.layout import NAME_BYTES

_SETTING = "[agent] limits"
_OPTION = "--limit"
_NVRX_SECTIONS = "--ft-rank-section-timeouts"
_NVRX_OUTSIDE = "--ft-rank-out-of-section-timeout"


def limits_of(given: Given, agent: AgentSettings) -> LimitRules:
    """The rules; `--limit` wins over the settings."""
    texts = given.repeated.get("limit", ())
    configured = _read(agent.limits, _SETTING)
    origins = dict.fromkeys(configured, _SETTING)
    of_others = dict(given.limit_origins)
    for text in texts:
        limits = _read((text,), _OPTION)
        configured.update(limits)
        # The same once more was given as --limit, too.
        origins.update(dict.fromkeys(limits, of_others.pop(text, _OPTION)))
    return LimitRules(
        first_step_s=agent.first_step_limit_s,
        section_s=agent.section_limit_s,
        checkpoint_s=agent.checkpoint_limit_s,
        evaluation_s=agent.evaluation_limit_s,
        step_s=agent.step_limit_s,
        idle_compile_s=agent.idle_compile_s,
        interpreter_within_s=agent.interpreter_within_s,
        warmup_steps=given.whole("warmup_steps") or agent.warmup_steps,
        configured=configured,
        origins=origins,
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


def _read(texts: Iterable[str], origin: str) -> dict[str, float]:
    limits: dict[str, float] = {}
    for text in texts:
        name, equals, value = text.rpartition("=")
        limit_s = seconds(value)
        if not equals or not name.strip() or not limit_s:
            raise UsageError(f"{origin} {text!r}: write NAME=SECONDS, for instance forward=90s")
        if len(name.strip().encode()) > NAME_BYTES:
            raise UsageError(
                f"{origin} {text[:NAME_BYTES]!r}…: the names of sections are known by "
                f"{NAME_BYTES} bytes at most; write fewer"
            )
        limits[name.strip()] = limit_s
    return limits
