"""Judges from budgets whether another round follows a failed one, and how long its backoff is."""

from dataclasses import dataclass, replace
from typing import Literal

from everstep.incident_causes import SECONDARY, meaning_of
from everstep.messages import Budget, JobSpec, Option
from everstep_services.rendezvous.settings import RendezvousSettings

HOUR_S = 3600.0
CANNOT_START = "stop.script_cannot_start"
MOVE, STOP = "restart.elsewhere", "stop.asked"
ORDERED = "stop.ordered"
ASKS = frozenset({"move", "stop"})
"""What a rank may ask for by its exit code; any other word asks for nothing."""


@dataclass(frozen=True, slots=True)
class RoundFailure:
    """How a round ended, as far as the decision needs it."""

    cause: str
    """A move that is asked for again without a new step is the exit of a rank."""
    lived_s: float
    """Seconds since the round formed."""
    steps_s: float
    """Seconds since its first step; 0 when it made none."""
    step: int | None
    """The last step that it reached, if reported."""
    fingerprint: str = ""
    exit_code: int | None = None
    is_of_code: bool = False
    """Whether the type of the exception means that the program is wrong."""
    is_on_all_ranks: bool = False
    """Whether every rank failed in this way."""
    asks: str = ""
    """`move`: the ranks ask for other nodes; `stop`: they ask for the end of the job."""
    has_ever_stepped: bool = False
    """Whether the job has made a step, in this round or before."""

    @property
    def is_counted(self) -> bool:
        """Whether the restart after it counts against the budgets."""
        return meaning_of(self.cause).costs_restart

    @property
    def can_recur(self) -> bool:
        """Whether the script may fail in this way at each start."""
        return meaning_of(self.cause).can_recur


@dataclass(frozen=True, slots=True)
class RestartHistory:
    """The restarts and failures so far."""

    restarts: int = 0
    refilled: int = 0
    recent: int = 0
    """Restarts that may lie within the last hour."""
    quick_failures: int = 0
    idle_rounds: int = 0
    is_moved: bool = False
    """The ranks have moved since the last new step."""
    best_step: int | None = None
    fingerprints: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RestartDecision:
    """The action, and everything that must be recorded about it."""

    action: Literal["restart", "stop"]
    rule: str
    reason: str
    past: RestartHistory
    """The history for the next failure, with this restart counted."""
    delay_s: float = 0.0
    exit_code: int = 1
    backoff: str = ""
    """Why the restart waits, if it does."""
    advice: str = ""
    """Why the job should be stopped, when rendezvous only advises it."""
    advice_rule: str = ""
    """The rule of the advice."""
    budgets: tuple[Budget, ...] = ()
    considered: tuple[Option, ...] = ()
    missing: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RestartRules:
    """The limits in force."""

    spec: JobSpec
    settings: RendezvousSettings
    may_stop: bool = False
    """Whether to stop for a failure that will probably come again."""
    may_stop_start: bool = False
    """Whether to stop for a script that cannot start."""
    is_braked: bool = False
    stop_ordered: str = ""
    """Who stopped the job before its round ended, and why."""


def judge(failure: RoundFailure, past: RestartHistory, rules: RestartRules) -> RestartDecision:
    """Decide between another round and the end."""
    progress, before = _progress(failure, past), past
    moves_again = past.is_moved and not _has_gone_on(failure, progress, rules.settings)
    if failure.asks == "move" and moves_again:
        failure = replace(failure, cause="rank_exited")
    past = _with(failure, past, progress, rules.settings)
    budgets = _budgets(past, rules.spec)
    unspent = replace(past, restarts=before.restarts, recent=before.recent)
    left = _not_below_zero(_budgets(unspent, rules.spec))  # a stop costs no restart
    if rules.stop_ordered or failure.asks == "stop":
        reason = rules.stop_ordered or "a rank rejects its result, and a restart would not mend it"
        other = (Option(action="restart", rejected=reason),)
        rule = ORDERED if rules.stop_ordered else STOP
        return RestartDecision(
            "stop", rule, reason, past, exit_code=93, budgets=left, considered=other
        )
    spent = next((budget for budget in budgets if budget.name in _HARD and budget.left < 0), None)
    if failure.is_counted and spent is not None:
        reason = f"{_NAMES[spent.name]} are spent: {spent.limit} of {spent.limit}"
        other = (Option(action="restart", rejected=reason),)
        rule = f"stop.{spent.name}_spent"
        return RestartDecision("stop", rule, reason, past, budgets=left, considered=other)
    stop = _enough(failure, past, progress, rules)
    if stop is not None and stop[2]:
        other = (Option(action="restart", rejected=stop[1]),)
        return RestartDecision(
            "stop", stop[0], stop[1], past, exit_code=93, budgets=left, considered=other
        )
    rule, advice = (stop[0], stop[1]) if stop is not None else ("", "")
    return replace(_another(failure, past, rules, budgets, advice), advice_rule=rule)


