"""Which checkpoints may be deleted. The last good one stays, whatever the rules are."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from everstep.messages import KnownCheckpoint


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


def judged(
    checkpoints: Iterable[KnownCheckpoint],
    rules: RetentionRules,
    *,
    restored_step: int | None = None,
) -> Sequence[RetentionDecision]:
    """The decision about each checkpoint of the global tier, the newest first."""
    ordered = sorted(
        (one for one in checkpoints if one.tier == "global"),
        key=lambda one: (one.step, one.path),
        reverse=True,
    )
    newest: dict[str, list[KnownCheckpoint]] = {}
    for one in ordered:
        if one.may_be_restored:
            newest.setdefault(_root(one), []).append(one)
    decisions: list[RetentionDecision] = []
    for one in ordered:
        why = protection(one, ordered, restored_step=restored_step) or _rule(
            one, newest.get(_root(one), []), rules
        )
        reason = why or f"it is older than the last {rules.keep_last}"
        decisions.append(RetentionDecision(one, bool(why), reason))
    return decisions


def protection(
    one: KnownCheckpoint,
    others: Iterable[KnownCheckpoint],
    *,
    restored_step: int | None = None,
) -> str:
    """Why neither rules nor people may delete a checkpoint; empty if they may."""
    if one.pinned_by:
        return f"{one.pinned_by} has pinned it: {one.pin_reason}"
    if one.quarantined_for:
        return f"it is quarantined ({one.quarantined_for}): release it first"
    good = last_good(others, _root(one))
    if good is None:
        return "no checkpoint is verified yet: verify one first"
    if (one.step, one.path) == (good.step, good.path):
        return "it is the last good one"
    if one.step == restored_step and one.step >= good.step:
        return "the running round began from it"
    return ""


def last_good(checkpoints: Iterable[KnownCheckpoint], root: str = "") -> KnownCheckpoint | None:
    """The newest checkpoint that was read back and found good; in `root`, if it is given."""
    return max(
        (
            one
            for one in checkpoints
            if one.tier == "global" and one.is_good and (not root or _root(one) == root)
        ),
        key=lambda one: one.step,
        default=None,
    )


def _rule(one: KnownCheckpoint, newest: Sequence[KnownCheckpoint], rules: RetentionRules) -> str:
    if not rules.keep_last:
        return "retention is off"
    if one.missing_since is not None:
        return "its files are gone already"
    place = newest.index(one)
    if place < rules.keep_last:
        return f"it is among the last {rules.keep_last}"
    if rules.keep_every_steps and one.step % rules.keep_every_steps == 0:
        return f"one checkpoint every {rules.keep_every_steps} steps is kept"
    return ""


def _root(one: KnownCheckpoint) -> str:
    """The folder or URL that holds a checkpoint."""
    return one.path.rpartition("/")[0]
