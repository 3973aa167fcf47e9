"""What all ranks decide about a step in doubt: they run it again, compare replicas, and act."""

from itertools import chain
from typing import Any

from trainer_sdk.numerics.actions import NumericsActions, StepCase, StepDecision
from trainer_sdk.numerics.agreement import LocalView, RankAgreement, new_case, number
from trainer_sdk.numerics.data import Batches
from trainer_sdk.numerics.determinism import DeterminismCounts
from trainer_sdk.numerics.events import NumericsReporter
from trainer_sdk.numerics.examination import (
    ALIKE_MOST,
    JudgementNews,
    Sighting,
    StepExamination,
    chosen_result,
    local_view,
)
from trainer_sdk.numerics.judgement import ROUNDING, ResultComparison, ResultJudgement, judge
from trainer_sdk.numerics.policy import Mode, NumericsPolicy
from trainer_sdk.numerics.present_step import PresentStep, SuspectSteps
from trainer_sdk.numerics.replica_hash import ReplicaHash
from trainer_sdk.numerics.rollback import Rollback
from trainer_sdk.numerics.skips import ActRecord
from trainer_sdk.numerics.snapshot import TrainingParts
from trainer_sdk.numerics.statistics import UnexpectedResult

ACCEPTED = StepDecision(is_accepted=True)