def _another(
    failure: RoundFailure,
    past: RestartHistory,
    rules: RestartRules,
    budgets: tuple[Budget, ...],
    advice: str,
) -> RestartDecision:
    delay_s = 0.0
    if failure.can_recur and past.quick_failures:
        steps = rules.settings.backoff_s
        # The first failure is not taken for a script that cannot start: a file system may return.
        waits = past.quick_failures + (past.quick_failures == 1 and _cannot_start(failure, rules))
        delay_s = steps[min(waits, len(steps)) - 1]
    budgets = _not_below_zero(budgets)
    left = ", ".join(f"{b.left} of {b.limit} {_NAMES[b.name]} left" for b in budgets)
    reason = left or _limit_elsewhere(rules.spec)
    if failure.asks == "move":
        moved = "it asks for other nodes"
        reason = (
            f"{moved} again without a new step: {reason}"
            if failure.is_counted
            else (f"{moved}, which does not count against the budget")
        )
    elif not failure.is_counted:
        reason = f"a round that ended by {failure.cause} does not count against the budget"
    backoff = ""
    if delay_s:
        rounds = "round" if past.quick_failures == 1 else "rounds in a row"
        backoff = (
            f"{past.quick_failures} {rounds} failed within {rules.settings.quick_s:g} s "
            f"without known progress"
        )
        reason += f"; {backoff}: the next waits {delay_s:g} s"
    unlikely = f"observe mode: {advice}" if advice else "no sign that it would fail again"
    unknown = _STEP_UNKNOWN if failure.steps_s else _STEP_NONE
    missing = () if failure.step is not None else (unknown,)
    return RestartDecision(
        "restart",
        MOVE if failure.asks else "restart.backoff" if delay_s else "restart.budget_left",
        reason,
        past,
        delay_s=delay_s,
        backoff=backoff,
        advice=advice,
        budgets=budgets,
        considered=(Option(action="stop", rejected=unlikely),),
        missing=missing,
    )


def _limit_elsewhere(spec: JobSpec) -> str:
    """Return who limits restarts where this job has no budget."""
    if not spec.launcher:
        return "restarts have no limit"
    most = spec.launcher_restarts
    limit = "its limit is not known" if most is None else f"at most {most} on each node"
    return f"{spec.launcher} counts restarts itself ({limit})"


_HARD = frozenset({"restarts", "restarts_per_hour"})
_STEP_UNKNOWN = (
    "the training's last step: its script has not reported it (steps that are counted from outside "
    "start at 0 in each round)"
)
_STEP_NONE = "the training's last step: no step of this round was seen"
_NAMES = {
    "restarts": "restarts",
    "restarts_per_hour": "restarts per hour",
    "no_progress": "rounds without known progress",
}


def _not_below_zero(budgets: tuple[Budget, ...]) -> tuple[Budget, ...]:
    return tuple(Budget(name=b.name, limit=b.limit, left=max(b.left, 0)) for b in budgets)


