"""A rank has stalled: whether another one excuses it, or its round is over.

Who waits for a rank that saves, or works on, has not stalled itself. Only agents of other nodes can
know, so they are asked first; who has no answer in time has no excuse.
"""

from collections.abc import Sequence

from msgspec.structs import replace

from everstep.messages import NameExcuse, Report
from everstep.messages.documents import OpenStall
from everstep_services.rendezvous.domain import incidents
from everstep_services.rendezvous.domain.batch import Turn
from everstep_services.rendezvous.domain.decisions import only_say
from everstep_services.rendezvous.domain.ends import end_round
from everstep_services.rendezvous.domain.incidents import Sign

_MOST = 16
"""More are not looked into at once; their agents say it again."""
_ASK_AGAIN_S = 5.0
"""No excuse holds longer without being asked for again."""
_AWAKE_S = 5.0
"""Who has just begun, or was cut off, gives agents so long to come back before it asks them."""


def stalled(turn: Turn, report: Report) -> None:
    """An agent says that a rank of its own has stalled, and that none beside it is an excuse."""
    doc = turn.state.doc
    if doc.phase == "ending":
        if doc.incident is not None:
            incidents.add(turn, _sign(turn, _opened(turn, report)))
        return
    if _all_save(turn):
        return  # the round ends as it is, in the time that they were given
    if not turn.control.enforces("restart", otherwise=True):
        _observe(turn, report.node, report.reason, report.fact)
    elif doc.slots == 1 or report.rank is None:
        _decide(turn, _opened(turn, report))
    elif known := _found(turn, report.rank):
        _know_more(turn, known, report)
    elif len(doc.stalls) < _MOST:
        turn.state.set(stalls=(*doc.stalls, _opened(turn, report)))


def _know_more(turn: Turn, known: Sequence[OpenStall], report: Report) -> None:
    """How far it has come is known now: whoever excused it without that is asked anew."""
    for stall in known:
        if stall.entered is None and report.entered is not None:
            span = turn.now.new_id()
            told = replace(stall, span=span, entered=report.entered, excused_s=0.0, excuse="")
            _put(turn, told)


def excused(turn: Turn, report: Report) -> None:
    """An agent names a rank of its own that the one which has stalled may wait for."""
    left_s = min((report.excuse_s or 0.0) - report.age_s, _ASK_AGAIN_S)
    for stall in _found(turn, report.rank):
        if left_s > 0:
            _excuse(turn, stall, left_s, report.reason)


def recovered(turn: Turn, report: Report) -> None:
    """The rank moves again: nothing is decided about it."""
    for stall in _found(turn, report.rank):
        if stall.node == report.node:
            _drop(turn, stall)


def settle(turn: Turn) -> None:
    """Ask for excuses; end the round for a stall that has none."""
    stalls = sorted(turn.state.doc.stalls, key=lambda stall: _waited_s(turn, stall), reverse=True)
    for stall in stalls:
        if turn.state.doc.phase in {"forming", "running"} and not _all_save(turn):
            _look(turn, stall)


def _excuse(turn: Turn, stall: OpenStall, left_s: float, why: str) -> None:
    """Every replica counts from when it reads this, so none ends the excuse before its time."""
    longer_s = _excused_s(turn, stall)
    if longer_s > left_s:
        left_s, why = longer_s, stall.excuse
    _put(turn, replace(stall, span=turn.now.new_id(), excused_s=left_s, excuse=why))


def _excused_s(turn: Turn, stall: OpenStall) -> float:
    """For how much longer nothing is decided."""
    return stall.excused_s - turn.since("stall excused", stall.span) if stall.excused_s else 0.0


def _look(turn: Turn, stall: OpenStall) -> None:
    if stall.excused_s:
        left_s = _excused_s(turn, stall)
        if left_s > 0:
            turn.wake_in(left_s)
            return
        stall = replace(stall, span=turn.now.new_id(), excused_s=0.0, excuse="")
        _put(turn, stall)
    asleep_s = _AWAKE_S - turn.since("awake")
    if asleep_s > 0:
        turn.wake_in(asleep_s)
        return
    within_s = turn.settings.stall_excuse_s
    left_s = within_s - turn.since("stall asked", stall.span)
    if left_s <= 0:
        _decide(turn, stall)
        return
    half = "first" if left_s > within_s / 2 else "second"
    if turn.memory.known("stall said", stall.span, half) is None:
        turn.since("stall said", stall.span, half)
        _ask(turn, stall, left_s)
    turn.wake_in(left_s - within_s / 2 if half == "first" else left_s)


def _ask(turn: Turn, stall: OpenStall, within_s: float) -> None:
    doc = turn.state.doc
    assert stall.rank is not None
    order = NameExcuse(
        id=stall.id,
        job=doc.job,
        round=doc.round,
        reason=stall.reason,
        node=stall.node,
        rank=stall.rank,
        waited_s=_waited_s(turn, stall),
        step=stall.step,
        entered=stall.entered,
        within_s=within_s,
    )
    turn.send(order)


def _decide(turn: Turn, stall: OpenStall) -> None:
    _drop(turn, stall)
    if not turn.control.enforces("restart", otherwise=True):
        _observe(turn, stall.node, stall.reason, stall.fact)
        return
    others = turn.state.doc.stalls
    end_round(turn, "rank_stalled", _sign(turn, stall))
    for other in others:
        incidents.add(turn, _sign(turn, other))


def _observe(turn: Turn, node: str, reason: str, fact: str | None) -> None:
    """A stalled rank is not dead: what is not allowed to act leaves it alone."""
    doc = turn.state.doc
    if turn.memory.known("observed", doc.round, node) is not None:
        return
    turn.since("observed", doc.round, node)
    only_say(
        turn,
        "restart",
        f"{reason}; restarts for stalls only observe",
        rule="restart.observe",
        evidence=(fact,) if fact else (),
    )


def _opened(turn: Turn, report: Report) -> OpenStall:
    id = turn.now.new_id()
    stall = OpenStall(
        id=id,
        span=id,
        node=report.node,
        rank=report.rank,
        reason=report.reason,
        fact=report.fact,
        fingerprint=report.fingerprint,
        step=report.step,
        entered=report.entered,
        waited_s=(report.waited_s or report.last_progress_age_s or 0.0) + report.age_s,
    )
    turn.since("stalled", stall.id)
    return stall


def _waited_s(turn: Turn, stall: OpenStall) -> float:
    return stall.waited_s + turn.since("stalled", stall.id)


def _sign(turn: Turn, stall: OpenStall) -> Sign:
    return Sign(
        "rank_stalled",
        stall.reason,
        node=stall.node,
        rank=stall.rank,
        fact=stall.fact,
        fingerprint=stall.fingerprint,
        step=stall.step,
        detect_s=_waited_s(turn, stall),
    )


def _all_save(turn: Turn) -> bool:
    """Ranks were told to save and to end, which may take long."""
    saving = turn.state.doc.saving
    return saving is not None and saving.then_stop and saving.after_step is not None


def _found(turn: Turn, rank: int | None) -> list[OpenStall]:
    return [stall for stall in turn.state.doc.stalls if stall.rank == rank]


def _put(turn: Turn, stall: OpenStall) -> None:
    stalls = turn.state.doc.stalls
    turn.state.set(stalls=tuple(stall if one.id == stall.id else one for one in stalls))


def _drop(turn: Turn, stall: OpenStall) -> None:
    left = tuple(one for one in turn.state.doc.stalls if one.id != stall.id)
    if left != turn.state.doc.stalls:
        turn.state.set(stalls=left)
