"""Which checkpoints of a job maintenance verifies next, and which it deletes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from everstep.messages import ControlDocument, KnownCheckpoint
from everstep.messages.base import Time
from everstep_services.catalog.domain.index import Index, newest_first
from everstep_services.catalog.domain.retention import RetentionRules, judged

_LOCAL = "file://"


@dataclass(frozen=True, slots=True)
class ReadBackRules:
    """Which checkpoints maintenance reads back."""

    is_on: bool
    with_objects: bool
    again_s: float


def to_verify(index: Index, rules: ReadBackRules, wall: Time) -> KnownCheckpoint | None:
    """The newest checkpoint that was never read back, or too long ago."""
    if not rules.is_on:
        return None
    for checkpoint in newest_first(index.known.values()):
        if (
            checkpoint.tier != "global"
            or not checkpoint.may_be_restored
            or not _is_read(checkpoint, rules)
        ):
            continue
        if checkpoint.verified_at is None:
            return checkpoint
        age_s = (wall - checkpoint.verified_at).total_seconds()
        if rules.again_s and age_s > rules.again_s:
            return checkpoint
    return None


def to_delete(index: Index, rules: RetentionRules) -> Sequence[tuple[KnownCheckpoint, str]]:
    """The checkpoints that retention does not keep, with the reasons, the oldest first."""
    if not rules.keep_last:
        return ()
    decisions = judged(index.known.values(), rules, restored_step=index.restored_step)
    return [(d.checkpoint, d.reason) for d in reversed(decisions) if not d.is_kept]


def rules_for(default: RetentionRules, switches: ControlDocument) -> RetentionRules:
    """The rules in force: switches win over the default."""
    settings = switches.settings
    return RetentionRules(
        keep_last=_number(settings, "catalog.keep_last", default.keep_last),
        keep_every_steps=_number(settings, "catalog.keep_every_steps", default.keep_every_steps),
    )


def _is_read(checkpoint: KnownCheckpoint, rules: ReadBackRules) -> bool:
    is_object = "://" in checkpoint.path and not checkpoint.path.startswith(_LOCAL)
    return rules.with_objects or not is_object


def _number(settings: Mapping[str, str], name: str, default: int) -> int:
    text = settings.get(name, "")
    return int(text) if text.isdecimal() else default
