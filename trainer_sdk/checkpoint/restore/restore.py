"""A restore, step by step: discover, agree, verify, load. All ranks call it together."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Literal, TypeVar

import msgspec

from trainer_sdk.checkpoint.events import (
    FreshEvent,
    Reporter,
    RestoredEvent,
    RestoreFailedEvent,
    TierUse,
)
from trainer_sdk.checkpoint.image_folder import is_on_disk
from trainer_sdk.checkpoint.rank_group import RankGroup
from trainer_sdk.checkpoint.restore.agreement import Agreement, StateSource
from trainer_sdk.checkpoint.restore.choice import (
    GLOBAL,
    NEAREST_FIRST,
    JobPast,
    RejectedState,
    RestoreChoice,
    Tier,
)
from trainer_sdk.checkpoint.restore.discovery import RestoreContext, VerifiedImages
from trainer_sdk.checkpoint.restore.errors import RestoreError
from trainer_sdk.checkpoint.restore.target import LiveState, Target, named
from trainer_sdk.checkpoint.storage import StorageError
from trainer_sdk.checkpoint.storage.adoption import offer
from trainer_sdk.checkpoint.storage.checkpoints import owner_of

Made = TypeVar("Made")
_MOST = 32
"""The most rejected states that a fact names."""
_NAMED = 4
"""The most rejected states that a line names."""


@dataclass(frozen=True, slots=True)
class Restored:
    """The state that was loaded."""

    step: int
    """The training continues after this step."""
    tier: Tier
    """The tier from which this rank has loaded it: `memory`, `disk`, `peer` or `global`."""
    choice: RestoreChoice = field(repr=False)
    kept: tuple[str, ...] = field(repr=False)
    """The keys that were not loaded on this rank; empty with `strict`."""
    ignored: tuple[str, ...] = field(repr=False)
    """The keys of the checkpoint that no rank has a place for."""
    passed: tuple[RejectedState, ...]
    """The rejected states of this step and of newer ones, each with its reason."""
    took_s: float
    past: JobPast = field(repr=False)
    """The past of the job, as its files describe it."""
    failed_at: frozenset[int] = field(repr=False)
    """Steps whose loss was not finite after other loads."""
    last_round: int = field(default=0, repr=False)
    """The latest round that has saved a state which any rank has seen."""


class ReadShare(msgspec.Struct, frozen=True):
    """What one rank has read for a restore."""

    size_bytes: int
    read_s: float


class Restore:
    """A single restore of a rank."""

    def __init__(
        self,
        context: RestoreContext,
        group: RankGroup,
        reporter: Reporter,
        step: int | None = None,
        early: VerifiedImages | None = None,
        *,
        is_strict: bool = True,
    ) -> None:
        self._began = monotonic()
        self._context = context
        self._group = group
        self._reporter = reporter
        self._step = step
        self._is_strict = is_strict
        self._agreement = Agreement(context, group, reporter, step, early)

    def restore(self, state: LiveState, *, allow_fresh_start: bool = False) -> Restored | None:
        """Load the newest state that all ranks can have and verify; None for a fresh start."""
        try:
            return self._restore(state, allow_fresh_start=allow_fresh_start)
        finally:
            self.close()

    def choose(
        self, check: Callable[[StateSource], None], *, allow_fresh_start: bool = False
    ) -> RestoreChoice | None:
        """Choose and verify as `restore`, for a caller that loads by itself and then closes this.

        `check` raises `UnfitError` for a state that this rank cannot load.
        """
        self._check_asked()
        seen = self._agreement.look()
        if self._step is None and seen.is_empty and self._has_never_been_one():
            return None
        choice = self._agreement.agree_by(seen, check)
        if choice is None:
            if self._step is not None or not self._group.follow(allow_fresh_start, bool):
                raise self._failed()
            self._start_fresh("allowed")
        return choice

    def reject(self, rejected: RejectedState) -> None:
        """Note a state that the caller has rejected; all ranks call it before `choose`."""
        self._agreement.passed.append(rejected)

    def source(self, choice: RestoreChoice) -> StateSource:
        """The verified state that this rank loads."""
        return self._agreement.source(choice.offers[self._group.rank])

    @property
    def last_round(self) -> int:
        """The latest round that has saved a state which any rank has seen."""
        return self._agreement.last_round

    def report(self, choice: RestoreChoice, reads: Sequence[ReadShare]) -> None:
        """Report that the chosen state is loaded; `reads` has what each rank has read."""
        took_s = monotonic() - self._began
        self._report_restored(choice, self._passed_by(choice), reads, took_s)

    def close(self) -> None:
        """Close all files."""
        self._agreement.close()

    def _passed_by(self, choice: RestoreChoice) -> list[RejectedState]:
        step = choice.identity.step
        return [each for each in self._agreement.passed if each.step >= step or not each.step]

    def _restore(self, state: LiveState, *, allow_fresh_start: bool) -> Restored | None:
        self._check_asked()
        seen = self._agreement.look()
        if self._step is None and seen.is_empty and self._has_never_been_one():
            self._start_fresh("no_checkpoints")
            return None
        target = self._together(
            "the state to load into cannot be read",
            lambda: Target(state, self._agreement.keys, is_strict=self._is_strict),
        )
        choice = self._agreement.agree(seen, target)
        if choice is not None:
            return self._load(choice, target)
        target.undo()
        # The setting may differ between nodes: rank 0 decides.
        is_allowed = self._group.follow(allow_fresh_start, bool)
        if self._step is not None or not is_allowed:
            raise self._failed()
        self._start_fresh("allowed")
        return None

    def _check_asked(self) -> None:
        """`RestoreError` unless all ranks ask for the same."""
        asked = self._group.gather((self._step, self._is_strict), tuple[int | None, bool])
        for rank, wish in enumerate(asked):
            if wish != asked[0]:
                raise RestoreError(
                    f"rank 0 restores with step={asked[0][0]} and strict={asked[0][1]}, and rank "
                    f"{rank} with step={wish[0]} and strict={wish[1]}: give all ranks the same"
                )

    def _has_never_been_one(self) -> bool:
        """Whether there was never a checkpoint; lost nodes may have had one in memory only."""
        is_sure = self._context.storage is not None or not self._agreement.unsure
        return is_sure and not self._agreement.passed

    def _load(self, choice: RestoreChoice, target: Target) -> Restored:
        def read() -> ReadShare:
            began = monotonic()
            own = choice.offers[self._group.rank]
            size = self._agreement.source(own).load(target)
            target.finish()
            return ReadShare(size, monotonic() - began)

        own = self._together(f"loading step {choice.identity.step} broke off", read)
        reads = self._group.gather(own, ReadShare)
        took_s = monotonic() - self._began
        passed = self._passed_by(choice)
        self._report_restored(choice, passed, reads, took_s)
        offer = choice.offers[self._group.rank]
        kept, ignored = target.kept, self._agreement.source(offer).ignored
        self._report_partial(choice.identity.step, kept, ignored)
        return Restored(
            step=choice.identity.step,
            tier=offer.tier,
            kept=kept,
            ignored=ignored,
            choice=choice,
            passed=tuple(passed),
            took_s=took_s,
            past=self._agreement.past,
            failed_at=frozenset(self._agreement.failed_at),
            last_round=self._agreement.last_round,
        )

    def _report_partial(self, step: int, kept: tuple[str, ...], ignored: tuple[str, ...]) -> None:
        if not self._is_strict:
            every = self._group.gather(kept, tuple[str, ...])
            kept = tuple({key for own in every for key in own})
        parts = []
        if kept:
            parts.append(f"{len(kept)} stay as the training has them ({named(kept)})")
        if ignored:
            parts.append(
                f"{len(ignored)} have no place in the state to load into ({named(ignored)})"
            )
        if parts and not self._group.rank:
            self._reporter.warn(f"step {step} is restored in part: {'; '.join(parts)}")

    def _report_restored(
        self,
        choice: RestoreChoice,
        passed: list[RejectedState],
        reads: Sequence[ReadShare],
        took_s: float,
    ) -> None:
        if self._group.rank:
            return
        newer = self._agreement.newer(choice.identity.step)
        if self._step is not None and newer:
            self._reporter.warn(
                f"step {self._step} is restored as asked; the newer ones, up to {newer[-1]}, are "
                "still there, and a restore without a step takes them: quarantine or remove them"
            )
        if passed_over := _passed_over(passed, choice.identity.step):
            self._reporter.warn(
                f"step {choice.identity.step} is restored, and nothing newer: {_list(passed_over)}"
            )
        saved = choice.identity.world_size
        self._reporter.report(
            RestoredEvent(
                step=choice.identity.step,
                world_size=self._group.size,
                tiers=_by_tier(choice, reads),
                reason=_why(passed),
                took_s=took_s,
                rejected=passed[:_MOST],
                saved_world_size=None if saved == self._group.size else saved,
                path=next((self._path(published.place) for published in choice.published), ""),
            )
        )

    def _start_fresh(self, cause: Literal["no_checkpoints", "allowed"]) -> None:
        passed = self._agreement.passed
        unsure = self._agreement.unsure
        reason = self._none_there()
        reason += f"; {unsure}" if unsure else ""
        reason += f"; {plain}" if (plain := self._plain()) else ""
        if cause == "allowed":
            reason = f"no checkpoint can be used, and a fresh start is allowed; {_list(passed)}"
        if not self._group.rank:
            self._reporter.report(FreshEvent(cause=cause, reason=reason, rejected=passed[:_MOST]))
            self._reporter.warn(f"starting from scratch: {reason}")

    def _none_there(self) -> str:
        """That no checkpoint is there, as rank 0 reports it."""
        storage = self._context.storage
        try:
            owner = None if storage is None or self._group.rank else owner_of(storage)
        except StorageError as error:
            return f"there is no checkpoint in {self._places()}, and {error}"
        if owner is None:
            return f"there has never been a checkpoint in {self._places()}"
        return (
            f"there is no checkpoint in {self._places()}, which job {owner} has used before: its "
            "checkpoints were deleted, or no save of it was finished"
        )

    def _failed(self) -> RestoreError:
        """The error, the same on every rank."""
        passed = self._agreement.passed
        if self._step is None:
            reason = (
                f"no checkpoint in {self._places()} can be used: "
                f"{_list(passed) or self._agreement.unsure}; repair one, or begin from scratch "
                "with everstep run --allow-fresh-start, or restore(…, allow_fresh_start=True)"
            )
        else:
            reason = f"step {self._step} cannot be restored from {self._places()}: "
            reason += _list(passed) if passed else f"there is none; {self._agreement.others()}"
        reason += f"; {plain}" if (plain := self._plain()) else ""
        if not self._group.rank:  # before the others raise: the first error ends the round
            self._reporter.report(
                RestoreFailedEvent(reason=reason, wanted_step=self._step, rejected=passed[:_MOST])
            )
        return RestoreError(self._group.follow(reason, str))

    def _plain(self) -> str:
        """A hint of rank 0 about checkpoints that torch has written without a manifest."""
        if self._context.storage is None or self._group.rank:
            return ""
        try:
            return offer(self._context.storage)
        except StorageError:
            return ""  # the listing of checkpoints has failed before, and was reported

    def _together(self, failure: str, work: Callable[[], Made]) -> Made:
        """Call `work` on all ranks; if it fails on any rank, all ranks raise `RestoreError`."""
        made: Made | None = None
        cause: Exception | None = None
        try:
            made = work()
        except Exception as error:  # noqa: BLE001 - the other ranks must receive any error
            cause = error
        error_text = "" if cause is None else f"{type(cause).__name__}: {cause}"
        errors = self._group.gather(error_text, str)
        broken = [f"rank {rank}: {text}" for rank, text in enumerate(errors) if text]
        if broken:
            raise RestoreError(
                f"{failure}, on {len(broken)} of {len(errors)} ranks: {broken[0]}"
            ) from cause
        assert made is not None
        return made

    def _path(self, name: str) -> str:
        assert self._context.storage is not None
        return f"{self._context.storage.url}/{name}"

    def _places(self) -> str:
        places = [] if self._context.storage is None else [self._context.storage.url]
        if self._context.images is not None:
            places.append(
                f"the {'disks' if is_on_disk(self._context.images) else 'memory'} of the nodes"
            )
        return " and ".join(places)


def _by_tier(choice: RestoreChoice, reads: Sequence[ReadShare]) -> list[TierUse]:
    tiers: list[TierUse] = []
    for tier in NEAREST_FIRST:
        own = [read for offer, read in zip(choice.offers, reads, strict=True) if offer.tier == tier]
        if own:
            tiers.append(
                TierUse(
                    tier=tier,
                    ranks=len(own),
                    size_bytes=sum(read.size_bytes for read in own),
                    read_s=max(read.read_s for read in own),
                )
            )
    return tiers


def _why(passed: Sequence[RejectedState]) -> str:
    return f"the newest that all ranks have; {_list(passed)}" if passed else "the newest"


def _passed_over(passed: Sequence[RejectedState], step: int) -> list[RejectedState]:
    """The newer checkpoints, and files of an unknown step, that nothing has reported yet."""
    return [
        each
        for each in passed
        if not each.is_corrupt and (not each.step or (each.tier == GLOBAL and each.step > step))
    ]


def _list(passed: Sequence[RejectedState]) -> str:
    """The first rejected states, as text."""
    steps = [f"step {each.step}: " if each.step else "" for each in passed[:_NAMED]]
    text = "; ".join(f"{of}{each.reason}" for of, each in zip(steps, passed, strict=False))
    more = len(passed) - _NAMED
    return f"{text}; and {more} more" if more > 0 else text
