"""`Numerics`, the class that decides which steps of a training count."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar, get_args

import torch

from trainer_sdk.checkpoint import arguments
from trainer_sdk.numerics.agreement import LocalView, RankAgreement, bits, new_case, number
from trainer_sdk.numerics.data import Batches
from trainer_sdk.numerics.events import (
    ActedEvent,
    JudgedEvent,
    NumericsReporter,
    SuspectedEvent,
    finite,
    listed,
)
from trainer_sdk.numerics.examination import StepExamination
from trainer_sdk.numerics.judgement import ROUNDING, RankResults, ResultJudgement, judge
from trainer_sdk.numerics.policy import Action, Mode, NumericsAct, NumericsPolicy, default_policy
from trainer_sdk.numerics.replay import NO_BATCH, OwnGradients, StepCall
from trainer_sdk.numerics.snapshot import RandomStates, Snapshot, TrainingParts
from trainer_sdk.numerics.statistics import ResultWatch, Signal, UnexpectedResult
from trainer_sdk.numerics.values import StepReader, StepValues

if TYPE_CHECKING:
    from trainer_sdk.rank_session import Session

Result = TypeVar("Result")
_READS: Final = ("late", "now")
_ALIKE_MOST: Final = 3
"""More unexpected steps than these in a row are neither run again nor reported."""
_EXPECTED, _UNEXPECTED = 0, 1


class Numerics:
    """Looks at the results of each step, on all ranks alike, and decides which steps count.

    All ranks make it together, and the same calls of it. `state` is the mapping that is given to
    `Checkpointer`, `batches` a loader or any iterable. Modes: `disabled`; `observe` only reports;
    `validate_results` runs a step with an unexpected result again, and each `validate_every`-th
    step; `report_determinism_stats` runs each step again, and counts what differs.

    `transient`, `persistent`, `unexpected`, `not_reproducible` and `replica` say what is done
    about a judged result, `budget` times at most. With `elsewhere="move"` the ranks continue on
    other nodes where only another device can tell. `read="now"` waits for values on a GPU.
    """

    may_be_absent = True

    def __init__(  # noqa: PLR0913 - each is a choice of the training
        self,
        session: "Session",
        state: Mapping[str, Any],
        batches: Iterable[Any] | None = None,
        *,
        mode: Mode = "observe",
        validate_every: int = 0,
        read: Literal["late", "now"] = "late",
        replicas: Any = None,
        transient: Action | None = None,
        persistent: Action | None = None,
        unexpected: Action | None = None,
        not_reproducible: Action | None = None,
        replica: Action | None = None,
        budget: int = 3,
        elsewhere: Literal["report", "move"] = "report",
    ) -> None:
        arguments.state(state)
        arguments.one_of("mode", mode, get_args(Mode))
        arguments.one_of("read", read, _READS)
        self._mode = mode
        self._validate_every = arguments.whole("validate_every", validate_every)
        chosen = {
            "transient": transient,
            "persistent": persistent,
            "unexpected": unexpected,
            "not_reproducible": not_reproducible,
            "replica": replica,
        }
        choices: dict[str, Any] = dict(default_policy(mode))
        choices |= {name: action for name, action in chosen.items() if action is not None}
        budget = arguments.whole("budget", budget)
        self._policy = NumericsPolicy(**choices, budget=budget, elsewhere=elsewhere)
        self._session = session
        self._batches = Batches(() if batches is None else batches, state)
        self._is_on = mode != "disabled"
        self._watch = ResultWatch()
        self._reader = StepReader(waits=read == "now")
        self._calls: list[StepCall] = []
        self._before: Snapshot | None = None
        self._counting = _StepNumbers(session)
        self._alike = 0
        self._last: tuple[str, tuple[int, ...]] | None = None
        """Kind and ranks of the last judgement, while nothing else was judged."""
        self._judged_alike = 0
        if self._is_on:
            self._begin(state, replicas)

    def _begin(self, state: Mapping[str, Any], replicas: Any) -> None:
        self._parts = TrainingParts(state)
        self._parameters = list(self._parts.parameters())
        self._own = OwnGradients(self._parts)
        self._agreement = RankAgreement()
        self._examination = StepExamination(self._parts, self._agreement, replicas)
        self._reporter = NumericsReporter(self._agreement.ranks.rank, self._session._link)  # noqa: SLF001 - one package

    def __iter__(self) -> Iterator[Any]:
        """The batches of one pass; those of a refused step come again."""
        for batch in self._batches:
            self._counting.settle()
            yield batch

    def compute(self, function: Callable[..., Result], batch: Any = NO_BATCH) -> Result:
        """Return what the function returns: the loss, or a tuple that begins with it.

        It is called again if the result of the step is in doubt, so it must do all that computes
        gradients, and nothing else; with a batch as its argument, also on another rank.
        """
        if not self._may_repeat:
            result: Result = function() if batch is NO_BATCH else function(batch)
            return result
        if not self._calls:
            self._before = Snapshot(self._parts, parameters=self._parameters)
        states = self._before.random if not self._calls and self._before else RandomStates()
        call = StepCall(function, batch, states)
        self._calls.append(call)
        if not self._is_validated(self._counting.next_step()):
            result = call.run()
        else:
            with self._own.recorded():
                result = call.run()
        return result

    def accepts(self, *, loss: Any = None, grad_norm: Any = None, lr: float | None = None) -> bool:
        """Whether this step counts; False if its batches come again, or the training has gone back.

        All ranks call it after each step, before the optimizer's.
        """
        if not self._is_on:
            return True
        step = self._counting.next_step()
        self._reader.add(step, loss, grad_norm, self._rate() if lr is None else lr)
        arrived = self._reader.arrived()
        unexpected = self._look(arrived)
        severity = _EXPECTED if unexpected is None else _UNEXPECTED
        (severity,) = self._agreement.highest([severity])
        if severity == _EXPECTED and not self._is_validated(step):
            self._alike = 0
            return self._accept(step, arrived)
        with self._session.section("numerics", "evaluation"):
            if self._examine(step, unexpected):
                return self._accept(step, arrived)
        self._refuse(step)
        return False

    def state_dict(self) -> dict[str, Any]:
        """The statistics of this rank."""
        return {self._key: (self._watch.state_dict(),)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with these statistics."""
        self._watch.load_state_dict(state[self._key][0])

    @property
    def _key(self) -> str:
        ranks = self._agreement.ranks
        return f"rank-{ranks.rank}-of-{ranks.size}"

    @property
    def _may_repeat(self) -> bool:
        return self._mode in ("validate_results", "report_determinism_stats")

    def _is_validated(self, step: int) -> bool:
        if self._mode == "report_determinism_stats":
            return True
        every = self._validate_every
        return self._mode == "validate_results" and every > 0 and step % every == 0

    def _rate(self) -> float | None:
        for optimizer in self._parts.optimizers:
            rate = optimizer.param_groups[0].get("lr")
            return rate if isinstance(rate, float) else None
        return None

    def _look(self, arrived: list[StepValues]) -> "_Sighting | None":
        for values in arrived:
            norm = values.grad_norm
            if self._parts.scalers and norm is not None and not norm < float("inf"):
                norm = None  # a scaler of gradients looks for its scale so
            unexpected = self._watch.look(values.step, values.loss, norm, values.lr)
            if unexpected is not None:
                return _Sighting(values.step, unexpected)
        return None

    def _accept(self, step: int, arrived: list[StepValues]) -> bool:
        for values in arrived:
            self._watch.learn(values.step, values.loss, values.grad_norm, values.lr)
            self._show("loss", values.loss)
            self._show("grad_norm", values.grad_norm)
        self._batches.taken(step)
        self._counting.made(step)
        self._forget()
        return True

    def _show(self, name: Literal["loss", "grad_norm"], value: float | None) -> None:
        if value is None or not self._session.is_watched:
            return
        self._session.report(name, value)
        band = self._watch.band(name)
        if band is not None:
            self._session.report(f"{name}_low", band.low)
            self._session.report(f"{name}_high", band.high)

    def _refuse(self, step: int) -> None:
        self._batches.again()
        self._counting.refused(step)
        self._forget()

    def _forget(self) -> None:
        self._calls.clear()
        self._before = None
        self._own.clear()

    def _examine(self, step: int, sighting: "_Sighting | None") -> bool:
        """Find out what computed the step's results, and act; whether the step counts."""
        views = self._agreement.ranks.gather(self._view(step, sighting), LocalView)
        case = views[0].case
        suspects = [rank for rank, view in enumerate(views) if view.signal]
        unexpected = _chosen(views)
        self._alike = self._alike + 1 if suspects else 0
        if self._alike > _ALIKE_MOST:
            return True
        if unexpected is not None:
            self._report_suspicion(case, step, unexpected, suspects)
        calls = {view.calls for view in views}
        if len(calls) > 1 or not min(calls) or self._before is None:
            return True
        before = self._before
        results = self._examination.run(self._calls, before, self._own)
        is_exact = all(view.is_exact for view in views)
        rounding = 0.0 if is_exact else ROUNDING
        judgement = judge(unexpected, results, self._parts.groups, rounding)
        if self._mode == "report_determinism_stats" or not self._is_news(judgement):
            return True
        assert judgement is not None
        return self._act(case, step, unexpected, judgement, results)

    def _is_news(self, judgement: ResultJudgement | None) -> bool:
        """Whether there is a judgement, and not the same as of the last steps."""
        last = None if judgement is None else (judgement.kind, judgement.ranks)
        self._judged_alike = self._judged_alike + 1 if last == self._last else 1
        self._last = last
        return last is not None and self._judged_alike <= _ALIKE_MOST

    def _view(self, step: int, sighting: "_Sighting | None") -> LocalView:
        is_present = sighting is None or sighting.step == step
        seen = sighting.unexpected if sighting else None
        return LocalView(
            case=new_case(),
            signal=seen.signal if seen else "",
            value=bits(seen.value) if seen else 0,
            low=bits(seen.low) if seen and seen.low is not None else None,
            high=bits(seen.high) if seen and seen.high is not None else None,
            moved_at=seen.moved_at if seen else 0,
            calls=len(self._calls) if is_present else 0,
            is_exact=torch.are_deterministic_algorithms_enabled(),
        )

    def _act(
        self,
        case: str,
        step: int,
        unexpected: UnexpectedResult | None,
        judgement: ResultJudgement,
        results: list[RankResults],
    ) -> bool:
        """Do what the policy wants; whether the step counts."""
        signal: Signal = unexpected.signal if unexpected else "results_differ"
        moved_at = unexpected.moved_at if unexpected else step
        span = self._batches.span(moved_at)
        act = self._policy.decide(judgement, moved_at=moved_at, span=span, earlier=(), taken=0)
        self._report_judgement(case, step, signal, judgement, results)
        outcome: Literal["done", "observed", "refused"] = "observed"
        if act.action == "again":
            assert self._before is not None
            self._before.put_back()
            for scaler in self._parts.scalers:
                scaler._per_optimizer_states.clear()  # noqa: SLF001 - it has seen the refused step
            outcome = "done"
        self._report_act(case, step, act, outcome)
        return act.action != "again"

    def _report_suspicion(
        self, case: str, step: int, unexpected: UnexpectedResult, ranks: list[int]
    ) -> None:
        everyone = len(ranks) == self._agreement.ranks.size
        self._reporter.report(
            SuspectedEvent(
                case=case,
                step=step,
                signal=unexpected.signal,
                moved_at=unexpected.moved_at,
                rank=ranks[0] if len(ranks) == 1 else None,
                ranks=() if everyone else listed(ranks),
                value=finite(unexpected.value),
                low=finite(unexpected.low),
                high=finite(unexpected.high),
            )
        )

    def _report_judgement(
        self,
        case: str,
        step: int,
        signal: Signal,
        judgement: ResultJudgement,
        results: list[RankResults],
    ) -> None:
        shown = next((result for result in results if result.rank in judgement.ranks), None)
        positions = self._batches.position or (None, None)
        self._reporter.report(
            JudgedEvent(
                case=case,
                step=step,
                signal=signal,
                kind=judgement.kind,
                reason=judgement.reason,
                ranks=listed(judgement.ranks),
                node=shown.node if shown else "",
                device=shown.device if shown else "",
                group=judgement.group,
                first=finite(shown.first.loss) if shown else None,
                again=tuple(finite(result.loss) for result in shown.again) if shown else (),
                elsewhere=finite(shown.elsewhere.loss) if shown and shown.elsewhere else None,
                elsewhere_by=shown.elsewhere_by if shown else None,
                samples_from=positions[0],
                samples_to=positions[1],
            )
        )

    def _report_act(self, case: str, step: int, act: NumericsAct, outcome: str) -> None:
        positions = act.span or (None, None)
        self._reporter.report(
            ActedEvent(
                case=case,
                step=step,
                action=act.action,
                outcome=outcome,
                reason=act.reason,
                samples_from=positions[0],
                samples_to=positions[1],
            )
        )


