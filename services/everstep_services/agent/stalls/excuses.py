"""Whether a rank that is late may well wait for another one."""

from everstep_services.agent.stalls.position import LONG, Aside, Place

_PAUSE_S = 60.0
"""Somebody else may ask again after this, when a pause has no end."""


def excuse_s(
    stalled: Place, other: Place | Aside, now: float, slack_s: float = 0.0
) -> float | None:
    """How long `other` may be what the stalled rank waits for; None if it is not.

    Who stopped before, and may be where it is. Who is in a long phase, for which others wait. Who
    works on in the same step or an earlier one, as a rank does that evaluates without saying so.
    Or who is in no collective, where the stalled rank is in one, or where it has not come as far
    as the next and works. Never who waits in a collective of all that the stalled rank, which is
    in none, has not entered: it waits for that. `slack_s`: how well instants of two nodes can be
    compared.
    """
    if isinstance(other, Aside):
        return _PAUSE_S if other.until_s is None else max(0.0, other.until_s - now)
    left_s = other.limit.s - other.waited_s(now)
    if left_s <= 0 or other.rank == stalled.rank:
        return None
    if _waits_for(other, stalled):
        return None
    stopped_before = other.stopped_s <= stalled.stopped_s + slack_s
    is_behind = (other.step or 0) <= (stalled.step or 0)
    works_on = now - other.stopped_s < stalled.waited_s(now) / 2
    is_missing = bool(stalled.waits_in) and other.waits_in == ""
    works_on |= other.is_under_way and stalled.entered is not None
    if stopped_before or is_missing or (is_behind and (works_on or other.phase in LONG)):
        return left_s
    return None


def _waits_for(one: Place, late: Place) -> bool:
    return one.awaits is not None and late.entered is not None and late.entered < one.awaits
