"""`Numerics`, the class that decides which steps of a training count."""

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from itertools import chain
from time import monotonic
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar, get_args
from weakref import WeakMethod

import torch.distributed as dist

from trainer_sdk.checkpoint import arguments
from trainer_sdk.numerics.actions import NumericsActions, StepCase, StepDecision
from trainer_sdk.numerics.agreement import LocalView, RankAgreement, new_case, number
from trainer_sdk.numerics.choices import check_objects, check_ways_back, useless
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
from trainer_sdk.numerics.policy import Action, Mode, policy_of
from trainer_sdk.numerics.present_step import (
    PresentStep,
    StepNumbers,
    SuspectSteps,
    restored_statistics,
    saved_statistics,
)
from trainer_sdk.numerics.replay import NO_BATCH
from trainer_sdk.numerics.replica_hash import HASH_EVERY, ReplicaHash
from trainer_sdk.numerics.rollback import RestartNeededError, Rollback
from trainer_sdk.numerics.snapshot import TrainingParts
from trainer_sdk.numerics.statistics import ResultWatch, Series, UnexpectedResult
from trainer_sdk.numerics.values import OutputNorm, StepReader, StepValues

if TYPE_CHECKING:
    from trainer_sdk.checkpoint.checkpointer import Checkpointer
    from trainer_sdk.rank_session import Session

Result = TypeVar("Result")
_READS: Final = ("late", "now")
_COUNTED_EVERY_S: Final = 60.0
_BAND_EVERY: Final = 8
_ACCEPTED = StepDecision(is_accepted=True)
_UNEXPECTED, _NOT_READY, _LATE = 1, 2, 4
"""Bits on which the ranks agree: a result, hashes of parameters, values on a GPU."""


