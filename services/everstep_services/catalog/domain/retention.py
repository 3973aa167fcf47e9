"""Which checkpoints may be deleted. Whatever the rules say, the last good one stays."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from everstep.messages import KnownCheckpoint


@dataclass(frozen=True, slots=True)
class Rules:
    """What is kept; without either nothing is deleted."""

    keep_last: int = 0
    """The newest so many; 0 keeps all."""
    keep_every_steps: int = 0
    """Each step that is a multiple of this; 0 for none."""


@dataclass(frozen=True, slots=True)
class Judged:
    """What retention says of a checkpoint, and why."""

    checkpoint: KnownCheckpoint
    is_kept: bool
    reason: str


def judged(
    checkpoints: Iterable[KnownCheckpoint], rules: Rules, *, restored_step: int | None = None
) -> Sequence[Judged]:
    """What stays and what goes, the newest first; of the global tier only."""
    ordered = sorted(
        (one for one in checkpoints if one.tier == "global"),
        key=lambda one: (one.step, one.path),
        reverse=True,
    )
    newest: dict[str, list[KnownCheckpoint]] = {}
    for one in ordered:
        if one.may_be_restored:
            newest.setdefault(_root(one), []).append(one)
    found: list[Judged] = []
    for one in ordered:
        why = protection(one, ordered, restored_step=restored_step) or _rule(
            one, newest.get(_root(one), []), rules
        )
        found.append(Judged(one, bool(why), why or f"it is older than the last {rules.keep_last}"))
    return found


def protection(
    one: KnownCheckpoint,
    others: Iterable[KnownCheckpoint],
    *,
    restored_step: int | None = None,
) -> str:
    """Why nobody may delete it, a person included; empty when it may go."""
    if one.pinned_by:
        return f"{one.pinned_by} has pinned it: {one.pin_reason}"
    if one.quarantined_for:
        return f"it is quarantined ({one.quarantined_for}): release it first"
    good = last_good(others, _root(one))
    if good is None:
        return "none is verified yet: verify one first"
    if (one.step, one.path) == (good.step, good.path):
        return "it is the last good one"
    if one.step == restored_step and one.step >= good.step:
        return "the round that runs began from it"
    return ""


def last_good(checkpoints: Iterable[KnownCheckpoint], root: str = "") -> KnownCheckpoint | None:
    """The newest that was read back and is what was saved; in this root, if one is named."""
    return max(
        (
            one
            for one in checkpoints
            if one.tier == "global" and one.is_good and (not root or _root(one) == root)
        ),
        key=lambda one: one.step,
        default=None,
    )


def _rule(one: KnownCheckpoint, newest: Sequence[KnownCheckpoint], rules: Rules) -> str:
    if not rules.keep_last:
        return "retention is off"
    if one.missing_since is not None:
        return "its files are gone already"
    place = newest.index(one)
    if place < rules.keep_last:
        return f"it is among the last {rules.keep_last}"
    if rules.keep_every_steps and one.step % rules.keep_every_steps == 0:
        return f"every {rules.keep_every_steps} steps one is kept"
    return ""


def _root(one: KnownCheckpoint) -> str:
    """The folder or URL that it is in."""
    return one.path.rpartition("/")[0]
