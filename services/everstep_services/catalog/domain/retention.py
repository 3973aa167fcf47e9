"""Which checkpoints may be deleted. The last good one stays, whatever the rules are."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from everstep.messages import JudgedCheckpoint, KnownCheckpoint
from everstep.messages.base import shared


@dataclass(frozen=True, slots=True)
class RetentionRules:
    """Which checkpoints to keep. Without `keep_last`, nothing is deleted."""

    keep_last: int = 0
    """The number of the newest checkpoints to keep; 0 keeps all."""
    keep_every_steps: int = 0
    """Older checkpoints whose step is a multiple of this stay, too; 0 for none."""


@dataclass(frozen=True, slots=True)
class RetentionDecision:
    """Whether a checkpoint stays, and why."""

    checkpoint: KnownCheckpoint
    is_kept: bool
    reason: str

    @property
    def shown(self) -> JudgedCheckpoint:
        """What people see of it."""
        fields = shared(JudgedCheckpoint, self.checkpoint)
        return JudgedCheckpoint(**fields, is_kept=self.is_kept, reason=self.reason)


def judged(
    checkpoints: Iterable[KnownCheckpoint],
    rules: RetentionRules,
    *,
    restored_step: int | None = None,
) -> Sequence[RetentionDecision]:
    """The decision about each checkpoint of the global tier, the newest first."""
    ordered = sorted(
        (checkpoint for checkpoint in checkpoints if checkpoint.tier == "global"),
        key=lambda checkpoint: (checkpoint.step, checkpoint.path),
        reverse=True,
    )
    newest: dict[str, list[KnownCheckpoint]] = {}
    for checkpoint in ordered:
        if checkpoint.may_be_restored:
            newest.setdefault(_root(checkpoint), []).append(checkpoint)
    decisions: list[RetentionDecision] = []
    for checkpoint in ordered:
        why = protection(checkpoint, ordered, restored_step=restored_step) or _rule(
            checkpoint, newest.get(_root(checkpoint), []), rules
        )
        reason = why or f"it is older than the last {rules.keep_last}"
        decisions.append(RetentionDecision(checkpoint, bool(why), reason))
    return decisions


def protection(
    checkpoint: KnownCheckpoint,
    others: Iterable[KnownCheckpoint],
    *,
    restored_step: int | None = None,
) -> str:
    """Why neither rules nor people may delete a checkpoint; empty if they may."""
    if checkpoint.pinned_by:
        return f"{checkpoint.pinned_by} has pinned it: {checkpoint.pin_reason}"
    if checkpoint.quarantined_for:
        return f"it is quarantined ({checkpoint.quarantined_for}): release it first"
    good = last_good(others, _root(checkpoint))
    if good is None:
        return "no checkpoint is verified yet: verify one first"
    if (checkpoint.step, checkpoint.path) == (good.step, good.path):
        return "it is the last good one"
    if checkpoint.step == restored_step and checkpoint.step >= good.step:
        return "the running round began from it"
    return ""


def last_good(checkpoints: Iterable[KnownCheckpoint], root: str = "") -> KnownCheckpoint | None:
    """The newest checkpoint that was read back and found good; in `root`, if it is given.

    One whose values are suspect is not good until the result that raised the suspicion is judged.
    """
    return max(
        (
            checkpoint
            for checkpoint in checkpoints
            if checkpoint.tier == "global"
            and checkpoint.is_good
            and not checkpoint.suspected_for
            and (not root or _root(checkpoint) == root)
        ),
        key=lambda checkpoint: checkpoint.step,
        default=None,
    )


def _rule(
    checkpoint: KnownCheckpoint, newest: Sequence[KnownCheckpoint], rules: RetentionRules
) -> str:
    if not rules.keep_last:
        return "retention is off"
    if checkpoint.missing_since is not None:
        return "its files are gone already"
    place = newest.index(checkpoint)
    if place < rules.keep_last:
        return f"it is among the last {rules.keep_last}"
    if rules.keep_every_steps and checkpoint.step % rules.keep_every_steps == 0:
        return f"one checkpoint every {rules.keep_every_steps} steps is kept"
    return ""


def _root(checkpoint: KnownCheckpoint) -> str:
    """The folder or URL that holds a checkpoint."""
    return checkpoint.path.rpartition("/")[0]
