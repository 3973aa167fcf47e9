"""What is done about a step, as the policy wants it; and the reports about it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from trainer_sdk.numerics.agreement import RankPlace
from trainer_sdk.numerics.data import Batches
from trainer_sdk.numerics.events import (
    ActedEvent,
    JudgedEvent,
    NumericsReporter,
    SuspectedEvent,
    finite,
    listed,
)
from trainer_sdk.numerics.judgement import RankResults, ResultJudgement
from trainer_sdk.numerics.policy import NumericsAct, NumericsPolicy
from trainer_sdk.numerics.rollback import Rollback, record
from trainer_sdk.numerics.skips import Positions
from trainer_sdk.numerics.statistics import Signal, UnexpectedResult

Outcome = Literal["done", "observed", "refused"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCase:
    """A step whose result is in doubt; equal on all ranks."""

    case: str
    step: int
    """The step with that result."""
    present: int
    """The step that is being made: a later one, if values arrive late."""
    unexpected: UnexpectedResult | None
    """None if nothing was unexpected of the first computation."""
    ranks: tuple[int, ...] = ()
    """The ranks with the unexpected result."""
    suspect_since: int | None = None
    """As of `SuspectSteps`."""

    @property
    def signal(self) -> Signal:
        """What is unexpected."""
        return self.unexpected.signal if self.unexpected else "results_differ"

    @property
    def moved_at(self) -> int:
        """The first step that is in doubt."""
        moved_at = self.unexpected.moved_at if self.unexpected else self.step
        return moved_at if self.suspect_since is None else min(moved_at, self.suspect_since)


@dataclass(frozen=True, slots=True)
class StepDecision:
    """What becomes of the step."""

    is_accepted: bool
    to_step: int | None = None
    """The training has gone back in place, and goes on after this step."""


class NumericsActions:
    """Decides by the policy, and acts. All ranks make each call together."""

    def __init__(
        self,
        policy: NumericsPolicy,
        rollback: Rollback,
        batches: Batches[Any] | None,
        reporter: NumericsReporter,
        world_size: int,
    ) -> None:
        self._policy = policy
        self._rollback = rollback
        self._batches = batches
        self._reporter = reporter
        self._world_size = world_size

    def act(
        self,
        doubt: StepCase,
        judgement: ResultJudgement,
        *,
        is_judged: bool,
        put_back: Callable[[], None],
    ) -> StepDecision:
        """Do what the policy wants; `put_back` makes the state as it was before the step.

        Without `is_judged` nothing was run again, and merely observing is not reported.
        """
        acts = self._rollback.skips.acts
        wanted = self._policy.action(judgement.kind)
        act = self._policy.decide(
            judgement,
            moved_at=doubt.moved_at,
            span=self._batches.span(doubt.moved_at, doubt.present) if self._batches else None,
            earlier=[
                act.samples
                for act in acts
                if act.samples is not None and (act.action == "skip" or wanted == "rollback")
            ],
            taken=len(acts),
        )
        if act.action == "observe":
            if is_judged or wanted != "observe":
                outcome: Outcome = "observed" if wanted == "observe" else "refused"
                self._report(doubt, act, outcome, action=wanted)
            return StepDecision(is_accepted=True)
        if act.action in ("again", "move"):
            put_back()
        return self._do(doubt, act, judgement.ranks)

    def _do(self, doubt: StepCase, act: NumericsAct, ranks: Sequence[int]) -> StepDecision:
        made = record(doubt.case, act.action, doubt.step, act.reason, before_step=doubt.moved_at)
        if act.action in ("rollback", "skip"):
            return self._go_back(doubt, act)
        if act.action == "exclude":
            report = partial(self._report, doubt, act, "done")
            if refusal := self._rollback.exclude(made, ranks, report):
                self._report(doubt, act, "refused", reason=refusal)
            return StepDecision(is_accepted=True)
        self._report(doubt, act, "done")  # the next two end the ranks
        if act.action == "stop":
            self._rollback.stop(made)
        if act.action == "move":
            refusal = self._rollback.move(made, doubt.present - 1, ranks)
            self._report(doubt, act, "refused", reason=refusal)
        return StepDecision(is_accepted=False)

    def _go_back(self, doubt: StepCase, act: NumericsAct) -> StepDecision:
        if self._batches is None:
            self._report(doubt, act, "refused", reason="the batches are not those of numerics")
            return StepDecision(is_accepted=True)
        result = self._rollback.back_to(
            act.before_step or doubt.moved_at,
            self._batches,
            case=doubt.case,
            step=doubt.step,
            reason=act.reason,
            samples=act.span,
            is_skip=act.action == "skip",
            before_restart=partial(self._report, doubt, act, "done"),
        )
        if result.to_step is None:
            self._report(doubt, act, "refused", reason=result.refusal)
            return StepDecision(is_accepted=True)
        self._report(doubt, act, "done", to_step=result.to_step)
        return StepDecision(is_accepted=False, to_step=result.to_step)

    def report_suspicion(self, doubt: StepCase) -> None:
        """Report the unexpected result."""
        unexpected = doubt.unexpected
        if unexpected is None:
            return
        self._reporter.mark(unexpected.signal, doubt.step)
        ranks = doubt.ranks
        self._reporter.report(
            SuspectedEvent(
                case=doubt.case,
                step=doubt.step,
                signal=unexpected.signal,
                moved_at=doubt.moved_at,
                rank=ranks[0] if len(ranks) == 1 else None,
                ranks=() if len(ranks) == self._world_size else listed(ranks),
                value=finite(unexpected.value),
                low=finite(unexpected.low),
                high=finite(unexpected.high),
            )
        )

    def report_judgement(
        self,
        doubt: StepCase,
        judgement: ResultJudgement,
        results: Sequence[RankResults],
        places: Sequence[RankPlace],
    ) -> None:
        """Report the judgement, with the place and the results of the first rank that it names."""
        place = places[judgement.ranks[0]] if judgement.ranks else None
        shown = next((result for result in results if result.rank in judgement.ranks), None)
        samples = self._batches.position if self._batches else None
        begin, end = samples or (None, None)
        self._reporter.report(
            JudgedEvent(
                case=doubt.case,
                step=doubt.step,
                signal=doubt.signal,
                kind=judgement.kind,
                reason=judgement.reason,
                ranks=listed(judgement.ranks),
                node=place.node if place else "",
                device=place.device if place else "",
                group=judgement.group,
                first=finite(shown.first.loss) if shown else None,
                again=tuple(finite(result.loss) for result in shown.again) if shown else (),
                elsewhere=finite(shown.elsewhere.loss) if shown and shown.elsewhere else None,
                elsewhere_by=shown.elsewhere_by if shown else None,
                samples_from=begin,
                samples_to=end,
            )
        )

    def _report(
        self,
        doubt: StepCase,
        act: NumericsAct,
        outcome: Outcome,
        *,
        action: str = "",
        reason: str = "",
        to_step: int | None = None,
    ) -> None:
        if outcome == "done":
            self._reporter.mark(act.action, doubt.step)
        samples: Positions | tuple[None, None] = act.span or (None, None)
        done = action or act.action
        result = outcome if done == "observe" else f"{done} {outcome}"
        to = "" if to_step is None else f", back to step {to_step}"
        why = (reason or act.reason).removeprefix(f"not done ({done}): ")
        self._reporter.warn(f"step {doubt.step} ({doubt.signal}), {result}{to}: {why}")
        self._reporter.report(
            ActedEvent(
                case=doubt.case,
                step=doubt.step,
                action=done,
                outcome=outcome,
                reason=reason or act.reason,
                to_step=to_step,
                lost_steps=0 if to_step is None else max(doubt.present - 1 - to_step, 0),
                samples_from=samples[0],
                samples_to=samples[1],
            )
        )