class Numerics:
    """Looks at the results of each step, on all ranks alike, and decides which steps count.

    All ranks make it together, and the same calls of it. `Session.numerics` describes the
    arguments.
    """

    may_be_absent = True

    def __init__(  # noqa: PLR0913 - each is a choice of the training
        self,
        session: "Session",
        state: MutableMapping[str, Any],
        batches: Iterable[Any] | None = None,
        *,
        mode: Mode = "observe",
        validate_every: int = 0,
        hash_every: int = HASH_EVERY,
        read: Literal["late", "now"] = "late",
        replicas: Any = None,
        checkpointer: "Checkpointer | None" = None,
        root: str = "",
        rollback: Rollback | None = None,
        transient: Action | None = None,
        persistent: Action | None = None,
        unexpected: Action | None = None,
        not_reproducible: Action | None = None,
        replica: Action | None = None,
        refused: Literal["observe", "stop"] = "observe",
        budget: int = 3,
        elsewhere: Literal["report", "move"] = "report",
    ) -> None:
        arguments.state(state, is_filled=checkpointer is not None)
        arguments.one_of("mode", mode, get_args(Mode))
        arguments.one_of("read", read, _READS)
        self._mode = mode
        self._validate_every = arguments.whole("validate_every", validate_every)
        self._hash_every = arguments.whole("hash_every", hash_every)
        self._policy = policy_of(
            mode,
            budget=arguments.whole("budget", budget),
            elsewhere=elsewhere,
            transient=transient,
            persistent=persistent,
            unexpected=unexpected,
            not_reproducible=not_reproducible,
            replica=replica,
            refused=refused,
        )
        check_objects(batches, replicas, checkpointer)
        if rollback is None:
            check_ways_back(self._policy, batches, checkpointer, root)
        self._session = session
        self._is_on = mode != "disabled"
        self._may_repeat = mode in ("validate_results", "report_determinism_stats")
        self._watch = ResultWatch()
        self._reader = StepReader(waits=read == "now")
        self._counting = StepNumbers(session)
        self._suspects = SuspectSteps()
        self._asked: Any = None
        owns_loop = rollback is None
        if rollback is None:
            rollback = Rollback(state, session, checkpointer=checkpointer, root=root)
        skips = "skip" in self._policy.by_kind.values()
        if batches is not None and not isinstance(batches, Batches):
            batches = Batches(batches, state, rollback.skips.spans, skips=skips)
        self._batches: Batches[Any] | None = batches
        if self._is_on:
            self._begin(state, replicas, rollback)
            if owns_loop:
                self._mind_end(session, batches)

    def _begin(self, state: Mapping[str, Any], replicas: Any, rollback: Rollback) -> None:
        self._parts = TrainingParts(state)
        self._outputs = OutputNorm(self._parts.modules)
        self._agreement = RankAgreement()
        self._is_warned = self._is_late = False
        self._seen: Sighting | None = None
        self._step_news, self._replica_news = JudgementNews(), JudgementNews()
        self._steps = self._alike = self._hashed_at = self._equal_at = 0
        """The steps of the last hashes, and of the last hashes that were equal."""
        self._is_behind = self._mode == "observe" and self._agreement.ranks.size > 1
        """Whether ranks agree on a step while they make the next one: nothing is run again."""
        self._moved = rollback.skips.moved
        """The act whose step is made again first, on other nodes than before."""
        self._examination = StepExamination(
            self._parts,
            self._agreement,
            replicas,
            keeps_inputs=bool(self._moved) or self._policy.elsewhere == "move",
        )
        ranks = self._agreement.ranks
        self._parts.is_staged = ranks.size not in (1, len(self._examination.own_peers))
        names = chain.from_iterable(ranks.gather(self._parts.groups, list[str]))
        self._parts.name_groups(list(dict.fromkeys(names)))  # stages have different ones
        self._present = PresentStep(self._parts)
        self._reporter = NumericsReporter(ranks.rank, self._session)
        if text := useless(self._policy, self._mode):
            self._reporter.warn(text)
        if self._may_repeat and not self._parts.named:
            raise ValueError(
                f"mode={self._mode!r} needs the model in the state: the gradients of a step that "
                "is run again are put back"
            )
        self._counts = DeterminismCounts(self._parts.groups)
        self._counted_at = monotonic()
        self._replicas = ReplicaHash(
            self._parts.named,
            self._parts.groups,
            self._parts.group_of,
            self._parts.modules,
            ranks,
            replicas,
        )
        is_unknown = self._replicas.is_unknown and not self._replicas.has_replicas
        if ranks.size > 1 and is_unknown and not self._examination.own_peers:
            self._reporter.warn(
                f"no replicas are known among {ranks.size} ranks, so parameters are not compared, "
                "and no other rank can compute a step: if ranks have equal parameters, give the "
                "DistributedDataParallel module in the state, or replicas=group"
            )
        self._actions = NumericsActions(
            self._policy, rollback, self._batches, self._reporter, ranks.size
        )

    def __iter__(self) -> Iterator[Any]:
        """The batches of one pass; those of a refused step come again."""
        try:
            for batch in self._batches or ():
                self._counting.settle()
                if self._is_on and (text := self._counting.begin()):
                    self._warn_once(text)
                if self._may_repeat:
                    self._present.note_batch()
                yield batch
        finally:  # also if the script leaves its loop
            if self._is_on and self._counts.again:
                self._report_counts()

    def compute(self, function: Callable[..., Result], batch: Any = NO_BATCH) -> Result:
        """Return what the function returns: the loss, or a tuple that begins with it.

        It is called again if the result of the step is in doubt, so it must do all that computes
        gradients, and nothing else; with a batch as its argument, also on another rank.
        """
        if self._is_on:
            if text := self._counting.begin():
                self._warn_once(text)
            self._outputs.is_open = True
        is_validated = self._may_repeat and self._is_validated(self._counting.next_step())
        if not self._may_repeat or (self._is_behind and not is_validated):
            result: Result = function() if batch is NO_BATCH else function(batch)
            return result
        return self._present.compute(function, batch, is_recorded=is_validated)

    def accepts(self, *, loss: Any = None, grad_norm: Any = None, lr: float | None = None) -> bool:
        """Whether this step counts; False if its batches come again, or the training has gone back.

        All ranks call it after each step, before the optimizer's.
        """
        if not self._is_on:
            return True
        step = self._counting.next_step()
        if text := self._counting.decide():
            self._warn_once(text)
        self._equal_at = self._equal_at or step
        output = self._outputs.taken(is_wanted=loss is None)
        rate = self._rate() if lr is None else lr
        arrived = self._reader.read(step, loss, grad_norm, rate, output)
        decision = self._decide(step, self._look(arrived))
        if decision.is_accepted:
            return self._accept(step, arrived)
        is_back = decision.to_step is not None
        self._refuse(step - 1 if decision.to_step is None else decision.to_step, is_back=is_back)
        return False

    def _decide(self, step: int, sighting: Sighting | None) -> StepDecision:
        """Agree with the other ranks on what is seen, and act."""
        own = _UNEXPECTED if sighting is not None else 0
        replicas = self._replicas
        if replicas.is_pending and not replicas.is_ready():
            own |= _NOT_READY
        if self._reader.is_late:
            own |= _LATE
        if self._is_behind:
            agreed = self._agreement.exchanged(own)
            sighting, self._seen = self._seen, sighting
        else:
            agreed = self._agreement.joined(own)
            self._is_behind = bool(agreed & _LATE)
        self._is_late = bool(agreed & _LATE)
        decision = _ACCEPTED
        if replicas.is_pending and not agreed & _NOT_READY:
            if replicas.is_gathering:
                decision = self._act_on_replicas(step, replicas.finish()) or _ACCEPTED
            else:
                replicas.gather()
        is_unexpected = agreed & _UNEXPECTED
        if not is_unexpected:
            self._alike = 0
        is_examined = is_unexpected or (self._may_repeat and self._is_validated(step))
        if is_examined and decision.is_accepted:
            with self._session.section("numerics", "evaluation"):
                decision = self._examine(step, sighting)
        return decision

    def _mind_end(self, session: "Session", batches: Batches[Any] | None) -> None:
        """Decide on the last steps, too; neither the session nor the batches keep this object."""
        over, ends = WeakMethod(self._session_over), WeakMethod(self._ends_pass)
        session._at_close(lambda: (end := over()) and end())  # noqa: SLF001 - one package
        if batches is not None:
            batches.at_end = lambda: bool((end := ends()) and end())

    def finish(self) -> None:
        """Decide on the last steps, and compare replicas, after a loop that was left by a `break`.

        All ranks call it. A training that goes back in place cannot do so any more.
        """
        if self._is_on and self._steps:
            self._actions.is_over = True
            self._ends_pass()
            self._act_on_replicas(self._counting.next_step() - 1, self._replicas.compared_now())

    def _ends_pass(self) -> bool:
        """Decide on the steps that the ranks have not agreed on; whether the training went back."""
        if not self._steps or not self._is_behind:
            return False
        step, arrived = self._counting.next_step() - 1, self._reader.arrived(waits=True)
        decision = self._decide(step, self._look(arrived))
        if decision.is_accepted and self._is_late:
            decision = self._decide(step, None)
        if decision.to_step is not None:
            self._refuse(decision.to_step, is_back=True)
            return True
        for values in arrived:
            self._watch.learn(*values)
        return False

    def _session_over(self) -> None:
        try:
            if self._agreement.ranks.size == 1 or dist.is_initialized():
                self.finish()
        except RestartNeededError:
            raise
        except Exception as error:  # noqa: BLE001 - the training is over, whatever it was
            self._reporter.warn(f"the last steps are not decided: {type(error).__name__}: {error}")

    def leave(self) -> None:
        """Give up: others that wait for this rank get an error once it has dropped this object."""
        self._agreement.leave()

    def state_dict(self) -> dict[str, Any]:
        """The statistics of this rank."""
        if not self._is_on:
            return {}
        self._asked = (saved_statistics(self._watch, self._suspects),)
        return {self._key: self._asked}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with these statistics; they begin anew with another world size."""
        whole = state.get(self._key, self._asked) if self._is_on else self._asked
        if whole is self._asked:
            return
        self._watch, self._suspects, text = restored_statistics(whole)
        if text:
            self._reporter.warn(text)

    @property
    def _key(self) -> str:
        ranks = self._agreement.ranks
        return f"rank-{ranks.rank}-of-{ranks.size}"

    def _is_validated(self, step: int) -> bool:
        if self._mode == "report_determinism_stats" or self._is_moved(step):
            return True
        every = self._validate_every
        return every > 0 and step % every == 0

    def _is_moved(self, step: int) -> bool:
        """Whether the step is compared with what ranks computed before they moved."""
        return self._moved is not None and not self._steps and step == self._moved.step

    def _is_hashed(self, step: int) -> bool:
        if not self._hash_every or step % self._hash_every:
            return False
        return self._replicas.has_replicas and not self._replicas.is_pending

    def _report_counts(self) -> None:
        self._counted_at = monotonic()
        self._reporter.report(self._counts.event(self._steps))

    def _rate(self) -> float | None:
        for optimizer in self._parts.optimizers:
            rate = optimizer.param_groups[0].get("lr")
            return rate if isinstance(rate, float) else None
        return None

    def _look(self, arrived: list[StepValues]) -> Sighting | None:
        for values in arrived:
            norm = values.grad_norm
            if self._parts.scalers and norm is not None and not norm < float("inf"):
                norm = None  # a scaler of gradients looks for its scale so
            unexpected = self._watch.look(values.step, values.loss, norm, values.lr, values.output)
            if unexpected is not None:
                return Sighting(values.step, unexpected)
        return None

    def _accept(self, step: int, arrived: list[StepValues]) -> bool:
        for values in arrived:
            self._watch.learn(*values)
            if self._session.is_watched:
                has_band = not step % _BAND_EVERY
                self._show("loss", values.loss, has_band=has_band)
                self._show("grad_norm", values.grad_norm, has_band=has_band)
        if self._batches is not None:
            self._batches.taken(step)
        self._counting.made(step)
        self._suspects.accepted()
        if self._may_repeat:
            self._present.clear()
        self._steps += 1
        if self._is_hashed(step):
            self._hashed_at = step
            self._replicas.start()
        if self._counts.again and monotonic() - self._counted_at > _COUNTED_EVERY_S:
            self._report_counts()
        return True

    def _show(self, name: Series, value: float | None, *, has_band: bool) -> None:
        if value is None:
            return
        self._session.report(name, value)
        if has_band and (band := self._watch.band(name)):
            self._session.report(f"{name}_low", band.low)
            self._session.report(f"{name}_high", band.high)

    def _refuse(self, made: int, *, is_back: bool) -> None:
        """The training goes on after the step `made`."""
        if is_back:
            self._alike = 0
            self._step_news, self._replica_news = JudgementNews(), JudgementNews()
            self._seen = None
            self._present.leave()
            self._reader.forget()
            if self._replicas.is_pending:
                self._replicas.finish()
            self._equal_at = made + 1
        self._counting.refused(made)
        self._suspects.refused(made)
        self._present.clear()

    def _examine(self, step: int, sighting: Sighting | None) -> StepDecision:
        """Find out what computed the step's results, and act."""
        is_present = sighting is None or sighting.step == step
        calls = len(self._present.calls) if is_present else 0
        own = local_view(step, sighting, calls, self._watch.usual_loss)
        views = self._agreement.ranks.gather(own, LocalView)
        doubt = self._doubt_of(step, views)
        self._alike = self._alike + 1 if doubt.ranks else 0
        if self._alike > ALIKE_MOST:
            self._warn_of_more(doubt.step)
            return _ACCEPTED
        if not self._is_moved(step):
            self._actions.report_suspicion(doubt)
        every = {view.calls for view in views}
        if len(every) > 1 or not min(every) or self._present.before is None:
            return self._act_unjudged(doubt)
        replicas = self._replicas
        if replicas.has_replicas:  # with other parameters its results are others, too
            self._hashed_at = step
            decision = self._act_on_replicas(step, replicas.compared_now())
            if decision is not None:
                return decision
        return self._run_again(step, doubt, views)

    def _run_again(self, step: int, doubt: StepCase, views: list[LocalView]) -> StepDecision:
        """Judge the step by computing it again, and act."""
        is_counted = self._mode == "report_determinism_stats"
        data = self._batches.position if self._batches else None
        results = self._examination.run(self._present, data, is_counted=is_counted)
        self._counts.add(results)
        rounding = 0.0 if all(view.is_exact for view in views) else ROUNDING
        usual_loss = max(number(view.usual_loss) for view in views)
        groups = self._parts.groups
        judgement = judge(doubt.unexpected, results, groups, rounding, usual_loss)
        if judgement and judgement.kind == "persistent" and len(judgement.ranks) > 1:
            judgement = self._examination.told_apart(self._present, judgement, results)
        if (moved := self._moved) is not None and self._is_moved(step):
            self._moved = None
            comparison = ResultComparison(results, groups, rounding, usual_loss)
            places = self._examination.places
            decision = self._actions.act_after_move(
                doubt, judgement, moved, results, comparison, places, self._put_back
            )
            if decision is not None:
                return decision
            self._actions.report_suspicion(doubt)
        if is_counted or not self._step_news.has(judgement):
            return _ACCEPTED
        assert judgement is not None
        if judgement.kind != "not_reproducible_and_not_local":
            self._suspects.doubt(doubt.moved_at)
        self._actions.report_judgement(doubt, judgement, results, self._examination.places)
        return self._actions.act(
            doubt, judgement, is_judged=True, put_back=self._put_back, results=results
        )

    def _doubt_of(self, step: int, views: list[LocalView]) -> StepCase:
        suspects = tuple(rank for rank, view in enumerate(views) if view.signal)
        seen_at = max((views[rank].step for rank in suspects), default=step)
        doubt = StepCase(
            case=views[0].case,
            step=seen_at,
            present=step,
            unexpected=chosen_result(views),
            ranks=suspects,
            suspect_since=self._suspects.since,
        )
        if suspects:
            self._suspects.doubt(doubt.moved_at)
        return doubt

    def _act_on_replicas(self, step: int, judgement: ResultJudgement | None) -> StepDecision | None:
        """Act if replicas differ; None if they do not."""
        is_news = self._replica_news.has(judgement)
        if judgement is None:
            self._equal_at = self._hashed_at
            return None
        if not is_news:
            return _ACCEPTED
        (case,) = self._agreement.ranks.follow([new_case()], list[str])
        nan = float("nan")
        unexpected = UnexpectedResult("replicas_differ", nan, None, None, self._equal_at)
        doubt = StepCase(
            case=case,
            step=step,
            present=step,
            unexpected=unexpected,
            ranks=judgement.ranks,
            suspect_since=self._suspects.since,
        )
        self._actions.report_suspicion(doubt)
        self._actions.report_judgement(doubt, judgement, (), self._examination.places)
        return self._actions.act(doubt, judgement, is_judged=True, put_back=self._put_back)

    def _act_unjudged(self, doubt: StepCase) -> StepDecision:
        """The step cannot be run again: act as for a result that comes again everywhere."""
        if doubt.unexpected is None:
            return _ACCEPTED
        text = f"{doubt.signal} of {doubt.unexpected.value:.6g}, and the step was not run again"
        judgement = ResultJudgement("correct_but_unexpected", doubt.ranks, "", text)
        return self._actions.act(doubt, judgement, is_judged=False, put_back=self._put_back)

    def _put_back(self) -> None:
        """Make the state as it was before the step, which comes again."""
        self._present.put_back()
        if self._batches is not None:
            self._batches.again()

    def _warn_of_more(self, step: int) -> None:
        if self._alike == ALIKE_MOST + 1:
            self._reporter.warn(
                f"step {step} is unexpected like the {ALIKE_MOST} before it: the training goes on, "
                "and until a step is as expected, more are neither run again nor reported"
            )

    def _warn_once(self, text: str) -> None:
        if not self._is_warned:
            self._is_warned = True
            self._reporter.warn(text)
