"""The course of a restore: look, agree, verify, agree again, load. All ranks call it together."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import TypeVar

import msgspec

from trainer_sdk.checkpoint.agreement import Group
from trainer_sdk.checkpoint.restore.agreeing import Agreeing
from trainer_sdk.checkpoint.restore.ahead import Ahead
from trainer_sdk.checkpoint.restore.choosing import GLOBAL, MEMORY, PEER, Choice, Passed, Past
from trainer_sdk.checkpoint.restore.errors import RestoreError
from trainer_sdk.checkpoint.restore.looking import Home
from trainer_sdk.checkpoint.restore.target import State, Target
from trainer_sdk.checkpoint.telling import Teller

Made = TypeVar("Made")
_MOST = 32
"""So many that were passed over are named in a fact."""
_SAID = 4
"""And so many in a line."""


@dataclass(frozen=True, slots=True)
class Restored:
    """What was loaded."""

    step: int
    """The training goes on after it."""
    tier: str
    """Where this rank has it from: `memory`, `peer` or `global`."""
    choice: Choice = field(repr=False)
    passed: tuple[Passed, ...]
    """What could not be had of this step and of newer ones, each with its reason."""
    took_s: float
    past: Past = field(repr=False)
    """What the job has been through, as far as files tell."""
    failed_at: frozenset[int] = field(repr=False)
    """Steps whose loss was no number after other loads."""


class _Read(msgspec.Struct, frozen=True):
    size_bytes: int
    read_s: float


class Restoring:
    """One restore of one rank."""

    def __init__(
        self,
        home: Home,
        group: Group,
        teller: Teller,
        step: int | None = None,
        ahead: Ahead | None = None,
    ) -> None:
        self._began = monotonic()
        self._home = home
        self._group = group
        self._teller = teller
        self._step = step
        self._agreeing = Agreeing(home, group, teller, step, ahead)

    def restore(self, state: State, *, allow_fresh_start: bool = False) -> Restored | None:
        """Load the newest state that all ranks can have and verify; None for a fresh start."""
        try:
            return self._restore(state, allow_fresh_start=allow_fresh_start)
        finally:
            self._agreeing.close()

    def _restore(self, state: State, *, allow_fresh_start: bool) -> Restored | None:
        seen = self._agreeing.look()
        if self._step is None and seen.is_empty and self._has_never_been_one():
            self._start_fresh("no_checkpoints")
            return None
        target = self._together(
            "the state to load into cannot be read", lambda: Target(state, self._agreeing.keys)
        )
        choice = self._agreeing.agree(seen, target)
        if choice is not None:
            return self._load(choice, target)
        target.undo()
        # One node may have been told that it is allowed, and others not: rank 0's word counts.
        is_allowed = self._group.follow(allow_fresh_start, bool)
        if self._step is not None or not is_allowed:
            raise self._failed()
        self._start_fresh("allowed")
        return None

    def _has_never_been_one(self) -> bool:
        """Without a global tier, nodes that cannot be asked may have all that there is."""
        is_sure = self._home.storage is not None or not self._agreeing.unsure
        return is_sure and not self._agreeing.passed

    def _load(self, choice: Choice, target: Target) -> Restored:
        def read() -> _Read:
            began = monotonic()
            own = choice.offers[self._group.rank]
            size = self._agreeing.source(own).load(target)
            target.finish()
            return _Read(size, monotonic() - began)

        own = self._together(f"loading step {choice.identity.step} broke off", read)
        reads = self._group.gather(own, _Read)
        took_s = monotonic() - self._began
        passed = [one for one in self._agreeing.passed if one.step >= choice.identity.step]
        self._say_restored(choice, passed, reads, took_s)
        tier = choice.offers[self._group.rank].tier
        return Restored(
            step=choice.identity.step,
            tier=tier,
            choice=choice,
            passed=tuple(passed),
            took_s=took_s,
            past=self._agreeing.past,
            failed_at=frozenset(self._agreeing.failed_at),
        )

    def _say_restored(
        self, choice: Choice, passed: list[Passed], reads: Sequence[_Read], took_s: float
    ) -> None:
        if self._group.rank:
            return
        newer = self._agreeing.newer(choice.identity.step)
        if self._step is not None and newer:
            self._teller.warn(
                f"step {self._step} is restored as asked; the newer ones, up to {newer[-1]}, are "
                "still there, and a restore without a step takes them: quarantine or remove them"
            )
        saved = choice.identity.world_size
        self._teller.tell(
            "restored",
            step=choice.identity.step,
            world_size=self._group.size,
            tiers=_by_tier(choice, reads),
            reason=_why(passed),
            took_s=took_s,
            rejected=passed[:_MOST],
            saved_world_size=None if saved == self._group.size else saved,
            path=next((self._path(one.place) for one in choice.published), ""),
        )

    def _start_fresh(self, cause: str) -> None:
        passed = self._agreeing.passed
        unsure = self._agreeing.unsure
        reason = f"there has never been a checkpoint in {self._places()}"
        reason += f"; {unsure}" if unsure else ""
        if cause == "allowed":
            reason = f"no checkpoint can be used, and a fresh start is allowed; {_list(passed)}"
        if not self._group.rank:
            self._teller.tell("fresh", cause=cause, reason=reason, rejected=passed[:_MOST])
            self._teller.warn(f"starting from scratch: {reason}")

    def _failed(self) -> RestoreError:
        """On every rank the same."""
        passed = self._agreeing.passed
        if self._step is None:
            reason = (
                f"no checkpoint in {self._places()} can be used: "
                f"{_list(passed) or self._agreeing.unsure}; repair one, or begin from scratch "
                "with everstep run --allow-fresh-start, or restore(…, allow_fresh_start=True)"
            )
        else:
            reason = f"step {self._step} cannot be restored from {self._places()}: "
            reason += _list(passed) if passed else f"there is none; {self._agreeing.others()}"
        reason = self._group.follow(reason, str)
        if not self._group.rank:
            self._teller.tell(
                "restore_failed", reason=reason, wanted_step=self._step, rejected=passed[:_MOST]
            )
        return RestoreError(reason)

    def _together(self, what: str, work: Callable[[], Made]) -> Made:
        """Do this on all ranks; if it fails on one, it has failed on all."""
        made: Made | None = None
        cause: Exception | None = None
        try:
            made = work()
        except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks must hear of it
            cause = error
        said = "" if cause is None else f"{type(cause).__name__}: {cause}"
        errors = self._group.gather(said, str)
        broken = [f"rank {rank}: {one}" for rank, one in enumerate(errors) if one]
        if broken:
            raise RestoreError(
                f"{what}, on {len(broken)} of {len(errors)} ranks: {broken[0]}"
            ) from cause
        assert made is not None
        return made

    def _path(self, name: str) -> str:
        assert self._home.storage is not None
        return f"{self._home.storage.url}/{name}"

    def _places(self) -> str:
        found = [] if self._home.storage is None else [self._home.storage.url]
        found += [] if self._home.images is None else ["the memory of the nodes"]
        return " and ".join(found)


def _by_tier(choice: Choice, reads: Sequence[_Read]) -> list[dict[str, object]]:
    found = []
    for tier in (MEMORY, PEER, GLOBAL):
        own = [read for one, read in zip(choice.offers, reads, strict=True) if one.tier == tier]
        if own:
            found.append(
                {
                    "tier": tier,
                    "ranks": len(own),
                    "size_bytes": sum(one.size_bytes for one in own),
                    "read_s": max(one.read_s for one in own),
                }
            )
    return found


def _why(passed: Sequence[Passed]) -> str:
    return f"the newest that all ranks have; {_list(passed)}" if passed else "the newest"


def _list(passed: Sequence[Passed]) -> str:
    """A few of them, in words."""
    said = "; ".join(f"step {one.step}: {one.reason}" for one in passed[:_SAID])
    more = len(passed) - _SAID
    return f"{said}; and {more} more" if more > 0 else said
