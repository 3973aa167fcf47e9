"""The step that is being made: its number, and all that is needed to make it again."""

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from trainer_sdk.numerics.replay import OwnGradients, StepCall
from trainer_sdk.numerics.snapshot import RandomStates, Snapshot, TrainingParts, random_states
from trainer_sdk.numerics.statistics import ResultWatch

if TYPE_CHECKING:
    from trainer_sdk.rank_session import Session

Result = TypeVar("Result")
_EACH_STEP = "call it once in each step, on all ranks, or results are not judged as they should be"
_HEALTHY = 16
"""Steps in a row with expected results, after which the ones before are no longer suspect."""


class PresentStep:
    """The calls of the step that is being made, and the state before them."""

    def __init__(self, parts: TrainingParts) -> None:
        self._parts = parts
        self._parameters = list(parts.parameters())
        self._at_batches: list[RandomStates] = []
        self._comes_again: deque[RandomStates] = deque()
        self.calls: list[StepCall] = []
        self.before: Snapshot | None = None
        self.own = OwnGradients(parts)
        """What is recorded of the gradients of the first computation."""
        self._is_recorded = False

    def note_batch(self) -> None:
        """A batch is given; one that comes again finds the random states of the first time."""
        if self._comes_again:
            states = self._comes_again.popleft()
            states.put_back()
        else:
            states = random_states()
        self._at_batches.append(states)

    def compute(self, function: Callable[..., Result], batch: Any, *, is_recorded: bool) -> Result:
        """Call the function, so that it can be called again."""
        if self.before is None:
            self.before = Snapshot(self._parts, self._parameters, again=True)
            states = self.before.random
        else:
            states = random_states()
        call = StepCall(function, batch, states)
        self.calls.append(call)
        try:
            result: Result = self._recorded(call) if is_recorded else call.run()
        except BaseException:
            self._forget_calls()  # a script that goes on makes another step
            raise
        return result

    def _recorded(self, call: StepCall) -> Any:
        self._is_recorded = True
        with self.own.recorded():
            return call.run()

    def put_back(self) -> None:
        """Make the state as it was before the step, which comes again."""
        if self.before is not None:
            self.before.put_back()
        if self._at_batches:  # a process that makes the step after a restart begins there
            self._at_batches[0].put_back()
        self._comes_again = deque(self._at_batches)
        self._reset_scalers()

    def leave(self) -> None:
        """The training has gone back: nothing of this step is left."""
        for parameter in self._parameters:
            parameter.grad = None
        self._comes_again.clear()
        self._reset_scalers()

    def clear(self) -> None:
        """The step is over."""
        self._forget_calls()
        self._at_batches = []

    def _forget_calls(self) -> None:
        self.calls.clear()
        self.before = None
        if self._is_recorded:
            self._is_recorded = False
            self.own.clear()

    def _reset_scalers(self) -> None:
        for scaler in self._parts.scalers:
            scaler._per_optimizer_states.clear()  # noqa: SLF001 - they have seen the refused step


class SuspectSteps:
    """Since which step results cannot be trusted; equal on all ranks.

    A step that was accepted although its result was unexpected may have spoiled the parameters. So
    a way back ends before it, until enough steps in a row were as expected.
    """

    def __init__(self) -> None:
        self.since: int | None = None
        """The first suspect step."""
        self._healthy = 0
        self._doubted: int | None = None
        self.are_none = True
        """Whether nothing is suspect or in doubt."""

    def doubt(self, moved_at: int) -> None:
        """The present step is in doubt; the statistics have moved since `moved_at`."""
        self._doubted = moved_at
        self.are_none = False

    def accepted(self) -> None:
        """The present step counts."""
        doubted, self._doubted = self._doubted, None
        if doubted is not None:
            self.since = doubted if self.since is None else min(self.since, doubted)
            self._healthy = 0
        elif self.since is not None:
            self._healthy += 1
            if self._healthy == _HEALTHY:
                self.since = None
        self.are_none = self.since is None

    def refused(self, made: int) -> None:
        """The training goes on after the step `made`."""
        self._doubted = None
        if self.since is not None and self.since > made:
            self.since = None

    def state(self) -> list[int | None]:
        """For a checkpoint."""
        return [self.since, self._healthy]

    def load(self, state: list[Any]) -> None:
        """Go on from there."""
        self.since, self._healthy = state
        self.are_none = self.since is None


def saved_statistics(watch: ResultWatch, suspects: SuspectSteps) -> dict[str, Any]:
    """What a checkpoint has of them."""
    return watch.state_dict() | {"suspect": suspects.state()}


def restored_statistics(saved: Any) -> tuple[ResultWatch, SuspectSteps, str]:
    """Those of a checkpoint, and what is wrong with it in a line; empty if nothing is.

    A checkpoint of another release may have other keys: what it lacks begins anew.
    """
    watch, suspects = ResultWatch(), SuspectSteps()
    fresh = saved_statistics(watch, suspects)
    try:
        given = dict(saved[0])
        watch.load_state_dict(fresh | given)
        suspects.load((fresh | given)["suspect"])
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        text = f"the saved statistics cannot be read, and begin anew: {error!r}"
        return ResultWatch(), SuspectSteps(), text
    odd = ", ".join(sorted(map(str, fresh.keys() ^ given.keys())))
    return watch, suspects, odd and f"the saved statistics are of another release: see {odd}"


class StepNumbers:
    """The number of the step that is being made; a refused step does not count."""

    def __init__(self, session: "Session", warn: Callable[[str], None]) -> None:
        self._session = session
        self._warn = warn
        self._is_warned = False
        self._made = session.steps_made
        self._counted: int | None = None
        """What the session had counted when the last step was decided."""
        self._is_refused = False
        self._calls = session._steps  # noqa: SLF001 - one package
        """How many steps the session had counted when the last step was decided."""
        self._is_begun: bool | None = None

    def begin(self) -> None:
        """A batch is given or computed."""
        self._is_begun = True
        if self._is_refused:
            self.settle()
        calls = self._session._steps - self._calls  # noqa: SLF001 - one package
        if calls > 1:
            self._warn_once(f"{calls} steps were made without accepts")

    def decide(self) -> int:
        """A step is decided; its number."""
        if self._is_begun:
            self._is_begun = False
        elif self._is_begun is not None:
            self._warn_once("accepts was called twice in a step")
        self._calls = self._session._steps  # noqa: SLF001 - one package
        counted = self._session._step  # noqa: SLF001 - one package
        if self._is_refused or counted == self._counted:
            return self.next_step()
        return counted + 1

    def next_step(self) -> int:
        """The step that is being made."""
        if self._is_refused:
            self.settle()
        counted = self._session._step  # noqa: SLF001 - one package
        return (self._made if counted == self._counted else counted) + 1

    def made(self, step: int) -> None:
        """The step counts."""
        self._made, self._counted = step, self._session._step  # noqa: SLF001 - one package

    def refused(self, made: int) -> None:
        """Go on after step `made`; the script's call after the refused step does not count."""
        self._made = self._counted = made
        self._is_refused = True
        self._session._step = made - 1  # noqa: SLF001 - one package

    def settle(self) -> None:
        """The refused step is over, whether the script has counted it or not."""
        if self._is_refused:
            self._is_refused = False
            self._session._step = self._made  # noqa: SLF001 - one package

    def _warn_once(self, text: str) -> None:
        if not self._is_warned:
            self._is_warned = True
            self._warn(f"{text}: {_EACH_STEP}")
