"""Which states of a rank a keeper takes, and which of those that it holds make room. Pure.

A later round is newer than a higher step. That is not all: a training that was sent back goes on
from an older state, and what is newer than that one, and of a round before, comes to nothing.
Whoever sends a state says what its training has gone on from.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from trainer_sdk.checkpoint.image_folder import RestoredState
from trainer_sdk.checkpoint.manifest import Identity


@dataclass(frozen=True, slots=True)
class Sender:
    """An agent that wants a state to be held."""

    round: int
    restored: RestoredState | None = None
    """From which state the rank has gone on, if it has restored one."""
    abort: Callable[[], object] = lambda: None
    """Ends its connection, and with it what is being received."""


class TrainingLine:
    """Of one rank's training, as far as a keeper was told."""

    def __init__(self) -> None:
        self._round = 0
        self._restored: RestoredState | None = None

    def hear(self, sender: Sender) -> bool:
        """Learn from whoever sends a state; False, and nothing, from a round that is over."""
        if sender.round < self._round:
            return False
        self._round = sender.round
        told, known = sender.restored, self._restored
        if told is not None and (known is None or told.round >= known.round):
            self._restored = told
        return True

    def has_left(self, state: Identity) -> bool:
        """It is newer than what the training has gone on from, and of a round before."""
        return self._restored is not None and self._restored.has_left(state)

    def refusal(self, state: Identity, held: Iterable[Identity]) -> str:
        """Why this one is not taken, if it is not."""
        if self._restored is not None and self.has_left(state):
            return f"the training went back to step {self._restored.identity.step}, before it"
        if any(one.age > state.age and not self.has_left(one) for one in held):
            return "a newer one is here"
        return ""

    def worth(self, state: Identity) -> tuple[bool, int, int]:
        """What has less makes room first."""
        return (not self.has_left(state), *state.age)