def _with(
    failure: RoundFailure, past: RestartHistory, progress: bool | None, settings: RendezvousSettings
) -> RestartHistory:
    """Return the history with this failure and its restart counted."""
    refilled = past.refilled
    if progress:
        given_back = int(failure.steps_s // settings.refill_every_s)
        refilled = min(refilled + given_back, past.restarts)
    # A rank that was killed after it had made steps is not a sign of a wrong script.
    was_killed = failure.steps_s > 0 and failure.exit_code is None
    is_quick = failure.lived_s < settings.quick_s and not was_killed
    idle, quick = past.idle_rounds, past.quick_failures
    if progress:
        idle = 0
    elif failure.is_counted and (progress is False or is_quick):
        idle += 1
    if failure.can_recur:
        quick = quick + 1 if is_quick and not progress else 0
    elif progress:
        quick = 0
    counted = 1 if failure.is_counted else 0
    steps = [step for step in (past.best_step, failure.step) if step is not None]
    prints = past.fingerprints
    if failure.can_recur:
        prints = (*prints, failure.fingerprint)[-10:]
    return RestartHistory(
        restarts=past.restarts + counted,
        refilled=refilled,
        recent=past.recent + counted,
        quick_failures=quick,
        idle_rounds=idle,
        is_moved=failure.asks == "move"
        or (past.is_moved and not _has_gone_on(failure, progress, settings)),
        best_step=max(steps, default=None),
        fingerprints=prints,
    )


def _progress(failure: RoundFailure, past: RestartHistory) -> bool | None:
    """Whether the round got farther than any before; None when its last step is unknown."""
    if failure.step is None:
        return None
    return failure.step > (past.best_step or 0)


def _has_gone_on(
    failure: RoundFailure, progress: bool | None, settings: RendezvousSettings
) -> bool:
    """Whether the training has gone on; without numbered steps, once it has made them for long."""
    if progress is None:
        return failure.steps_s >= settings.refill_every_s
    return progress


def _budgets(past: RestartHistory, spec: JobSpec) -> tuple[Budget, ...]:
    budgets = []
    spent = past.restarts - past.refilled
    for name, limit, used in (
        ("restarts", spec.max_restarts, spent),
        ("restarts_per_hour", spec.max_restarts_per_hour, past.recent),
        ("no_progress", spec.no_progress_limit, past.idle_rounds),
    ):
        if limit is not None and (limit > 0 or name in _HARD):
            budgets.append(Budget(name=name, limit=limit, left=limit - used))
    return tuple(budgets)


def _enough(
    failure: RoundFailure, past: RestartHistory, progress: bool | None, rules: RestartRules
) -> tuple[str, str, bool] | None:
    """Return rule, reason, and whether it stops the job; None without a reason to stop."""
    limit = rules.spec.no_progress_limit
    if limit and past.idle_rounds >= limit:
        made = "ended without known progress" if failure.step is None else "made no new step"
        reason = f"{past.idle_rounds} rounds in a row {made}; the limit is {limit}"
        asked_for = "no_progress" in rules.spec.enforce and not rules.is_braked
        return "stop.no_progress", reason, asked_for or rules.may_stop
    same = past.fingerprints[-2:]
    if (
        failure.can_recur
        and failure.exit_code is not None
        and not progress
        and len(same) == 2
        and same[0] == same[1] != ""
        and not failure.fingerprint.startswith(SECONDARY)
    ):
        if _cannot_start(failure, rules):
            reason = (
                "the script cannot start: every rank failed in this way, twice in a row, before "
                "the job has made a step"
            )
            return CANNOT_START, reason, rules.may_stop_start or rules.may_stop
        reason = (
            f"the same failure came twice in a row without known progress in between (fingerprint "
            f"{failure.fingerprint}): it will probably come again"
        )
        return "stop.same_fingerprint", reason, rules.may_stop
    return None


def _cannot_start(failure: RoundFailure, rules: RestartRules) -> bool:
    """Whether the program fails on every rank, and no round of the job ever got farther."""
    return (
        failure.is_of_code
        and failure.is_on_all_ranks
        and not failure.has_ever_stepped
        and failure.lived_s < rules.settings.quick_s
    )
