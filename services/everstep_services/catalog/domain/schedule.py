"""What is to be done next about a job's checkpoints, without anybody asking."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from everstep.messages import ControlDocument, KnownCheckpoint
from everstep.messages.base import Time
from everstep_services.catalog.domain.index import Index, newest_first
from everstep_services.catalog.domain.retention import Rules, judged

_LOCAL = "file://"


@dataclass(frozen=True, slots=True)
class Reading:
    """Which checkpoints are read back by themselves."""

    is_on: bool
    with_objects: bool
    again_s: float


def to_verify(index: Index, reading: Reading, wall: Time) -> KnownCheckpoint | None:
    """The newest one that was never read back, or too long ago."""
    if not reading.is_on:
        return None
    for one in newest_first(index.known.values()):
        if one.tier != "global" or not one.may_be_restored or not _is_read(one, reading):
            continue
        if one.verified_at is None:
            return one
        age_s = (wall - one.verified_at).total_seconds()
        if reading.again_s and age_s > reading.again_s:
            return one
    return None


def to_delete(index: Index, rules: Rules) -> Sequence[tuple[KnownCheckpoint, str]]:
    """What retention does not keep, the oldest first."""
    if not rules.keep_last:
        return ()
    found = judged(index.known.values(), rules, restored_step=index.restored_step)
    return [(one.checkpoint, one.reason) for one in reversed(found) if not one.is_kept]


def rules_for(default: Rules, *switches: ControlDocument | None) -> Rules:
    """The rules that hold: the job's switches over the cluster's over the settings."""
    settings: dict[str, str] = {}
    for one in switches:
        settings |= {} if one is None else dict(one.settings)
    return Rules(
        keep_last=_number(settings, "catalog.keep_last", default.keep_last),
        keep_every_steps=_number(settings, "catalog.keep_every_steps", default.keep_every_steps),
    )


def is_braked(*switches: ControlDocument | None) -> bool:
    """Nothing is deleted by itself while somebody holds the brake."""
    return any(one is not None and one.is_braked for one in switches)


def _is_read(one: KnownCheckpoint, reading: Reading) -> bool:
    is_object = "://" in one.path and not one.path.startswith(_LOCAL)
    return reading.with_objects or not is_object


def _number(settings: Mapping[str, str], name: str, default: int) -> int:
    text = settings.get(name, "")
    return int(text) if text.isdigit() else default
