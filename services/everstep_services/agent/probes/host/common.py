"""Shared by the parts of the host check: their results, and counts since the last look."""

from functools import partial

from everstep.messages.facts.health import CheckResult
from everstep_services.agent.probes.base import CheckState, Look, finding

NAME = "host"
MIB = 1 << 20
_BOOT = "boot"
result = partial(finding, NAME)
"""The result for one part of the host."""


def worst(subject: str, troubles: list[tuple[CheckState, str]]) -> CheckResult:
    """The worst of the troubles of a part, as (state, reason); `ok` if there are none."""
    if not troubles:
        return result(subject)
    states = {state for state, _ in troubles}
    state = next(name for name in ("failed", "warning") if name in states)
    reasons = "; ".join(reason for _, reason in troubles)
    return result(subject, state, reasons, "report" if state == "failed" else "watch")


def boot_id(look: Look) -> str:
    """The id of this boot: counters begin anew with each."""
    return look.path("proc/sys/kernel/random/boot_id").read_text().strip()


def grown(look: Look, name: str, count: int) -> int | None:
    """The growth of a counter since the last look; None at the first look of a boot."""
    boot, noted = boot_id(look), look.memory.get(name)
    look.memory[name] = {_BOOT: boot, "count": count}
    if not isinstance(noted, dict) or noted.get(_BOOT) != boot:
        return None
    before = noted.get("count")
    return count - before if isinstance(before, int) and before <= count else None
