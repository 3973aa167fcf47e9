"""How long ranks may go without progress, as the settings and the command line say."""

from everstep_services.agent.settings import AgentSettings
from everstep_services.agent.stalls.limits import LimitRules
from everstep_services.cli.running.arguments import Given, UsageError, seconds


def limits_of(given: Given, agent: AgentSettings) -> LimitRules:
    """The rules; what --limit says wins over the settings."""
    configured = _read(agent.limits, "[agent] limits")
    configured.update(_read(given.repeated.get("limit", ()), "--limit"))
    return LimitRules(
        first_step_s=agent.first_step_limit_s,
        section_s=agent.section_limit_s,
        checkpoint_s=agent.checkpoint_limit_s,
        evaluation_s=agent.evaluation_limit_s,
        step_s=agent.step_limit_s,
        idle_compile_s=agent.idle_compile_s,
        interpreter_within_s=agent.interpreter_within_s,
        configured=configured,
    )


def _read(texts: tuple[str, ...] | list[str], origin: str) -> dict[str, float]:
    limits: dict[str, float] = {}
    for text in texts:
        name, equals, value = text.rpartition("=")
        limit_s = seconds(value)
        if not equals or not name.strip() or not limit_s:
            raise UsageError(f"{origin} {text!r}: write NAME=SECONDS, for instance forward=90s")
        limits[name.strip()] = limit_s
    return limits
