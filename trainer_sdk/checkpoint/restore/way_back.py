"""The way back of one training: where to look, what was loaded, and whether it was any good."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import SupportsFloat

from trainer_sdk.checkpoint.events import Teller
from trainer_sdk.checkpoint.group import Group
from trainer_sdk.checkpoint.job_context import Whose
from trainer_sdk.checkpoint.restore.agreement import Agreeing
from trainer_sdk.checkpoint.restore.ahead import Ahead
from trainer_sdk.checkpoint.restore.choice import Past
from trainer_sdk.checkpoint.restore.discovery import FAILURES, RAN_S, RESTARTS, Home
from trainer_sdk.checkpoint.restore.quarantine import WITHIN_STEPS, Loaded, LossWatch
from trainer_sdk.checkpoint.restore.restorer import Restored, Restoring
from trainer_sdk.checkpoint.restore.target import State
from trainer_sdk.checkpoint.schedule.interval import Bounds, Every, Pace
from trainer_sdk.checkpoint.schedule.save_schedule import Pacing
from trainer_sdk.checkpoint.storage import storage_for

_AGENT_WITHIN_S = 900.0
"""More than agents take: whoever has none any more is ended by its warden."""
_rounds: dict[str, int] = {}
"""By root: of this launch since a restore from there, where no agent counts rounds."""


@dataclass(frozen=True, slots=True)
class Latest:
    """The newest checkpoint that all ranks seem to have."""

    step: int
    tier: str
    """Where this rank would have it from: `memory`, `peer` or `global`."""


class WayBack:
    """Restores, and watches the steps after it."""

    def __init__(
        self, about: Whose, group: Group, teller: Teller, *, root: str, has_images: bool
    ) -> None:
        self._group = group
        self._teller = teller
        self._home = Home(
            job=about.job,
            round=about.round if about.is_counted else 0,
            rank=group.rank,
            world_size=group.size,
            images=Path(about.images) if has_images else None,
            storage=storage_for(root) if root else None,
            agent_within_s=_AGENT_WITHIN_S if about.has_keeper else 0.0,
        )
        self._ahead: Ahead | None = None if self._home.images is None else Ahead(self._home)
        self._root = root
        self._round = about.round
        self._is_counted = about.is_counted
        self._began = monotonic()
        self._restarts = about.restarts
        self._past = Past()
        self._watch: LossWatch | None = None

    @property
    def round(self) -> int:
        """The present one: later than all that a restore has seen, where no agent counts them.

        Also than what another `Checkpointer` of this process has seen in the same root: the saves
        of an earlier round are taken for those of a launch that is over.
        """
        return max(self._round, _rounds.get(self._root, 0))

    def latest(self) -> Latest | None:
        """All ranks together: what a restore would try first."""
        agreeing = Agreeing(self._home, self._group, self._teller, None, None)
        try:
            choice = agreeing.newest(agreeing.look())
        finally:
            agreeing.close()
        if choice is None:
            return None
        return Latest(choice.identity.step, choice.offers[self._group.rank].tier)

    def restore(
        self, state: State, *, step: int | None, allow_fresh_start: bool, strict: bool
    ) -> Restored | None:
        """All ranks together: load the newest that all can have, or this step."""
        restoring = Restoring(
            self._home, self._group, self._teller, step, self._ahead, is_strict=strict
        )
        self._ahead = None
        found = restoring.restore(state, allow_fresh_start=allow_fresh_start)
        if found is not None:
            self._past = found.past
            if not self._is_counted:
                self._round = max(self.round, found.last_round + 1)
                if self._root:
                    _rounds[self._root] = self._round
            loaded = Loaded(
                identity=found.choice.identity,
                tier=found.tier,
                round=self.round,
                images=self._home.images,
                storage=self._home.storage,
                failed_before=found.failed_at,
            )
            self._watch = LossWatch(loaded, self._teller, self._group.rank, WITHIN_STEPS)
        return found

    def see_loss(self, loss: SupportsFloat, await_saves: Callable[[], object]) -> None:
        """The loss of a step; no number soon after a load quarantines what was loaded."""
        if self._watch is not None:
            self._watch.see(loss, await_saves)

    def saves_are_over(self) -> None:
        """What has become visible since the loss was no number is quarantined, too."""
        if self._watch is not None:
            self._watch.mark()

    def pacing(self, every: Every) -> Pacing:
        """When to save, by what the job has seen of failures so far."""
        failures = self._past.failures_by(self._restarts)
        pace = Pace(every, Bounds(), failures=failures, ran_s=self._past.ran_s)
        return Pacing(every, self._group, self._teller, pace)

    def close(self) -> None:
        """Let go of what was checked ahead, if nobody has restored."""
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None

    def texts(self) -> tuple[tuple[str, str], ...]:
        """What a manifest keeps for later rounds, and for later launches of the job."""
        return (
            (RAN_S, f"{self._past.ran_s + monotonic() - self._began:.0f}"),
            (FAILURES, str(self._past.failures_by(self._restarts))),
            (RESTARTS, str(self._restarts)),
        )
