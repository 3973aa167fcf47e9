"""Claims from stalls: which rank stopped first, in which section, in which state."""

from collections.abc import Iterator, Mapping, Sequence

from msgspec.structs import replace

from everstep.incident_causes import BY_MONITOR, IN_PROCESS
from everstep.messages import Case, Stall
from everstep.verdict_causes import VerdictCause
from everstep_services.attribution.domain.claims import Claim
from everstep_services.attribution.incident import Incident

_SECTIONS: Mapping[str, tuple[VerdictCause, str]] = {
    "data": ("data", "stuck_data_loader"),
    "load": ("data", "stuck_data_loader"),
    "input": ("data", "stuck_data_loader"),
    "batch": ("data", "stuck_data_loader"),
    "checkpoint": ("storage", "stuck_checkpoint"),
    "save": ("storage", "stuck_checkpoint"),
    "restore": ("storage", "stuck_restore"),
}
STILL = "stood_still"
_OF_WARNED = 0.6
"""The factor for a stall that neither ended a round nor opened the incident."""
_PHASES: Mapping[str, tuple[VerdictCause, str]] = {"checkpoint": ("storage", "stuck_checkpoint")}


async def analyze(incident: Incident) -> Sequence[Claim]:
    """Return claims from stalls that ended the round, and from stalls that were only warned of."""
    warned = _warned(incident.case)
    case = replace(incident.case, stalls=(*incident.case.stalls, *warned))
    ranks = {stall.rank for stall in warned if stall.fact != case.trigger_fact}
    claims = [*_located(case), *_elsewhere(case), *_stalled(case)]
    return list(_monitored(incident.case)) + [
        replace(claim, strength=_OF_WARNED * claim.strength)
        if claim.ranks and ranks >= {*claim.ranks}
        else claim
        for claim in claims
    ]


def _warned(case: Case) -> Sequence[Stall]:
    """The newest stall that ended no round of each rank; its rank had not moved again."""
    fatal = {stall.rank for stall in case.stalls}
    newest = {stall.rank: stall for stall in case.warned_stalls if stall.rank not in fatal}
    return list(newest.values())


def ended_by_monitor(case: Case) -> Mapping[int, Stall]:
    """The ranks that the monitors of their in-process restarts have ended: none that restarted."""
    return {} if case.trigger == IN_PROCESS else hung(case)


def hung(case: Case) -> Mapping[int, Stall]:
    """The ranks that stood still until the monitors of their in-process restarts acted."""
    stalls = (*case.warned_stalls, *case.stalls)
    return {stall.rank: stall for stall in stalls if stall.signal == BY_MONITOR}


def _monitored(case: Case) -> Iterator[Claim]:
    act = "woke it by SIGTERM" if case.trigger == IN_PROCESS else "ended it"
    for stall in list(hung(case).values())[:32]:
        yield Claim(
            cause="unknown", kind=STILL, strength=0.85, ranks=(stall.rank,),
            says=f"rank {stall.rank} ({stall.node}) stood still for {stall.waited_s:g} s, so the "
            f"monitor of its in-process restart {act} (hard_timeout)",
            fact=stall.fact,
        )  # fmt: skip


def _located(case: Case) -> Iterator[Claim]:
    stall = case.located
    if stall is None or not stall.first_ranks or not stall.waiting_ranks:
        return
    waiting = {other.rank for other in case.stalls if other.is_waiting_for_ranks}
    if not stall.is_certain and waiting.issuperset(stall.first_ranks):
        return
    stopped = "stopped" if stall.is_certain else "may have stopped"
    yield Claim(
        cause="unknown",
        kind="stopped_first",
        role="place",
        says=f"{_named(stall.first_ranks)} {stopped} first: {stall.reason}",
        strength=0.75 if stall.is_certain else 0.45,
        ranks=stall.first_ranks,
        fact=stall.fact,
    )


def _elsewhere(case: Case) -> Iterator[Claim]:
    """If most ranks wait for others: the ranks that wait for none."""
    waiting = [stall for stall in case.stalls if stall.is_waiting_for_ranks]
    others = [stall for stall in case.stalls if stall.is_waiting_for_ranks is False]
    is_alone = not waiting and len(others) == 1 and case.world_size > 1
    if not is_alone and not 0 < len(others) <= len(waiting):
        return
    ranks = tuple(sorted(stall.rank for stall in others))
    says = f"{_named(ranks)} {'waits' if len(ranks) == 1 else 'wait'} for no other rank"
    if waiting:
        wait = "waits" if len(waiting) == 1 else "wait"
        says = f"{_named(sorted(stall.rank for stall in waiting))} {wait} for other ranks, {says}"
    says = f"{says}: {others[0].blocked_in}" if others[0].blocked_in else says
    # A rank that waits for others is excused: a rank that has stalled alone waits for none.
    yield Claim(
        cause="unknown", kind="elsewhere", role="place", says=says, ranks=ranks,
        strength=0.85 if waiting else 0.7,
        fact=others[0].fact,
    )  # fmt: skip
    if _is_in_script(others[0]):
        yield Claim(
            cause="user_code", kind="elsewhere", says=says, strength=0.35, ranks=ranks,
            fact=others[0].fact,
        )  # fmt: skip


def _is_in_script(stall: Stall) -> bool:
    """Whether it runs or sleeps in the script, outside of a section that explains it."""
    is_plain = stall.section is None or _of_section(stall.section) is None
    return is_plain and stall.process_state[:1] in {"S", "R", ""}


def _stalled(case: Case) -> Iterator[Claim]:
    first = set(case.located.first_ranks) if case.located else set()
    for stall in case.stalls[:32]:
        yield from _of_kernel(stall)
        is_other = bool(first) and stall.rank not in first
        if is_other or stall.is_waiting_for_ranks:
            continue
        guess = _PHASES.get(stall.phase) or _of_section(stall.section or "")
        if guess is not None:
            cause, kind = guess
            where = stall.section or stall.phase
            yield Claim(
                cause=cause, kind=kind, strength=0.6 if first or len(case.stalls) == 1 else 0.4,
                says=f"rank {stall.rank} was in {where} for {stall.waited_s:.1f} s "
                f"(limit {stall.limit_s:g} s)",
                ranks=(stall.rank,), fact=stall.fact,
            )  # fmt: skip


def _of_kernel(stall: Stall) -> Iterator[Claim]:
    if stall.process_state.startswith(("T", "t")):
        yield stopped_process(stall.rank, stall.node, stall.fact)
    elif stall.process_state.startswith("D"):
        yield Claim(
            cause="storage", kind="waits_in_kernel", strength=0.6, ranks=(stall.rank,),
            says=f"rank {stall.rank} ({stall.node}) waits in the kernel"
            + (f" ({stall.blocked_in})" if stall.blocked_in else ""),
            fact=stall.fact,
        )  # fmt: skip


def stopped_process(rank: int, node: str, fact: str) -> Claim:
    """A rank that the kernel shows as stopped."""
    return Claim(
        cause="host", kind="stopped_process", strength=0.9, ranks=(rank,), fact=fact,
        says=f"rank {rank} ({node}) is stopped, as the kernel shows: by SIGSTOP, which it may have "
        "sent itself, or by a debugger",
        is_transient=True,
    )  # fmt: skip


def _of_section(name: str) -> tuple[VerdictCause, str] | None:
    lower = name.lower()
    return next((guess for word, guess in _SECTIONS.items() if word in lower), None)


def _named(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return "ranks " + ", ".join(map(str, ranks[:8])) + (", …" if len(ranks) > 8 else "")
