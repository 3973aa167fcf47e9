"""What is done about a step, as the policy wants it; and the reports about it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import msgspec

from trainer_sdk.checkpoint.job_context import read_job_context
from trainer_sdk.environment import environ
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
from trainer_sdk.numerics.judgement import RankResults, ResultComparison, ResultJudgement
from trainer_sdk.numerics.moved import judged_after_move, kept_step, unexpected_of
from trainer_sdk.numerics.policy import NumericsAct, NumericsPolicy
from trainer_sdk.numerics.rollback import Rollback, record
from trainer_sdk.numerics.skips import ActRecord, Positions
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
        self.is_over = False
        """Whether the loop has ended, so that nobody would take batches again."""

    def act(
        self,
        doubt: StepCase,
        judgement: ResultJudgement,
        *,
        is_judged: bool,
        put_back: Callable[[], None],
        results: Sequence[RankResults] = (),
    ) -> StepDecision:
        """Do what the policy wants; `put_back` makes the state as it was before the step.

        Without `is_judged` nothing was run again, and merely observing is not reported. A move
        keeps the results.
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
        if act.refused is not None:
            return self._refused(doubt, act, act.reason, act.refused)
        if act.action == "observe":
            if is_judged:
                self._report(doubt, act, "observed")
            return StepDecision(is_accepted=True)
        if act.action in ("again", "move"):
            put_back()
        return self._do(doubt, act, judgement.ranks, results)

    def _do(
        self,
        doubt: StepCase,
        act: NumericsAct,
        ranks: Sequence[int],
        results: Sequence[RankResults] = (),
    ) -> StepDecision:
        made = record(doubt.case, act.action, doubt.step, act.reason, before_step=doubt.moved_at)
        if act.action in ("rollback", "skip"):
            return self._go_back(doubt, act)
        if act.action == "exclude":
            report = partial(self._report, doubt, act, "done")
            if refusal := self._rollback.exclude(made, ranks, report):
                return self._refused(doubt, act, refusal)
            return StepDecision(is_accepted=True)
        self._report(doubt, act, "done")  # the next two end the ranks
        if act.action == "stop":
            self._rollback.stop(made)
        if act.action == "move":
            kept = kept_step(doubt.unexpected, results, read_job_context(environ).round)
            if kept is None:
                self._reporter.warn(
                    "the step cannot be compared after the move: give compute(function, batch), or "
                    "batches with a position"
                )
            made = msgspec.structs.replace(made, kept=kept)
            refusal = self._rollback.move(made, doubt.present - 1, ranks)
            self._refused(doubt, act, refusal)
        return StepDecision(is_accepted=False)

    def _refused(
        self, doubt: StepCase, act: NumericsAct, refusal: str, action: str = ""
    ) -> StepDecision:
        """The training goes on with the result as it is, or ends if that is the policy."""
        self._report(doubt, act, "refused", action=action, reason=refusal)
        if self._policy.refused == "stop":
            reason = f'refused="stop": {refusal}'
            self._do(doubt, NumericsAct("stop", None, act.span, reason), ())
        return StepDecision(is_accepted=True)

    def _go_back(self, doubt: StepCase, act: NumericsAct) -> StepDecision:
        if self._batches is None:
            return self._refused(doubt, act, "the batches are not those of numerics")
        if self.is_over and self._rollback.is_in_place:
            return self._refused(doubt, act, "the loop of the training has ended")
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
            return self._refused(doubt, act, result.refusal)
        self._report(doubt, act, "done", to_step=result.to_step)
        return StepDecision(is_accepted=False, to_step=result.to_step)

    def act_after_move(  # noqa: PLR0913 - both rounds
        self,
        doubt: StepCase,
        judgement: ResultJudgement | None,
        moved: ActRecord,
        results: Sequence[RankResults],
        comparison: ResultComparison,
        places: Sequence[RankPlace],
        put_back: Callable[[], None],
    ) -> StepDecision | None:
        """Compare a step with that of the round before, report, and do what the policy wants.

        `results` and `places` are of the present round. None if nothing can be compared, or the
        judgement of the present round has found something already.
        """
        kept = moved.kept
        if kept is None or (judgement and judgement.kind != "correct_but_unexpected"):
            self._rollback.skips.compared()
            return None
        compared = judged_after_move(kept, results, comparison)
        if isinstance(compared, str):
            self._reporter.warn(f"step {moved.step}, from before the move, stays open: {compared}")
            self._rollback.skips.compared()
            return None
        unexpected = doubt.unexpected or unexpected_of(kept)
        doubt = replace(doubt, case=moved.case, unexpected=unexpected)
        judgement = compared.judgement
        named = places if compared.is_present else compared.places
        moved_from = None if compared.is_present else kept.round
        self.report_judgement(doubt, judgement, compared.results, named, moved_from)
        self._rollback.skips.compared()
        if judgement.kind == "persistent":
            odd = {(named[rank].node, named[rank].device) for rank in judgement.ranks}
            there = [rank for rank, it in enumerate(places) if (it.node, it.device) in odd]
            if not there and self._policy.persistent == "exclude":
                reason = "it has no rank of the training any more"
                self._report(doubt, NumericsAct("exclude", None, None, reason), "done")
                return StepDecision(is_accepted=True)
            ranks = tuple(there[:1] if len(odd) == 1 else there)
            judgement = replace(judgement, ranks=ranks)
        return self.act(doubt, judgement, is_judged=True, put_back=put_back)

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
        moved_from: int | None = None,
    ) -> None:
        """Report the judgement, with the place and the results of the first rank that it names.

        `moved_from` is the round of these places, if the ranks have moved since.
        """
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
                moved_from=moved_from,
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
