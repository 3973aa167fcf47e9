"""One table of every limit that may end a wait, ours and those of others, in their right order."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from everstep_services.agent.stalls.limits import FIRST_STEP, OUTSIDE, STEP, Limit, Limits
from trainer_sdk.page import Kind

_HEARTBEAT = "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"


@dataclass(frozen=True, slots=True)
class Others:
    """What else may end a training that waits."""

    group_timeout_s: float | None = None
    """Of the default process group, once a rank has shown it."""
    heartbeat_s: float | None = None
    """Of NCCL's monitor, where the environment sets it."""
    preempt_grace_s: float = 600.0
    scheduler_grace_s: float | None = None
    """How long the scheduler waits before it kills, where somebody has said so."""


def others_of(
    environ: Mapping[str, str], *, preempt_grace_s: float, scheduler_grace_s: float | None
) -> Others:
    """What is known before any rank runs."""
    try:
        heartbeat_s = float(environ[_HEARTBEAT])
    except (KeyError, ValueError):
        heartbeat_s = None
    return Others(None, heartbeat_s, preempt_grace_s, scheduler_grace_s)


def table(limits: Limits, others: Others) -> list[str]:
    """One line for each limit: what it is for, how long, and who says so."""
    rows = [(what, time_text(limit.s), limit.source) for what, limit in _ours(limits)]
    rows += [(what, time_text(s), source) for what, s, source in _theirs(others)]
    return [f"  {what:<22} {time:>8}  {source}" for what, time, source in rows]


def warnings(limits: Limits, others: Others) -> list[str]:
    """Each pair of limits of which the wrong one ends first, and what to do about it.

    Defaults of ours are not held against others: what is learned soon takes their place.
    """
    said: list[str] = []
    timeout_s, grace_s = others.group_timeout_s, others.scheduler_grace_s
    late = [
        (what, limit)
        for what, limit in _ours(limits)
        if limit.source != "default" and what not in {FIRST_STEP, STEP}
    ]
    for what, limit in late:
        if timeout_s and limit.s >= timeout_s:
            said.append(
                f"the process group gives up after {time_text(timeout_s)}, before a stall in "
                f"{what} is found ({time_text(limit.s)}): its collectives fail first, and blame "
                "nobody; give init_process_group a longer timeout, or set "
                f"--limit {what}={timeout_s / 2:g}"
            )
        if others.heartbeat_s and limit.s >= others.heartbeat_s:
            said.append(
                f"{_HEARTBEAT}={others.heartbeat_s:g} ends a rank before a stall in {what} "
                f"is found ({time_text(limit.s)}): raise it above {limit.s:g}"
            )
    if grace_s and others.preempt_grace_s > grace_s:
        said.append(
            f"--preempt-grace {others.preempt_grace_s:g} is longer than the scheduler waits "
            f"({time_text(grace_s)}): ranks that save longer are killed; lower it, or ask the "
            "scheduler for more"
        )
    return said


def _ours(limits: Limits) -> Iterator[tuple[str, Limit]]:
    yield FIRST_STEP, limits.first_step()
    yield STEP, limits.step()
    yield OUTSIDE, limits.section("", Kind.PLAIN)
    for name in sorted(limits.named()):
        yield name, limits.section(name, Kind.PLAIN)
    yield "other sections", Limit(limits.rules.section_s, "default")
    yield "checkpoints", Limit(limits.rules.checkpoint_s, "default")
    yield "evaluation", Limit(limits.rules.evaluation_s, "default")


def _theirs(others: Others) -> Iterator[tuple[str, float, str]]:
    if others.group_timeout_s:
        yield "process group", others.group_timeout_s, "its timeout"
    if others.heartbeat_s:
        yield "NCCL's monitor", others.heartbeat_s, _HEARTBEAT
    yield "grace when preempted", others.preempt_grace_s, "--preempt-grace"
    if others.scheduler_grace_s:
        yield "the scheduler's grace", others.scheduler_grace_s, "[agent] scheduler_grace_s"


def time_text(seconds: float) -> str:
    """A time as people say it."""
    for unit, size in (("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size or (seconds >= size and seconds % size == 0):
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"
