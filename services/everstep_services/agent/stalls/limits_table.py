"""One table of every limit that may end a wait, and warnings where the wrong one ends first."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from everstep_services.agent.stalls.limits import (
    FIRST_STEP,
    HEARTBEAT,
    OUTSIDE,
    STEP,
    Limit,
    StallLimits,
)
from trainer_sdk.page_content import SectionKind

_HEARTBEAT = "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"
_MONITORING = "TORCH_NCCL_ENABLE_MONITORING"
_NCCL_GROUP_S, _GLOO_GROUP_S = 600.0, 1800.0
"""The timeout of torch's process groups, if the script sets none (torch 2.2 and later)."""
_NCCL_MONITOR_S = 480.0
"""How long torch's monitor waits for NCCL's watchdog (torch 2.4 and later; 600 s before)."""


@dataclass(frozen=True, slots=True)
class ExternalLimits:
    """Limits of others that may end a training that waits."""

    group_timeout_s: float | None = None
    """The timeout of the default process group, once a rank has shown it."""
    heartbeat_s: float | None = None
    """The timeout of NCCL's monitor, if the environment sets it."""
    preempt_grace_s: float | None = 600.0
    """None where another launcher gets the signals, and the agent gives ranks no time."""
    scheduler_grace_s: float | None = None
    """How long the scheduler waits before it kills, if that is known."""
    has_nccl: bool = False
    """The node has devices, so that ranks are likely to use NCCL."""
    is_monitored: bool = True
    """Torch's monitor of NCCL is not switched off."""
    limited_by: str = "--limit "
    """What people write before `NAME=SECONDS` to set a limit by hand."""

    @property
    def expected_group_s(self) -> float:
        """The process group's timeout, if the script has left it alone."""
        return _NCCL_GROUP_S if self.has_nccl else _GLOO_GROUP_S


@dataclass(frozen=True, slots=True)
class Misorder:
    """Two limits where the wrong one ends first."""

    about: str
    """Equal for the same two limits, whatever the length of ours."""
    text: str
    is_warning: bool = True


def external_limits(
    environ: Mapping[str, str],
    *,
    preempt_grace_s: float | None,
    scheduler_grace_s: float | None,
    has_nccl: bool = False,
    limited_by: str = "--limit ",
) -> ExternalLimits:
    """The limits that are known before any rank runs."""
    try:
        heartbeat_s = float(environ[_HEARTBEAT])
    except (KeyError, ValueError):
        heartbeat_s = None
    is_monitored = environ.get(_MONITORING, "1").lower() not in {"0", "n", "no", "f", "false"}
    return ExternalLimits(
        None, heartbeat_s, preempt_grace_s, scheduler_grace_s, has_nccl, is_monitored, limited_by
    )


def table(limits: StallLimits, others: ExternalLimits) -> list[str]:
    """One line for each limit: its name, its length, and where it comes from."""
    rows = [
        (place, time_text(limit.s), limit.origin or limit.source) for place, limit in _ours(limits)
    ]
    rows += [(place, time_text(s), source) for place, s, source in _theirs(others)]
    return [f"  {place:<22} {time:>8}  {source}" for place, time, source in rows]


def misorders(limits: StallLimits, others: ExternalLimits) -> list[Misorder]:
    """Each pair of limits where the wrong one ends first, and what to do about it.

    For our defaults that is one line and not a warning: learned limits soon replace them.
    """
    orders: list[Misorder] = []
    late = [
        (place, limit)
        for place, limit in _ours(limits)
        if limit.source != "default" and place not in {FIRST_STEP, STEP}
    ]
    for place, limit in late:
        if others.group_timeout_s and limit.s >= others.group_timeout_s:
            orders.append(_given_up(place, limit, others.group_timeout_s, others.limited_by))
        if others.heartbeat_s and limit.s >= others.heartbeat_s:
            text = (
                f"{_HEARTBEAT}={others.heartbeat_s:g} ends a rank before a stall in {place} "
                f"is found ({time_text(limit.s)}): raise it above {limit.s:g}"
            )
            orders.append(Misorder(f"monitor {place}", text))
    if unlearned := _given_up_unlearned(limits, others):
        orders.append(unlearned)
    grace_s, ours_s = others.scheduler_grace_s, others.preempt_grace_s
    if grace_s and ours_s is not None and ours_s > grace_s:
        text = (
            f"--preempt-grace {ours_s:g} is longer than the scheduler waits "
            f"({time_text(grace_s)}): ranks that save longer are killed; lower it, or ask the "
            "scheduler for more"
        )
        orders.append(Misorder("grace", text))
    return orders


