"""The restores of a training: its round, losses after a restore, and the schedule of saves."""

from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING, SupportsFloat

from trainer_sdk.checkpoint.events import Reporter
from trainer_sdk.checkpoint.image_folder import RestoredState
from trainer_sdk.checkpoint.job_context import JobContext
from trainer_sdk.checkpoint.rank_group import RankGroup
from trainer_sdk.checkpoint.restore.agreement import Agreement
from trainer_sdk.checkpoint.restore.choice import JobPast, Tier
from trainer_sdk.checkpoint.restore.discovery import (
    FAILURES,
    RAN_S,
    RESTARTS,
    EarlyVerification,
    RestoreContext,
)
from trainer_sdk.checkpoint.restore.errors import RestoreError
from trainer_sdk.checkpoint.restore.quarantine import (
    WITHIN_STEPS,
    LoadedState,
    LossWatch,
    SuspectStates,
    quarantine_suspects,
)
from trainer_sdk.checkpoint.restore.restore import Restore, Restored
from trainer_sdk.checkpoint.restore.target import LiveState
from trainer_sdk.checkpoint.save.buffers import folder_of
from trainer_sdk.checkpoint.schedule.interval import Every, IntervalBounds, IntervalEstimate
from trainer_sdk.checkpoint.schedule.save_schedule import SaveSchedule
from trainer_sdk.checkpoint.storage import StorageError
from trainer_sdk.checkpoint.storage.folder import Folder

if TYPE_CHECKING:
    from trainer_sdk.numerics.skips import Skips

_rounds: dict[str, int] = {}
"""The round of this launch since a restore, by root; where no agent counts rounds."""


def noted_round(root: str) -> int:
    """The round of this launch since a restore from this root; 0 if there was none."""
    return _rounds.get(root, 0)


def note_round(root: str, round_: int) -> None:
    """Note the round of this launch after a restore from this root; it never goes back."""
    if root:
        _rounds[root] = max(round_, noted_round(root))


@dataclass(frozen=True, slots=True)
class Latest:
    """The newest checkpoint that all ranks seem to have."""

    step: int
    tier: Tier
    """The tier from which this rank would load it: `memory`, `disk`, `peer` or `global`."""


