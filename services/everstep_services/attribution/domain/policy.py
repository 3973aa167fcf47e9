"""Actions on verdicts beyond a restart: stop a repeated bug, replace a repeat offender.

Each rule only observes unless it is switched on. A restart never waits for a rule: rendezvous has
decided about the restart long before.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, assert_never

from everstep.messages import ControlDocument, PastIncident, VerdictReached
from everstep.messages.documents.health import combined
from everstep.verdict_causes import DETERMINISTIC_CAUSES, NODE_CAUSES, RETRIES
from everstep_services.attribution.domain.past import earlier

Mode = Literal["observe", "enforce"]
Action = Literal["stop", "replace"]
ActOutcome = Literal["done", "failed", "observed"]
RuleId = Literal["stop.user_error", "replace.repeat_offender"]
_SURE = 0.5
"""Verdicts with less confidence lead to no action, and do not count."""


@dataclass(frozen=True, slots=True)
class PolicySwitches:
    """Whether each rule acts, and from when on."""

    user_errors: Mode = "observe"
    repeat_offenders: Mode = "observe"
    offences: int = 2
    """The number of verdicts that make a node a repeat offender …"""
    offences_within_s: float = 14 * 86_400.0
    """… when they came within this time."""


@dataclass(frozen=True, slots=True)
class Decision:
    """The action on one verdict, real or only observed."""

    rule: RuleId
    mode: Mode
    reason: str
    node: str | None = None
    """The node to replace."""
    evidence: tuple[str, ...] = ()
    """The incidents that it rests on, besides the present one."""

    @property
    def action(self) -> Action:
        """What is done."""
        match self.rule:
            case "stop.user_error":
                return "stop"
            case "replace.repeat_offender":
                return "replace"
            case _ as never:
                assert_never(never)


def in_force(default: PolicySwitches, *documents: ControlDocument | None) -> PolicySwitches:
    """The switches with the changes of documents; a later document overrides an earlier one.

    The brake, and an actuator that is switched to observe, leave every rule observing. A value that
    makes no sense, as a newer release may have written it, changes nothing.
    """
    switches = combined(*documents)
    values = switches.settings

    def mode(name: str, otherwise: Mode, actuator: str) -> Mode:
        if switches.is_braked or switches.modes.get(actuator) == "observe":
            return "observe"
        switch = values.get(f"attribution.{name}", otherwise)
        return "enforce" if switch == "enforce" else "observe"

    return replace(
        default,
        user_errors=mode("user_errors", default.user_errors, "stop"),
        repeat_offenders=mode("repeat_offenders", default.repeat_offenders, "exclude"),
        offences=int(_number(values, "attribution.offences", default.offences)),
        offences_within_s=_number(
            values, "attribution.offences_within_s", default.offences_within_s
        ),
    )


def due(
    verdict: VerdictReached,
    step: int | None,
    past: Sequence[PastIncident],
    switches: PolicySwitches,
) -> list[Decision]:
    """The decisions of the rules. `step` is the training's last, `past` has the oldest first.

    An inconclusive verdict asks for nothing.
    """
    if verdict.is_inconclusive or verdict.confidence < _SURE:
        return []
    before = list(earlier(past, verdict.incident))
    return [*_user_error(verdict, step, before, switches), *_offenders(verdict, before, switches)]


def _user_error(
    verdict: VerdictReached,
    step: int | None,
    past: Sequence[PastIncident],
    switches: PolicySwitches,
) -> Iterator[Decision]:
    """Stop if the same bug came twice in a row without a step between: a retry has confirmed it."""
    is_of_older = verdict.retry not in RETRIES
    otherwise = "as_is" if verdict.is_transient else "after_change"
    retry = otherwise if is_of_older or verdict.is_transient else verdict.retry
    if verdict.cause not in DETERMINISTIC_CAUSES or retry != "after_change":
        return
    last = next((incident for incident in reversed(past) if incident.job == verdict.job), None)
    is_same = last is not None and verdict.fingerprint and last.fingerprint == verdict.fingerprint
    has_gone_on = last is not None and step is not None and step > (last.step or 0)
    # Rounds that fail before the training is back are one incident: its own verdict counts them.
    is_in_a_row = verdict.advice == "stop"
    if not is_in_a_row and (not is_same or has_gone_on):
        return
    yield Decision(
        "stop.user_error",
        switches.user_errors,
        f"the same failure came again after a restart, without known progress between (fingerprint "
        f"{verdict.fingerprint}, {verdict.cause}): {verdict.reason}",
        evidence=(last.incident,) if last is not None and is_same else (),
    )


def _offenders(
    verdict: VerdictReached, past: Sequence[PastIncident], switches: PolicySwitches
) -> Iterator[Decision]:
    """The node that most verdicts of any job name, this one among them: one for each verdict."""
    if not _is_offence(verdict):
        return
    recent = [
        incident
        for incident in past
        if _is_offence(incident)
        and (verdict.at - incident.at).total_seconds() <= switches.offences_within_s
    ]
    offences = {
        node: [incident.incident for incident in recent if node in incident.nodes]
        for node in verdict.culprit_nodes
    }
    node = max(offences, key=lambda node: len(offences[node]), default="")
    if not node or len(offences[node]) + 1 < switches.offences:
        return
    days = switches.offences_within_s / 86_400
    yield Decision(
        "replace.repeat_offender",
        switches.repeat_offenders,
        f"{len(offences[node]) + 1} verdicts within {days:.3g} days name {node}, limit "
        f"{switches.offences}: {verdict.reason}",
        node=node,
        evidence=tuple(offences[node][-8:]),
    )


def _is_offence(verdict: VerdictReached | PastIncident) -> bool:
    """Whether it speaks against its nodes: others would not help where something must change."""
    return verdict.cause in NODE_CAUSES and verdict.retry not in {"after_change", "never"}


def _number(values: Mapping[str, str], name: str, default: float) -> float:
    try:
        value = float(values[name])
    except (KeyError, ValueError):
        return default
    return value if 1 <= value < 1e9 else default  # not a NaN either