def _given_up(place: str, limit: Limit, timeout_s: float, limited_by: str) -> Misorder:
    """A learned limit is a multiple of what was seen: a limit below it could be a wrong one."""
    is_ours = limit.source == "configured"
    shorter = f", or set {limited_by}{place}={timeout_s / 2:g}" if is_ours else ""
    text = (
        f"the process group gives up after {time_text(timeout_s)}, before a stall in "
        f"{place} is found ({time_text(limit.s)}, {limit.source}): its collectives fail first, and "
        f"name no rank; give init_process_group a longer timeout{shorter}"
    )
    return Misorder(f"group {timeout_s:g} {place}", text)


def _given_up_unlearned(limits: StallLimits, others: ExternalLimits) -> Misorder | None:
    timeout_s = others.group_timeout_s or others.expected_group_s
    limit = limits.section("", SectionKind.PLAIN)
    step = limits.by_hand(STEP)
    if limit.source != "default" or min(limit.s, step.s if step else limit.s) <= timeout_s:
        return None
    text = (
        f"until limits are learned, the process group gives up after {time_text(timeout_s)}"
        f"{'' if others.group_timeout_s else ', unless the script says otherwise'}, before a "
        f"stall is found ({time_text(limit.s)}, {limit.source}): its collectives fail first, and "
        f"name no rank; {others.limited_by}{STEP}={timeout_s / 2:g} would find it first, once "
        f"there are steps"
    )
    return Misorder(f"group {timeout_s:g}", text, is_warning=False)


def _ours(limits: StallLimits) -> Iterator[tuple[str, Limit]]:
    yield FIRST_STEP, limits.first_step()
    yield STEP, limits.step()
    yield OUTSIDE, limits.section("", SectionKind.PLAIN)
    if limits.by_hand(HEARTBEAT) is not None:
        yield HEARTBEAT, limits.heartbeat()
    for name in sorted(limits.named()):
        yield name, limits.section(name, SectionKind.PLAIN)
    yield "other sections", Limit(limits.rules.agent.section_limit_s, "default")
    yield "checkpoints", Limit(limits.rules.agent.checkpoint_limit_s, "default")
    yield "evaluation", Limit(limits.rules.agent.evaluation_limit_s, "default")


def _theirs(others: ExternalLimits) -> Iterator[tuple[str, float, str]]:
    if others.group_timeout_s:
        yield "process group", others.group_timeout_s, "its timeout"
    else:
        backend = "NCCL" if others.has_nccl else "gloo"
        yield "process group", others.expected_group_s, f"torch's default with {backend}"
    if others.heartbeat_s:
        yield "NCCL's monitor", others.heartbeat_s, _HEARTBEAT
    elif others.has_nccl and others.is_monitored:
        yield "NCCL's monitor", _NCCL_MONITOR_S, "torch's default"
    if others.preempt_grace_s is not None:
        yield "grace when preempted", others.preempt_grace_s, "--preempt-grace"
    if others.scheduler_grace_s:
        yield "the scheduler's grace", others.scheduler_grace_s, "[agent] scheduler_grace_s"


def time_text(seconds: float) -> str:
    """A time, as a person writes it."""
    for unit, size in (("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size or (seconds >= size and seconds % size == 0):
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"


_SAID_ONCE = "how long a rank may go without progress"


class LineWriter(Protocol):
    """Prints a line for people."""

    def __call__(self, text: str, *, is_warning: bool = False) -> None: ...


class LimitNotices:
    """Shows the table once, and each pair of limits in the wrong order once."""

    def __init__(self, limits: StallLimits, others: ExternalLimits, say: LineWriter) -> None:
        self._is_for_job = False
        """One node of a job shows them for all."""
        self._limits = limits
        self._others = others
        self._say = say
        self._has_shown = False
        self._said: set[str] = set()

    def show(self, *, is_for_job: bool) -> None:
        """Ranks are being started; one node of a job shows the limits for all nodes."""
        self._is_for_job = is_for_job
        if is_for_job and not self._has_shown:
            self._has_shown = True
            self._show_all()
        self.compare()

    def _show_all(self) -> None:
        """The table if a person has set a limit, otherwise one line: nobody has asked for more."""
        if any(limit.origin for _, limit in _ours(self._limits)):
            self._say(f"{_SAID_ONCE}; what is learned takes the place of defaults")
            for line in table(self._limits, self._others):
                self._say(line)
            return
        first = self._limits.first_step()
        later = self._limits.section("", SectionKind.PLAIN)
        self._say(
            f"{_SAID_ONCE}: {time_text(first.s)} until its first step, then {time_text(later.s)}; "
            f"a shorter limit is learned from its steps, or set by --limit"
        )

    def group_waits(self, timeout_s: float) -> None:
        """A rank has shown the timeout of its process group; 0 if it has none."""
        if timeout_s:
            self._others = replace(self._others, group_timeout_s=timeout_s)
            self.compare()

    def compare(self) -> None:
        """A limit may have changed."""
        if not self._is_for_job:
            return
        for misorder in misorders(self._limits, self._others):
            if misorder.about not in self._said:
                self._said.add(misorder.about)
                self._say(misorder.text, is_warning=misorder.is_warning)