class Restorer:
    """Restores the state of a training, and checks the losses after the restore."""

    def __init__(
        self,
        about: JobContext,
        group: RankGroup,
        reporter: Reporter,
        *,
        root: str,
        has_images: bool,
    ) -> None:
        self._group = group
        self._reporter = reporter
        self._context = RestoreContext.of(about, group, root, has_images=has_images)
        self._early: EarlyVerification | None = (
            None if self._context.images is None else EarlyVerification(self._context)
        )
        self._root = root
        self._round = about.round
        self._is_counted = about.is_counted
        self._began = monotonic()
        self._restarts = about.restarts
        self._past = JobPast()
        self._watch: LossWatch | None = None
        self._rollbacks = 0

    @property
    def round(self) -> int:
        """The present round; if no agent counts rounds, a later one than any restore has seen.

        It is also later than the rounds that other `Checkpointer`s of this process have seen in the
        same root: saves of an earlier round count as saves of a finished launch.
        """
        return max(self._round, noted_round(self._root))

    @property
    def course(self) -> tuple[int, int]:
        """As `Identity.course` of the states that are saved now."""
        return self.round, self._rollbacks

    def latest(self, before: int | None = None) -> Latest | None:
        """The state that a restore would try first. All ranks call it together."""
        agreement = Agreement(self._context, self._group, self._reporter, None, None, before)
        try:
            choice = agreement.newest(agreement.look())
        finally:
            agreement.close()
        if choice is None:
            return None
        return Latest(choice.identity.step, choice.offers[self._group.rank].tier)

    def restore(
        self, state: LiveState, *, step: int | None, allow_fresh_start: bool, strict: bool
    ) -> Restored | None:
        """Load the newest state that all ranks have, or this step. All ranks call it together."""
        self._finish_roll_backs(self.acts())
        restored = self._load(state, step=step, allow_fresh_start=allow_fresh_start, strict=strict)
        if restored is not None:
            self._past = restored.past
            self._watch_loss(restored)
        return restored

    def go_back(self, state: LiveState, acts: "Skips") -> Restored:
        """Quarantine what `acts` has, and load the newest other state, in mid-training."""
        self._finish_roll_backs(acts)
        round_ = self.round
        restored = self._load(state, step=None, allow_fresh_start=False, strict=True)
        assert restored is not None
        if self._is_counted:
            self._rollbacks += 1
        else:
            self._round = max(self.round, round_ + 1)
            note_round(self._root, self._round)
        self._watch_loss(restored)
        return restored

    def acts(self) -> "Skips":
        """What the job has done about its numerics. All ranks call it together."""
        from trainer_sdk.numerics.skips import ActsError, Skips

        place = self._context.storage
        if place is None and self._context.images is not None:
            place = Folder(folder_of(str(self._context.images), 0))
        try:
            return Skips(place, self._group)
        except ActsError as error:
            raise RestoreError(str(error)) from error

    def _finish_roll_backs(self, acts: "Skips") -> None:
        """Quarantine what a roll-back has recorded, and perhaps not done: it may be killed."""
        why = ""
        try:
            for act in acts.unfinished:
                assert act.before_step is not None
                suspects = SuspectStates(act.before_step, act.course, act.reason)
                context = self._context
                quarantine_suspects(
                    suspects, context.images, context.storage, context.rank, self._reporter
                )
        except StorageError as error:
            why = f"suspect checkpoints cannot be quarantined: {error}"
        if acts.unfinished:
            if failures := list(filter(None, self._group.gather(why, str))):
                raise RestoreError(failures[0])
            acts.quarantined()

    def _load(
        self, state: LiveState, *, step: int | None, allow_fresh_start: bool, strict: bool
    ) -> Restored | None:
        restore = Restore(
            self._context, self._group, self._reporter, step, self._early, is_strict=strict
        )
        self._early = None
        restored = restore.restore(state, allow_fresh_start=allow_fresh_start)
        if restored is not None and not self._is_counted:
            self._round = max(self.round, restored.last_round + 1)
            note_round(self._root, self._round)
        return restored

    def _watch_loss(self, restored: Restored) -> None:
        loaded = LoadedState(
            identity=restored.choice.identity,
            tier=restored.tier,
            round=self.round,
            images=self._context.images,
            storage=self._context.storage,
            failed_before=restored.failed_at,
        )
        self._watch = LossWatch(loaded, self._reporter, self._group.rank, WITHIN_STEPS)

    def as_restored(self, restored: Restored) -> RestoredState:
        """The note for the agent, which keeps images."""
        round_, rollbacks = self.course
        return RestoredState(identity=restored.choice.identity, round=round_, rollbacks=rollbacks)

    def see_loss(self, loss: SupportsFloat, await_saves: Callable[[], object]) -> None:
        """Check the loss of a step; NaN soon after a load quarantines what was loaded."""
        if self._watch is not None:
            self._watch.see(loss, await_saves)

    def saves_are_over(self) -> None:
        """After a loss that is not finite: quarantine states that have become visible since."""
        if self._watch is not None:
            self._watch.mark()

    def schedule(self, every: Every) -> SaveSchedule:
        """The schedule of saves, by the failures of the job so far."""
        failures = self._past.failures_by(self._restarts)
        estimate = IntervalEstimate(
            every, IntervalBounds(), failures=failures, ran_s=self._past.ran_s
        )
        return SaveSchedule(every, self._group, self._reporter, estimate)

    def close(self) -> None:
        """Close the images that were verified early, if there was no restore."""
        if self._early is not None:
            self._early.close()
            self._early = None

    def texts(self) -> tuple[tuple[str, str], ...]:
        """The texts that a manifest keeps for later rounds and launches of the job."""
        return (
            (RAN_S, f"{self._past.ran_s + monotonic() - self._began:.0f}"),
            (FAILURES, str(self._past.failures_by(self._restarts))),
            (RESTARTS, str(self._restarts)),
        )
