"""The step that is being made: its number, and all that is needed to make it again."""

from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

from trainer_sdk.numerics.replay import OwnGradients, StepCall
from trainer_sdk.numerics.snapshot import RandomStates, Snapshot, TrainingParts

if TYPE_CHECKING:
    from trainer_sdk.rank_session import Session

Result = TypeVar("Result")


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

    def note_batch(self) -> None:
        """A batch is given; one that comes again finds the random states of the first time."""
        if self._comes_again:
            states = self._comes_again.popleft()
            states.put_back()
        else:
            states = RandomStates()
        self._at_batches.append(states)

    def compute(self, function: Callable[..., Result], batch: Any, *, is_recorded: bool) -> Result:
        """Call the function, so that it can be called again."""
        if self.before is None:
            self.before = Snapshot(self._parts, self._parameters, again=True)
            states = self.before.random
        else:
            states = RandomStates()
        call = StepCall(function, batch, states)
        self.calls.append(call)
        try:
            with self.own.recorded() if is_recorded else nullcontext():
                result: Result = call.run()
        except BaseException:
            self._forget_calls()  # a script that goes on makes another step
            raise
        return result

    def put_back(self) -> None:
        """Make the state as it was before the step, which comes again."""
        if self.before is not None:
            self.before.put_back()
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
        self.own.clear()

    def _reset_scalers(self) -> None:
        for scaler in self._parts.scalers:
            scaler._per_optimizer_states.clear()  # noqa: SLF001 - they have seen the refused step


class StepNumbers:
    """The number of the step that is being made; a refused step does not count."""

    def __init__(self, session: "Session") -> None:
        self._session = session
        self._made = session.steps_made
        self._counted: int | None = None
        """What the session had counted when the last step was decided."""
        self._is_refused = False

    def next_step(self) -> int:
        """The step that is being made."""
        self.settle()
        counted = self._session.steps_made
        return (self._made if counted == self._counted else counted) + 1

    def made(self, step: int) -> None:
        """The step counts."""
        self._made, self._counted = step, self._session.steps_made

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