class StepDecisions:
    """Decides about steps in doubt. All ranks make each call together."""

    def __init__(  # noqa: PLR0913 - the parts of a training
        self,
        parts: TrainingParts,
        agreement: RankAgreement,
        mode: Mode,
        policy: NumericsPolicy,
        rollback: Rollback,
        batches: Batches[Any] | None,
        reporter: NumericsReporter,
        replicas: Any,
    ) -> None:
        self._parts, self._agreement, self._batches = parts, agreement, batches
        self._is_counted = mode == "report_determinism_stats"
        self._reporter = reporter
        self.suspects = SuspectSteps()
        self._step_news, self._replica_news = JudgementNews(), JudgementNews()
        self.alike = 0
        """The number of unexpected steps in a row."""
        self._examination = StepExamination(
            parts,
            agreement,
            replicas,
            keeps_inputs=bool(rollback.skips.moved) or policy.elsewhere == "move",
        )
        ranks = agreement.ranks
        parts.is_staged = ranks.size not in (1, len(self._examination.own_peers))
        names = chain.from_iterable(ranks.gather(parts.groups, list[str]))
        parts.name_groups(list(dict.fromkeys(names)))  # stages have different ones
        self.present = PresentStep(parts)
        self.counts = DeterminismCounts(parts.groups)
        self.replicas = ReplicaHash(
            parts.named, parts.groups, parts.group_of, parts.modules, ranks, replicas
        )
        is_unknown = self.replicas.is_unknown and not self.replicas.has_replicas
        if ranks.size > 1 and is_unknown and not self._examination.own_peers:
            reporter.warn(
                f"no replicas are known among {ranks.size} ranks, so parameters are not compared, "
                "and no other rank can compute a step: if ranks have equal parameters, give the "
                "DistributedDataParallel module in the state, or replicas=group"
            )
        self.actions = NumericsActions(policy, rollback, batches, reporter, ranks.size)

    def refuse(self, made: int, *, is_back: bool) -> None:
        """The training goes on after the step `made`."""
        if is_back:
            self.alike = 0
            self._step_news, self._replica_news = JudgementNews(), JudgementNews()
            self.present.leave()
            self.replicas.gone_back(made)
        self.suspects.refused(made)
        self.present.clear()

    def examine(
        self,
        step: int,
        sighting: Sighting | None,
        usual_loss: float,
        moved: ActRecord | None = None,
    ) -> StepDecision:
        """Find out what computed the step's results, and act.

        `moved` is the act after which this step is the first, on other nodes than before.
        """
        is_present = sighting is None or sighting.step == step
        calls = len(self.present.calls) if is_present else 0
        views = self._agreement.ranks.gather(
            local_view(step, sighting, calls, usual_loss), LocalView
        )
        doubt = self._doubt_of(step, views)
        self.alike = self.alike + 1 if doubt.ranks else 0
        if self.alike > ALIKE_MOST:
            self._warn_of_more(doubt.step)
            return ACCEPTED
        if moved is None:
            self.actions.report_suspicion(doubt)
        every = {view.calls for view in views}
        if len(every) > 1 or not min(every) or self.present.before is None:
            return self._act_unjudged(doubt)
        if self.replicas.has_replicas:  # with other parameters its results are others, too
            decision = self.act_on_replicas(step, self.replicas.compared_now(step))
            if decision is not None:
                return decision
        return self._run_again(doubt, views, moved)

    def _run_again(
        self, doubt: StepCase, views: list[LocalView], moved: ActRecord | None
    ) -> StepDecision:
        """Judge the step by computing it again, and act."""
        data = self._batches.position if self._batches else None
        results = self._examination.run(self.present, data, is_counted=self._is_counted)
        self.counts.add(results)
        rounding = 0.0 if all(view.is_exact for view in views) else ROUNDING
        usual_loss = max(number(view.usual_loss) for view in views)
        groups = self._parts.groups
        judgement = judge(doubt.unexpected, results, groups, rounding, usual_loss)
        if judgement and judgement.kind == "persistent" and len(judgement.ranks) > 1:
            judgement = self._examination.told_apart(self.present, judgement, results)
        if moved is not None:
            comparison = ResultComparison(results, groups, rounding, usual_loss)
            places = self._examination.places
            decision = self.actions.act_after_move(
                doubt, judgement, moved, results, comparison, places, self._put_back
            )
            if decision is not None:
                return decision
            self.actions.report_suspicion(doubt)
        if self._is_counted or not self._step_news.has(judgement):
            return ACCEPTED
        assert judgement is not None
        if judgement.kind != "not_reproducible_and_not_local":
            self.suspects.doubt(doubt.moved_at)
        self.actions.report_judgement(doubt, judgement, results, self._examination.places)
        return self.actions.act(
            doubt, judgement, is_judged=True, put_back=self._put_back, results=results
        )

    def _doubt_of(self, step: int, views: list[LocalView]) -> StepCase:
        suspects = tuple(rank for rank, view in enumerate(views) if view.signal)
        seen_at = max((views[rank].step for rank in suspects), default=step)
        doubt = self._case(views[0].case, seen_at, chosen_result(views), suspects, present=step)
        if suspects:
            self.suspects.doubt(doubt.moved_at)
        return doubt

    def _case(
        self,
        case: str,
        step: int,
        unexpected: UnexpectedResult | None,
        ranks: tuple[int, ...],
        *,
        present: int,
    ) -> StepCase:
        return StepCase(
            case=case,
            step=step,
            present=present,
            unexpected=unexpected,
            ranks=ranks,
            suspect_since=self.suspects.since,
        )

    def act_on_replicas(self, step: int, judgement: ResultJudgement | None) -> StepDecision | None:
        """Act if replicas differ; None if they do not."""
        is_news = self._replica_news.has(judgement)
        if judgement is None:
            return None
        if not is_news:
            return ACCEPTED
        (case,) = self._agreement.ranks.follow([new_case()], list[str])
        equal_at = self.replicas.equal_at
        unexpected = UnexpectedResult("replicas_differ", float("nan"), None, None, equal_at)
        doubt = self._case(case, step, unexpected, judgement.ranks, present=step)
        self.actions.report_suspicion(doubt)
        self.actions.report_judgement(doubt, judgement, (), self._examination.places)
        return self.actions.act(doubt, judgement, is_judged=True, put_back=self._put_back)

    def _act_unjudged(self, doubt: StepCase) -> StepDecision:
        """The step cannot be run again: act as for a result that comes again everywhere."""
        if doubt.unexpected is None:
            return ACCEPTED
        signal = str(doubt.signal)
        if signal not in ("nan", "inf"):
            signal += f" of {doubt.unexpected.value:.6g}"
        text = f"{signal}, and the step was not run again"
        judgement = ResultJudgement("correct_but_unexpected", doubt.ranks, "", text)
        return self.actions.act(doubt, judgement, is_judged=False, put_back=self._put_back)

    def _put_back(self) -> None:
        """Make the state as it was before the step, which comes again."""
        self.present.put_back()
        if self._batches is not None:
            self._batches.again()

    def _warn_of_more(self, step: int) -> None:
        if self.alike == ALIKE_MOST + 1:
            self._reporter.warn(
                f"step {step} is unexpected like the {ALIKE_MOST} before it: the training goes on, "
                "and until a step is as expected, more are neither run again nor reported"
            )
