"""Leaves out what happened after an incident had begun: nothing explains an earlier end. Pure.

The times are those of the senders' wall clocks, which may differ: what came a little later counts.
"""

from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

from msgspec.structs import replace

from everstep.incident_causes import meaning_of
from everstep.messages import Case, NodeSign, OutsideAct
from everstep.messages.base import Time

CLOCKS_S = 2.0
"""How far the clocks of two nodes may differ, and a report may be behind its event."""


class _Dated(Protocol):
    @property
    def at(self) -> Time | None: ...
    @property
    def fact(self) -> str: ...


P = TypeVar("P", bound=_Dated)


def in_time(case: Case) -> Case:
    """The case without what came too late to explain it.

    A node that is sent away leaves once its ranks have saved: where the incident began by that, or
    by a notice, every notice and departure belongs to it.
    """
    zero = case.opened_at or next((end.at for end in case.ends), None)
    if zero is None:
        return case
    until_s = began_s(case, zero) + CLOCKS_S

    def is_early(part: _Dated) -> bool:
        is_known = part.at is not None and part.fact != case.trigger_fact
        return not is_known or _since_s(zero, part) <= until_s

    def early(parts: Iterable[P]) -> tuple[P, ...]:
        return tuple(filter(is_early, parts))

    sent_away = _too_late(case)
    is_ordered = bool({"scheduler", "operator"} & {*meaning_of(case.trigger).fault})
    dated = {"lost", "suspected", *(() if is_ordered else ("left",))}
    if not is_ordered:
        noticed = {act.node for act in case.outside if act not in sent_away}
        late = {act.node for act in sent_away} - noticed
        case = replace(
            case,
            nodes=tuple(it for it in case.nodes if it.sign != "left" or it.node not in late),
            outside=early(act for act in case.outside if act not in sent_away),
        )
    return replace(
        case,
        nodes=tuple(sign for sign in case.nodes if sign.sign not in dated or is_early(sign)),
        saves=early(case.saves),
    )


def _too_late(case: Case) -> Sequence[OutsideAct]:
    """What was done to nodes after their own ranks had ended, by the clocks of these nodes."""
    ended: dict[str, Time] = {}
    for end in case.ends:
        if end.round == case.round:
            at = end.raised_at or end.at
            ended[end.node] = min(at, ended.get(end.node, at))
    return [
        act
        for act in case.outside
        if act.act != "injected" and act.at and act.node in ended and act.at > ended[act.node]
    ]


def began_s(case: Case, zero: Time) -> float:
    """Seconds from a time until the first rank ended or the first node fell silent.

    Where nothing of that is known, until the incident was opened.
    """
    ends = [end.raised_at or end.at for end in case.ends if end.round == case.round]
    times = [*ends, *([case.opened_at] if case.opened_at else [])]
    losses = [_since_s(zero, sign) for sign in case.nodes if sign.sign == "lost"]
    return min([*((at - zero).total_seconds() for at in times), *losses], default=0.0)


def _since_s(zero: Time, part: _Dated) -> float:
    """When it happened: a lost node is reported only after it has been silent for some time."""
    silence_s = part.silence_s if isinstance(part, NodeSign) else 0.0
    return 0.0 if part.at is None else (part.at - zero).total_seconds() - silence_s
