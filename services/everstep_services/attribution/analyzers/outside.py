"""Claims from what people, schedulers and tests did to a training on purpose."""

from collections.abc import Iterator
from typing import get_args

from everstep.incident_causes import IN_PROCESS, meaning_of
from everstep.messages import Case, OutsideAct
from everstep_services.attribution.analyzers.rank_ends import clean, first_ends
from everstep_services.attribution.domain.claims import Claim
from everstep_services.attribution.domain.event_order import CLOCKS_S, began_s
from trainer_sdk.inject.catalog import NumericFault

_SURE = 0.97
_PERHAPS, _HARDLY = 0.5, 0.15
_ORDERED = 0.9
"""A person ended the ranks before anything else was heard of them."""
_POLITE = frozenset({None, "SIGTERM", "SIGINT"})
"""What an order sends to ranks of a round that has not ended: most let them save first."""
_SOON_S = 10.0
"""A fault that happens once shows within this time; a lasting one, this long after its end."""
_RAISED = "InjectedError"
"""The exception of injected faults: it may come only with the next step."""
_LASTING = frozenset(
    {"hang", "stall", "slow", "hold_gil", "stuck", "memory_leak", "gpu_sleep", "stop"}
)
_NUMERIC = frozenset(get_args(NumericFault))
"""Faults that may be noticed only when replicas are compared next."""
_SIGNALS = {
    "kill": "SIGKILL",
    "terminate": "SIGTERM",
    "interrupt": "SIGINT",
    "stop": "SIGSTOP",
    "abort": "SIGABRT",
    "segfault": "SIGSEGV",
}
"""Faults that are signals, as people call them."""


def from_outside(case: Case) -> Iterator[Claim]:
    """One claim for each act that explains the incident."""
    fault = meaning_of(case.trigger).fault
    ordered = [act for act in case.outside if act.act != "injected"]
    for act in case.outside:
        if act.act == "injected":
            yield from _injected(case, act)
        elif act.act == "preempted":
            yield _preempted(case, act, is_trigger="scheduler" in fault)
        else:
            yield _ordered(case, act, is_trigger="operator" in fault)
    if fault in {("scheduler",), ("operator",)} and not ordered:
        kind = "preempted" if fault == ("scheduler",) else "operator"
        yield Claim(
            cause="scheduler", kind=kind, says=clean(case.reason) or case.trigger, strength=0.9,
            fact=case.trigger_fact,
        )  # fmt: skip


def _preempted(case: Case, act: OutsideAct, *, is_trigger: bool) -> Claim:
    whole = "the job" if act.node is None else act.node
    gone = {sign.node for sign in case.nodes if sign.sign == "lost"}
    is_of_loss = bool(gone) if act.node is None else act.node in gone
    return Claim(
        cause="scheduler", kind="preempted", is_transient=True, fact=act.fact,
        says=f"{whole} was preempted ({act.by}): {clean(act.reason)}",
        strength=0.95 if is_trigger or is_of_loss else 0.7,
    )  # fmt: skip


def _ordered(case: Case, act: OutsideAct, *, is_trigger: bool) -> Claim:
    """What a person asked for: it ended the ranks, if none had ended before, or was killed."""
    ends = [end.raised_at or end.at for end in first_ends(case)]
    is_first = act.at is not None and bool(ends) and act.at <= min(ends)
    is_polite = {end.signal for end in first_ends(case)} <= _POLITE
    otherwise = _PERHAPS if is_polite or act.act == "interrupt" else _HARDLY
    is_first = is_first and otherwise == _PERHAPS
    if act.act == "interrupt":
        says = f"{act.node or act.by} was interrupted, as by Ctrl-C: {clean(act.reason)}"
    else:
        says = f"{clean(act.by)} asked for {act.act.replace('_', ' ')}: {clean(act.reason)}"
    return Claim(
        cause="scheduler", kind="operator", says=says, fact=act.fact,
        strength=_SURE if is_trigger else _ORDERED if is_first else otherwise,
    )  # fmt: skip


# --- injected faults ---


def _injected(case: Case, act: OutsideAct) -> Iterator[Claim]:
    if not _shows(case, act):
        return
    fault = clean(act.reason)
    where = act.node or "the job"
    if act.rank is not None:
        where = f"rank {act.rank}{f' ({act.node})' if act.node else ''}"
    yield Claim(
        cause="injected", kind=fault[:64], strength=_SURE, is_transient=True, fact=act.fact,
        says=f"injected by {clean(act.by)}: {_SIGNALS.get(fault, fault)} of {where}",
        ranks=case.ranks_of(act.node or "") if act.rank is None else (act.rank,),
        nodes=(act.node,) if act.rank is None and act.node else (), fingerprint=f"injected:{fault}",
    )  # fmt: skip


def _shows(case: Case, act: OutsideAct) -> bool:
    """Whether the incident is the effect of the fault: of its rank or node, and in its time."""
    if act.rank is None:
        nodes = {sign.node for sign in case.nodes if sign.sign in {"lost", "left"}}
        nodes |= {end.node for end in first_ends(case)} | {case.node or ""}
        return act.node in nodes and _is_in_its_time(case, act)
    if act.reason in _NUMERIC:
        is_later = act.at is not None and began_s(case, act.at) >= -CLOCKS_S
        return is_later and any(
            not result.ranks or act.rank in result.ranks or act.reason == "poison_batch"
            for result in case.results
        )
    own = [end for end in first_ends(case) if end.rank == act.rank]
    if own:
        signal = own[0].signal
        is_sent = signal is not None and signal == _SIGNALS.get(act.reason)
        return is_sent or _RAISED in own[0].error_name or _is_in_its_time(case, act)
    if case.trigger == IN_PROCESS and case.rank == act.rank:
        return _RAISED in case.error_name or _is_in_its_time(case, act)
    stalled = {stall.rank for stall in (*case.stalls, *case.warned_stalls)}
    stalled |= {*(case.located.first_ranks if case.located else ())}
    return (act.rank in stalled or act.reason in _LASTING) and _is_in_its_time(case, act)


def _is_in_its_time(case: Case, act: OutsideAct) -> bool:
    if act.at is None:
        return False
    is_endless = act.reason in _LASTING and act.lasts_s is None
    after_s = began_s(case, act.at)
    return after_s >= -CLOCKS_S and (is_endless or after_s <= (act.lasts_s or 0.0) + _SOON_S)
