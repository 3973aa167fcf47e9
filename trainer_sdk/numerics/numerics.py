"""`Numerics`, the class that decides which steps of a training count."""

from collections.abc import Callable, Iterable, Iterator, MutableMapping
from time import monotonic
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar, get_args
from weakref import WeakMethod, finalize

import torch.distributed as dist

from trainer_sdk.checkpoint import arguments
from trainer_sdk.numerics.actions import StepDecision
from trainer_sdk.numerics.agreement import RankAgreement
from trainer_sdk.numerics.choices import check_objects, check_ways_back, useless
from trainer_sdk.numerics.data import Batches
from trainer_sdk.numerics.decisions import ACCEPTED, StepDecisions
from trainer_sdk.numerics.events import NumericsReporter
from trainer_sdk.numerics.examination import Sighting
from trainer_sdk.numerics.policy import Mode, NumericsPolicy, policy_of
from trainer_sdk.numerics.present_step import StepNumbers, restored_statistics, saved_statistics
from trainer_sdk.numerics.rank_links import RankAlarm
from trainer_sdk.numerics.replay import NO_BATCH
from trainer_sdk.numerics.replica_hash import HASH_EVERY
from trainer_sdk.numerics.rollback import RestartNeededError, Rollback
from trainer_sdk.numerics.skips import ActRecord
from trainer_sdk.numerics.snapshot import TrainingParts
from trainer_sdk.numerics.statistics import ResultWatch, Series
from trainer_sdk.numerics.values import OutputNorm, StepReader, StepValues

if TYPE_CHECKING:
    from trainer_sdk.checkpoint.checkpointer import Checkpointer
    from trainer_sdk.rank_session import Session

Result = TypeVar("Result")
_READS: Final = ("late", "now")
_COUNTED_EVERY_S: Final = 60.0
_BAND_EVERY: Final = 8
_UNEXPECTED, _DIFFERS, _LATE = 1, 2, 4
"""Bits on which the ranks agree: a result, the hash of a replica, values on a GPU."""