@dataclass(frozen=True, slots=True)
class _Sighting:
    """An unexpected result that this rank has seen."""

    step: int
    unexpected: UnexpectedResult


class _StepNumbers:
    """The number of the step that is being made; a refused step does not count."""

    def __init__(self, session: "Session") -> None:
        self._session = session
        self._made = session.steps_made
        self._counted: int | None = None
        """What the session had counted when the last step was decided."""
        self._refused = False

    def next_step(self) -> int:
        """The step that is being made."""
        self.settle()
        counted = self._session.steps_made
        return (self._made if counted == self._counted else counted) + 1

    def made(self, step: int) -> None:
        """The step counts."""
        self._made, self._counted = step, self._session.steps_made

    def refused(self, step: int) -> None:
        """The step does not count, and neither does the script's call after it."""
        self._made, self._refused = step - 1, True
        self._counted = step - 1
        self._session._step = step - 2  # noqa: SLF001 - one package

    def settle(self) -> None:
        """The refused step is over, whether the script has counted it or not."""
        if self._refused:
            self._refused = False
            self._session._step = self._made  # noqa: SLF001 - one package


def _chosen(views: list[LocalView]) -> UnexpectedResult | None:
    """The unexpected result to judge: of the lowest rank, those without a number first."""
    seen = [view for view in views if view.signal]
    if not seen:
        return None
    view = min(seen, key=lambda view: view.signal not in ("nan", "inf"))
    signal: Any = view.signal
    return UnexpectedResult(
        signal,
        number(view.value),
        None if view.low is None else number(view.low),
        None if view.high is None else number(view.high),
        min(view.moved_at for view in seen),
    )
