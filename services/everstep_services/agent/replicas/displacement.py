"""Which states of a rank a holder takes, and which of those that it has make room. Pure.

A state of a later round is newer than one of a higher step. There is one exception: a training
that was sent back goes on from an older state, so newer states of earlier rounds are abandoned.
The sender of a state says from which state its training has gone on.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from trainer_sdk.checkpoint.image_folder import RestoredState
from trainer_sdk.checkpoint.manifest import Identity


@dataclass(frozen=True, slots=True)
class ImageSender:
    """An agent that wants a state to be held."""

    round: int
    restored: RestoredState | None = None
    """The state from which the rank has gone on, if it has restored one."""
    abort: Callable[[], object] = lambda: None
    """Ends its connection, and so the transfer."""


class TrainingLine:
    """The training of one rank, as far as a holder knows it."""

    def __init__(self) -> None:
        self._round = 0
        self._restored: RestoredState | None = None

    def hear(self, sender: ImageSender) -> bool:
        """Learn from the sender of a state; False, and nothing is learned, if its round is over."""
        if sender.round < self._round:
            return False
        self._round = sender.round
        told, ours = sender.restored, self._restored
        if told is not None and (ours is None or told.round >= ours.round):
            self._restored = told
        return True

    def has_left(self, state: Identity) -> bool:
        """The training has abandoned this state when it went back to an older one."""
        return self._restored is not None and self._restored.has_left(state)

    def refusal(self, state: Identity, held: Iterable[Identity]) -> str:
        """Why this state is not taken; empty if it is."""
        if self._restored is not None and self.has_left(state):
            return f"the training went back to step {self._restored.identity.step}, before it"
        if any(copy.age > state.age and not self.has_left(copy) for copy in held):
            return "a newer one is here"
        return ""

    def worth(self, state: Identity) -> tuple[bool, int, int, int]:
        """The sort key of states: the lowest makes room first."""
        return (not self.has_left(state), *state.age)