class Numerics:
    """Looks at the results of each step, on all ranks alike, and decides which steps count.

    All ranks make it together, and the same calls of it. `Session.numerics` describes the
    arguments; `actions` are those of `NumericsPolicy`.

    Where a step may be run again, ranks agree on each of them before its optimizer. Elsewhere a
    rank with an unexpected result calls the others, and all decide in the next step.
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
        **actions: Any,
    ) -> None:
        arguments.state(state, is_filled=checkpointer is not None)
        arguments.one_of("mode", mode, get_args(Mode))
        arguments.one_of("read", read, _READS)
        self._mode = mode
        self._validate_every = arguments.whole("validate_every", validate_every)
        self._hash_every = arguments.whole("hash_every", hash_every)
        policy = policy_of(mode, **actions)
        check_objects(batches, replicas, checkpointer)
        if rollback is None:
            check_ways_back(policy, batches, checkpointer, root)
        self._session = session
        self._is_on = mode != "disabled"
        self._may_repeat = mode in ("validate_results", "report_determinism_stats")
        self._watch = ResultWatch()
        self._reader = StepReader(waits=read == "now")
        self._asked: Any = None
        owns_loop = rollback is None
        if rollback is None:
            rollback = Rollback(state, session, checkpointer=checkpointer, root=root)
        skips = "skip" in policy.by_kind.values()
        if batches is not None and not isinstance(batches, Batches):
            batches = Batches(batches, state, rollback.skips.spans, skips=skips)
        self._batches: Batches[Any] | None = batches
        if self._is_on:
            self._begin(state, replicas, policy, rollback)
            if owns_loop:
                self._mind_end(session, batches)

    def _begin(
        self,
        state: MutableMapping[str, Any],
        replicas: Any,
        policy: NumericsPolicy,
        rollback: Rollback,
    ) -> None:
        self._parts = TrainingParts(state)
        if self._may_repeat and not self._parts.named:
            raise ValueError(
                f"mode={self._mode!r} needs the model in the state: the gradients of a step that "
                "is run again are put back"
            )
        self._outputs = OutputNorm(self._parts.modules)
        self._agreement = RankAgreement()
        self._ranks = self._agreement.ranks
        self._reporter = NumericsReporter(self._ranks.rank, self._session)
        self._counting = StepNumbers(self._session, self._reporter.warn)
        if text := useless(policy, self._mode):
            self._reporter.warn(text)
        self._steps, self._counted_at = 0, monotonic()
        self._is_late = False
        """Whether values of the last step came late on any rank, so that it is not run again."""
        self._doubted_turn = -1
        self._seen: Sighting | None = None
        """What this rank has called the others for."""
        self._moved = rollback.skips.moved
        self._validates = self._may_repeat and bool(
            self._mode == "report_determinism_stats" or self._validate_every or self._moved
        )
        self._decisions = StepDecisions(
            self._parts,
            self._agreement,
            self._mode,
            policy,
            rollback,
            self._batches,
            self._reporter,
            replicas,
        )
        self._replicas, self._present = self._decisions.replicas, self._decisions.present
        self._alarm: RankAlarm | None = None
        if self._mode == "observe":
            self._begin_alarm()

    def _begin_alarm(self) -> None:
        """From here on, ranks agree on a step only if one calls the others."""
        self._alarm = self._agreement.alarm()
        if self._alarm is not None:
            finalize(self, self._alarm.close)

    def __iter__(self) -> Iterator[Any]:
        """The batches of one pass; those of a refused step come again."""
        if not self._is_on:
            yield from self._batches or ()
            return
        try:
            for batch in self._batches or ():
                self._counting.begin()
                if self._may_repeat:
                    self._present.note_batch()
                yield batch
        finally:  # also if the script leaves its loop
            if self._decisions.counts.again:
                self._report_counts()

    def compute(self, function: Callable[..., Result], batch: Any = NO_BATCH) -> Result:
        """Return what the function returns: the loss, or a tuple that begins with it.

        It is called again if the result of the step is in doubt, so it must do all that computes
        gradients, and nothing else; with a batch as its argument, also on another rank.
        """
        if self._is_on:
            self._counting.begin()
            self._outputs.is_open = True
            if self._may_repeat:
                is_validated = self._validates and self._is_validated(self._counting.next_step())
                if is_validated or not self._is_late:
                    return self._present.compute(function, batch, is_recorded=is_validated)
        result: Result = function() if batch is NO_BATCH else function(batch)
        return result

    def accepts(self, *, loss: Any = None, grad_norm: Any = None, lr: float | None = None) -> bool:
        """Whether this step counts; False if its batches come again, or the training has gone back.

        All ranks call it after each step, before the optimizer's.
        """
        if not self._is_on:
            return True
        step = self._counting.decide()
        if not self._steps:
            self._replicas.equal_at = self._replicas.equal_at or step
        output = None
        if loss is None or self._outputs.is_watched:
            output = self._outputs.taken(is_wanted=loss is None)
        rate = self._rate() if lr is None else lr
        arrived = self._reader.read(step, loss, grad_norm, rate, output)
        decision = self._decided(step, self._look(arrived))
        if decision.is_accepted:
            return self._accept(step, arrived)
        is_back = decision.to_step is not None
        self._refuse(step - 1 if decision.to_step is None else decision.to_step, is_back=is_back)
        return False

    def _decided(self, step: int, sighting: Sighting | None) -> StepDecision:
        """Agree with the other ranks on what is seen, and act."""
        replicas, alarm = self._replicas, self._alarm
        if replicas.is_pending:
            replicas.go_on()
        own = _UNEXPECTED if sighting is not None else 0
        if replicas.judgement is not None:
            own |= _DIFFERS
        if alarm is not None:
            alarm.turn += 1
            if own or alarm.is_called or self._validates:
                return self._answer(alarm, step, sighting)
            return ACCEPTED
        agreed = self._agreement.joined(own | _LATE if self._reader.is_late else own)
        if not agreed and not self._validates:
            self._is_late, self._decisions.alike = False, 0
            return ACCEPTED
        return self._decide(step, sighting, agreed)

    def _answer(self, alarm: RankAlarm, step: int, sighting: Sighting | None) -> StepDecision:
        """Decide if a rank has called for this step, and call for what this rank has seen."""
        decision = ACCEPTED
        is_validated = self._validates and self._is_validated(step)
        if (alarm.is_called and alarm.is_due()) or is_validated:
            seen, self._seen = self._seen, sighting
            decision = self._decide_all(alarm, step, seen)
        else:
            self._seen = self._seen or sighting
        if decision.is_accepted and (self._seen or self._replicas.judgement):
            alarm.call()
        return decision

    def _decide_all(
        self, alarm: RankAlarm | None, step: int, sighting: Sighting | None
    ) -> StepDecision:
        """Decide in a turn in which all ranks do."""
        own = _UNEXPECTED if sighting is not None else 0
        if alarm is None:
            return self._decide(step, sighting, self._agreement.joined(own | _DIFFERS))
        self._replicas.settle()  # before another message to all ranks
        agreed = self._ranks.highest([own])[0] | _DIFFERS
        if agreed & _UNEXPECTED:
            if alarm.turn > self._doubted_turn + 1:
                self._decisions.alike = 0
            self._doubted_turn = alarm.turn
        return self._decide(step, sighting, agreed)

    def _decide(self, step: int, sighting: Sighting | None, agreed: int) -> StepDecision:
        """Act on what all ranks have agreed on."""
        decisions = self._decisions
        if self._alarm is None:
            self._is_late = agreed >= _LATE
            if self._is_late:
                self._begin_alarm()
        if not agreed & _UNEXPECTED:
            decisions.alike = 0
        is_examined = agreed & _UNEXPECTED or (self._validates and self._is_validated(step))
        if not is_examined and not agreed & _DIFFERS:
            return ACCEPTED
        decision = decisions.act_on_replicas(step, self._replicas.taken()) or ACCEPTED
        if is_examined and decision.is_accepted:
            moved, self._moved = self._moved_to(step), None
            with self._session.section("numerics", "evaluation"):
                decision = decisions.examine(step, sighting, self._watch.usual_loss, moved)
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
            self._decisions.actions.is_over = True
            self._ends_pass()
            step = self._counting.next_step() - 1
            self._decisions.act_on_replicas(step, self._replicas.compared_now(step))

    def _ends_pass(self) -> bool:
        """Decide on the steps that the ranks have not agreed on; whether the training went back."""
        if not self._steps or not (self._alarm or self._is_late):
            return False
        step, arrived = self._counting.next_step() - 1, self._reader.arrived(waits=True)
        seen, self._seen = self._seen, None
        for sighting in (seen, self._look(arrived)):
            decision = self._decide_all(self._alarm, step, sighting)
            if decision.to_step is not None:
                self._refuse(decision.to_step, is_back=True)
                return True
        for values in arrived:
            self._watch.learn(values.step, values.loss, values.grad_norm, values.lr, values.output)
        return False

    def _session_over(self) -> None:
        try:
            if self._ranks.size == 1 or dist.is_initialized():
                self.finish()
        except RestartNeededError:
            raise
        except Exception as error:  # noqa: BLE001 - the training is over, whatever it was
            self._reporter.warn(f"the last steps are not decided: {type(error).__name__}: {error}")

    def leave(self) -> None:
        """Give up: others that wait for this rank get an error once it has dropped this object."""
        if self._alarm is not None:
            self._alarm.close()
        self._agreement.leave()

    def state_dict(self) -> dict[str, Any]:
        """The statistics of this rank."""
        if not self._is_on:
            return {}
        self._asked = (saved_statistics(self._watch, self._decisions.suspects),)
        return {self._key: self._asked}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with these statistics; they begin anew with another world size."""
        whole = state.get(self._key, self._asked) if self._is_on else self._asked
        if whole is self._asked:
            return
        self._watch, self._decisions.suspects, text = restored_statistics(whole)
        if text:
            self._reporter.warn(text)

    @property
    def _key(self) -> str:
        return f"rank-{self._ranks.rank}-of-{self._ranks.size}"

    def _is_validated(self, step: int) -> bool:
        if self._mode == "report_determinism_stats" or self._moved_to(step):
            return True
        every = self._validate_every
        return every > 0 and step % every == 0

    def _moved_to(self, step: int) -> ActRecord | None:
        """The act after which ranks make this step first, to compare it with another round's."""
        moved = None if self._steps else self._moved
        return moved if moved and moved.step == step else None

    def _report_counts(self) -> None:
        self._counted_at = monotonic()
        self._reporter.report(self._decisions.counts.event(self._steps))

    def _rate(self) -> float | None:
        if self._parts.optimizers:
            rate = self._parts.optimizers[0].param_groups[0].get("lr")
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
            self._watch.learn(values.step, values.loss, values.grad_norm, values.lr, values.output)
            if self._session._link.attached:  # noqa: SLF001 - one package
                has_band = not step % _BAND_EVERY
                self._show("loss", values.loss, has_band=has_band)
                self._show("grad_norm", values.grad_norm, has_band=has_band)
        if self._batches is not None:
            self._batches.taken(step)
        self._counting.made(step)
        if not self._decisions.suspects.are_none:
            self._decisions.suspects.accepted()
        self._steps += 1
        if self._hash_every and not step % self._hash_every and self._replicas.has_replicas:
            self._replicas.start(step)
        if self._may_repeat:
            self._present.clear()
            counts = self._decisions.counts
            if counts.again and monotonic() - self._counted_at > _COUNTED_EVERY_S:
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
            self._seen = None
            self._reader.forget()
        self._counting.refused(made)
        self._decisions.refuse(made, is_back=is_back)
