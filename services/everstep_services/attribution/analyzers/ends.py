"""Claims from the ends of ranks: exit codes, signals, exceptions, and causes from outside."""

import asyncio
import re
import signal
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from msgspec.structs import replace

from everstep.incident_causes import IN_PROCESS, meaning_of
from everstep.messages import Case, NodeSign, RankEnd
from everstep.verdict_causes import DETERMINISTIC_CAUSES, VerdictCause
from everstep_services.agent.core.exit import WARDEN_ENDED as BY_WARDEN
from everstep_services.attribution.analyzers import refused_memory
from everstep_services.attribution.analyzers.outside import from_outside
from everstep_services.attribution.analyzers.rank_ends import (
    CONNECTION_ERRORS,
    QUOTED,
    as_exit,
    clean,
    fingerprint_of,
    first_ends,
    headline,
    interrupted_alone,
    is_consequence,
    is_timeout,
    kind_of_lost_worker,
    match_in,
    match_of,
    worker_ended_by,
)
from everstep_services.attribution.analyzers.stalls import STILL, ended_by_monitor, hung
from everstep_services.attribution.domain.claims import (
    GENERAL,
    MOST_SAID,
    NODE_LOST,
    WARDEN_ENDED,
    WITHOUT_CULPRIT,
    Claim,
)
from everstep_services.attribution.incident import Incident
from everstep_services.attribution.log_analysis.rules import ENDS, Match, shipped

_TOLD_RANKS = 8
_OR_SENT = ", or a process sent it this signal"
_BY_ANYBODY = ": by itself, a person, a tool or the kernel; no evidence shows by which"
_SENT = frozenset({"SIGTERM", "SIGINT", "SIGHUP"})
"""Signals that schedulers and people send to whole jobs, and a script may send to itself."""
_LATER_S = 2.0
"""Ends on one node that are so far apart did not come at once."""
_STRENGTHS = {1: 0.8, 2: 0.9, 3: 0.95}
_SIGNALS: Mapping[str, tuple[VerdictCause, str, float, str]] = {
    # The kernel counts kills for memory, and they are reported as such: this signal has no source.
    "SIGKILL": ("unknown", "killed", 0.75, f"was killed{_BY_ANYBODY}"),
    # In unknown native code: the script's extensions, a library, or broken memory.
    "SIGSEGV": ("unknown", "segfault", 0.75, f"accessed memory that is not its own{_OR_SENT}"),
    "SIGILL": (
        "host",
        "illegal_instruction",
        0.6,
        f"executed an instruction that its processor does not have{_OR_SENT}",
    ),
    "SIGFPE": ("framework", "arithmetic", 0.6, f"divided by zero in native code{_OR_SENT}"),
    # A file that was cut short, a full /dev/shm, or broken memory.
    "SIGBUS": ("unknown", "bus_error", 0.65, f"lost the memory behind a mapping{_OR_SENT}"),
    "SIGABRT": ("framework", "aborted", 0.4, f"was aborted by its native code{_OR_SENT}"),
    "SIGTERM": ("scheduler", "terminated", 0.55, "was asked to end"),
    "SIGINT": ("scheduler", "operator", 0.55, "was interrupted, as by Ctrl-C"),
    "SIGHUP": (
        "scheduler",
        "terminated",
        0.5,
        f"lost the terminal that it was started from{_OR_SENT}",
    ),
    "SIGXCPU": ("scheduler", "time_limit", 0.7, "has used up its limit of CPU time"),
}


_RERUN = {
    16: "its unexpected result came again, and it asks for another GPU to compute it",
    17: "it rejected a result, and its log tells whether the GPU is broken",
}
"""Exit codes of numerics and of Megatron's re-run of an iteration with an unexpected result."""
_OF_RERUN = re.compile(r"(?i)rerun_state_machine|megatron|unexpected result|result_rejected")
_REJECTED = 0.6
_PAUSED = 0.35
"""That an agent was away for a while explains no end of a rank, unless nothing else does."""
_UNREADABLE = re.compile(
    r"JSONDecodeError|TOMLDecodeError|(?:Scanner|Parser|Parsing|YAML)Error"
    r"|could not convert string to|invalid literal for int\(\)"
)
"""A value or a file that cannot be parsed."""
_MISFIT = "gloo::EnforceNotMet"
"""Gloo's error, in a thread of its own, if more data comes than the tensor of a rank holds."""
_ALONE = ", and others did not: its script did it, or this process alone was sent SIGINT"
_SILENT = (
    ", and wrote no error: its script called os._exit, or native code ended it. To know more, read "
    "its last lines (everstep logs {job} --round {round} --rank {rank}), and print the "
    "reason before such a call"
)
_IN_PROCESS = 0.75
_OF_WORKER = 0.7
_OF_MONITOR = frozenset({"SIGTERM", "SIGKILL"})
_BY_SIGNAL = 128
"""A script that handles a signal exits with this and its number."""
_ABORTED_FIRST = 0.55
_WRONG_SIZE = "wrong_size"
_RAISED = re.compile(r"(?:[\w.]+\.)?\w*Error: ")
_AFTER_STORAGE = 0.85
_REFUSED = 0.7
_EXPLAINED = 0.8
_OF_CONNECTION = 0.65
_OF_LOADER = re.compile(r"Caught \S+ in DataLoader worker process \d+\.")
_ACCIDENT = re.compile(r"\d+")
_OF_ENVIRON = re.compile(r'File "(?:<frozen os>|[^"]*/os\.py)", line \d+, in __getitem__')


async def analyze(incident: Incident) -> Sequence[Claim]:
    """Return claims from the ends of ranks and nodes."""
    return await asyncio.to_thread(_of_case, incident.case)


def _of_case(case: Case) -> list[Claim]:
    if case.results:  # the judgement tells more than the exits that followed from it
        case = replace(case, ends=tuple(end for end in case.ends if not end.asks))
    return [*from_outside(case), *_nodes(case), *_ranks(case), *_saves(case), *_in_process(case)]


# --- nodes ---


def _nodes(case: Case) -> Iterator[Claim]:
    back = {sign.node: sign for sign in case.nodes if sign.sign == "returned"}
    lost = [sign for sign in case.nodes if sign.sign == "lost"]
    for sign in lost:
        yield from _of_lost(case, sign, back.get(sign.node), len(lost))
    if "node" in meaning_of(case.trigger).fault and case.node and not lost:
        yield Claim(
            cause="host", kind=NODE_LOST, says=_lost(case.node, case.reason), strength=0.75,
            ranks=case.ranks_of(case.node), nodes=(case.node,), fact=case.trigger_fact,
        )  # fmt: skip
    for sign in case.nodes:
        if sign.sign == "left" and sign.cause in {"preempted", "drained", "operator"}:
            kind = "preempted" if sign.cause == "preempted" else "operator"
            yield Claim(
                cause="scheduler", kind=kind, says=f"{sign.node} left: {clean(sign.reason)}",
                strength=0.9, fact=sign.fact,
            )  # fmt: skip


def _lost(node: str, reason: str) -> str:
    text = clean(reason, MOST_SAID)
    return text if text.startswith(f"{node} ") else f"{node} was lost: {text}"


def _of_lost(case: Case, sign: NodeSign, back: NodeSign | None, lost: int) -> Iterator[Claim]:
    newest = back or sign
    if newest.cause == "paused":  # its ranks may have run on
        has_ended = "node" in meaning_of(case.trigger).fault
        yield Claim(
            cause="host", kind="paused_agent", strength=0.85 if has_ended else _PAUSED,
            is_transient=True, nodes=(sign.node,) if has_ended else (), fact=newest.fact,
            says=f"{sign.node} is back: {clean(back.reason, MOST_SAID)}" if back
            else f"only the agent of {sign.node} is silent: {clean(sign.reason, MOST_SAID)}",
        )  # fmt: skip
        return
    if back is not None and back.cause == "cut_off":
        yield Claim(
            cause="network", kind="cut_off", strength=0.8, is_transient=True, fact=back.fact,
            says=f"{sign.node} was cut off and came back: {clean(back.reason)}",
        )  # fmt: skip
        yield Claim(
            cause="host", kind=NODE_LOST, says=f"{sign.node} runs", strength=0.9,
            is_against=True, nodes=(sign.node,), fact=back.fact,
        )  # fmt: skip
    elif lost > 2:  # the cause of several losses at once is hardly one of these nodes
        yield Claim(
            cause="network", kind="nodes_lost", says=f"{lost} nodes were lost, {sign.node} too",
            strength=0.6, fact=sign.fact,
        )  # fmt: skip
    yield Claim(
        cause="host", kind=NODE_LOST, says=_lost(sign.node, sign.reason),
        strength=0.85 if lost <= 2 else 0.45, ranks=case.ranks_of(sign.node),
        nodes=(sign.node,), fact=sign.fact,
    )  # fmt: skip


def _saves(case: Case) -> Iterator[Claim]:
    is_of_save = case.phase in {"checkpoint", "restore"} or any(
        "heckpoint" in end.error_text or "heckpoint" in end.error_name for end in case.ends
    )
    for save in case.saves[:_TOLD_RANKS]:
        match = shipped().match(save.reason)
        cause: VerdictCause = "storage" if match is None else match.rule.domain
        yield Claim(
            cause=cause, kind=match.rule.failure_class if match else f"{save.stage}_failed",
            says=f"a save failed ({save.stage}): {clean(save.reason)}",
            strength=0.7 if is_of_save else 0.35, fact=save.fact,
            ranks=() if save.rank is None else (save.rank,),
        )  # fmt: skip


# --- ranks ---


def _in_process(case: Case) -> Iterator[Claim]:
    """What a rank did, if all ranks restarted in their processes: no rank has ended."""
    if case.trigger != IN_PROCESS or case.rank is None:
        return
    if not case.error_name and hung(case).keys() - {case.rank}:
        return  # it was the first of all ranks that waited for those
    text, match = clean(case.reason), match_in(case.reason)
    cause: VerdictCause = "user_code" if case.error_name else "unknown"
    kind = GENERAL if case.error_name else STILL
    if match is not None and match.rule.role == "root":
        cause, kind = match.rule.domain, match.rule.failure_class
    yield Claim(
        cause=cause, kind=kind, says=f"{text}; all ranks restarted in their processes",
        strength=_IN_PROCESS, ranks=(case.rank,), fact=case.trigger_fact,
        fingerprint=f"{kind}:{_ACCIDENT.sub('n', text)}"[:200],
    )  # fmt: skip


def _ranks(case: Case) -> Iterator[Claim]:
    by_monitor = ended_by_monitor(case)
    ends = [
        end for end in first_ends(case)
        if end.rank not in by_monitor or end.signal not in _OF_MONITOR
    ]  # fmt: skip
    orphans = [end for end in ends if end.first_error.startswith(BY_WARDEN)]
    yield from _wardens(orphans)
    lost, roots = _told_apart([end for end in ends if end not in orphans])
    if not roots and not orphans:
        yield from _done(case, lost)
    if len(lost) == case.world_size > 1 and not all(map(is_timeout, lost)):
        yield Claim(
            cause="network", kind="connections_lost", strength=0.6, fact=lost[0].fact,
            says="every rank lost a connection to others, although none of them had ended before",
        )  # fmt: skip
    if lost:
        yield Claim(
            cause="unknown", kind="lost_peer", role="consequence", strength=0.9,
            ranks=tuple(end.rank for end in lost), fact=lost[0].fact,
            says=f"{ranks_told([end.rank for end in lost])} lost a rank: {_text(lost[0])}",
        )  # fmt: skip
    alike: dict[str, list[RankEnd]] = defaultdict(list)
    for end in roots:
        alike[_ACCIDENT.sub("n", fingerprint_of(end))].append(end)
    first = min((end.at for end in roots), default=None)
    for same in alike.values():
        claim = _of_alike(case, same)
        if claim.kind == "aborted" and lost:  # it explains the others' lost connections
            claim = replace(claim, strength=_ABORTED_FIRST)
        late_s = (min(end.at for end in same) - first).total_seconds() if first else 0.0
        if late_s > _LATER_S and len({end.node for end in roots}) == 1:
            # By one clock, others were first.
            claim = replace(claim, strength=0.6 * claim.strength)
        yield claim


def _wardens(orphans: Sequence[RankEnd]) -> Iterator[Claim]:
    """Wardens that ended: their agents know how, and the kernel ended their ranks with them."""
    of_node = {end.node: end for end in reversed(orphans)}
    for node, end in of_node.items():
        ranks = sorted(other.rank for other in orphans if other.node == node)
        how = clean(end.first_error).removeprefix(BY_WARDEN)
        yield Claim(
            cause="unknown", kind=WARDEN_ENDED, strength=_EXPLAINED, fact=end.fact,
            says=f"the warden of {node}, the parent of its ranks, has ended: {how}; "
            f"{ranks_told(ranks)} ended with it", fingerprint=WARDEN_ENDED,
        )  # fmt: skip


def _told_apart(ends: Sequence[RankEnd]) -> tuple[list[RankEnd], list[RankEnd]]:
    """Split into ends of ranks that only lost others, and of ranks that failed by themselves.

    Native code also aborts because a connection is lost: the aborted ranks count as failures only
    if nothing else explains the lost connections.
    """
    lost = [end for end in ends if is_consequence(end)]
    roots = [end for end in ends if not is_consequence(end)]
    if roots:
        sent = _ended_after(roots)
        return [*lost, *sent], [end for end in roots if end not in sent]
    if len(ends) == 1 and _is_own_connection(ends[0]):
        return [], lost
    aborted = [end for end in lost if end.signal == "SIGABRT" and match_of(end) is None]
    others = [end for end in lost if end not in aborted]
    return (others, aborted) if aborted and others else (lost, roots)


def _ended_after(roots: Sequence[RankEnd]) -> list[RankEnd]:
    """The ranks that got SIGTERM after another had failed: launchers end the others so.

    Clocks of two nodes tell that only if much time lies between.
    """
    sent = [end for end in roots if "SIGTERM" in {end.signal, worker_ended_by(end)}]
    own = [end for end in roots if end not in sent and _cause_of(end)[0] != "scheduler"]

    def follows(end: RankEnd, other: RankEnd) -> bool:
        least_s = 0.0 if end.node == other.node else _LATER_S
        return (end.at - other.at).total_seconds() > least_s

    return [end for end in sent if any(follows(end, it) for it in own)]


def _is_own_connection(end: RankEnd) -> bool:
    """Whether a connection of the script broke: torch reports those to other ranks otherwise."""
    is_of_torch = "/torch/distributed/" in end.traceback
    return end.error_name in CONNECTION_ERRORS and not is_of_torch


def _done(case: Case, lost: Sequence[RankEnd]) -> Iterator[Claim]:
    """A claim if ranks are done while others wait for them or have lost them: they left early."""
    done = [end for end in case.done if end.round == case.round]
    if not done or case.more_done or 2 * len(done) > case.world_size:
        return
    if lost or case.stalls:
        ranks = sorted(end.rank for end in done)
        yield left_early(ranks, f"{ranks_told(ranks)} exited with 0", done[0].fact)


def left_early(ranks: Sequence[int], event: str, fact: str | None, strength: float = 0.75) -> Claim:
    """Ranks that ended well while others went on: their scripts do not agree on the steps."""
    return Claim(
        cause="user_code", kind="left_early", strength=strength, ranks=tuple(ranks), fact=fact,
        says=f"{event} while others continued", fingerprint="left_early",
    )  # fmt: skip


def _of_alike(case: Case, same: Sequence[RankEnd]) -> Claim:
    """One claim for all ranks that ended in the same way."""
    end = same[0]
    cause, kind, strength, event = _told_by(case, end)
    if _is_own_connection(end):
        cause, kind, strength = "user_code", GENERAL, _OF_CONNECTION
    if kind in WITHOUT_CULPRIT:
        return Claim(
            cause=cause, kind=kind, strength=strength, fact=end.fact, fingerprint=kind,
            says=f"{ranks_told(sorted(member.rank for member in same))} {event}",
        )  # fmt: skip
    ranks = tuple(sorted(member.rank for member in same))
    everybody = len(ranks) > 1 and len(ranks) == case.world_size
    if kind == GENERAL and (read := _setting(end, is_of_most=2 * len(ranks) > case.world_size > 1)):
        cause, kind = "configuration", read
    who = "every rank" if everybody else ranks_told(ranks, end.node if len(ranks) == 1 else "")
    if len(ranks) > 1 and not everybody:
        event = event.replace("was ", "were ", 1) if event.startswith("was ") else event
    if end.step is not None:
        event = f"{event} after step {end.step}"
    if kind == "exit_code" and not end.first_error:
        event += _SILENT.format(job=case.job, round=end.round or case.round, rank=ranks[0])
    if set(ranks) <= interrupted_alone(case):
        cause, kind, event = "unknown", "signal", event + _ALONE
    return Claim(
        cause=cause,
        kind=kind,
        says=f"{who} {event}",
        strength=strength,
        ranks=ranks,
        is_transient=_is_transient(end, cause, is_everywhere=everybody),
        fingerprint=fingerprint_of(end),
        fact=end.fact,
    )


def _told_by(case: Case, end: RankEnd) -> tuple[VerdictCause, str, float, str]:
    """As `_cause_of`, with what the case knows of who sent a signal."""
    cause, kind, strength, event = _cause_of(end)
    if name := _sent_alone(case, end):
        cause, kind, event = "unknown", "signal", f"was ended by {name}{_BY_ANYBODY}"
    if end.rank in {rank for act in from_outside(case) for rank in act.ranks}:
        event = event.replace(_BY_ANYBODY, "")
    return cause, kind, strength, event


def _sent_alone(case: Case, end: RankEnd) -> str:
    """The signal that ended this rank alone, and that nobody on record sent; else empty."""
    is_announced = case.outside or any(sign.sign == "left" for sign in case.nodes)
    if is_announced or "script" not in meaning_of(case.trigger).fault or case.world_size == 1:
        return ""
    sent = {other.rank: name for other in first_ends(case) if (name := _sent(other)) in _SENT}
    return sent.get(end.rank, "") if len(sent) == 1 else ""


def _sent(end: RankEnd) -> str:
    handled = _handled_signal(end) if end.error_name == "SystemExit" else ""
    return end.signal or handled


def _setting(end: RankEnd, *, is_of_most: bool) -> str:
    """The kind of setting that an exception is about; empty if it may be about anything else."""
    if end.error_name == "KeyError" and _OF_ENVIRON.search(end.traceback[-QUOTED:]):
        return "missing_variable"
    # Bad data hits one rank; a bad setting hits all ranks before any step.
    if is_of_most and not end.step and _UNREADABLE.search(f"{end.error_name} {end.error_text}"):
        return "unreadable_value"
    return ""


def _is_transient(end: RankEnd, cause: VerdictCause, *, is_everywhere: bool) -> bool | None:
    if as_exit(end).is_of_code or (cause in DETERMINISTIC_CAUSES and is_everywhere):
        return False
    return None


def _cause_of(end: RankEnd) -> tuple[VerdictCause, str, float, str]:
    """Return cause, kind, strength, and the event in words."""
    if end.how == "out_of_memory":
        return "host", "host_oom", 0.95, "was killed by the kernel: out of memory"
    if end.error_name:
        return _of_exception(end)
    if end.signal is not None:
        return _of_signal(end)
    if end.how == "unknown":
        why = f": {clean(end.first_error)}" if end.first_error else ""
        event = f"ended without a known exit code or signal{why}"
        return "unknown", "unseen", _EXPLAINED if why else 0.4, event
    if (match := match_of(end)) is not None and match.rule.role == "root":
        strength = 0.7 * _STRENGTHS[match.rule.severity]
        event = f"exited with {end.exit_code}: {clean(end.first_error)}"
        return match.rule.domain, match.rule.failure_class, strength, event
    detail = f": {clean(end.first_error)}" if end.first_error else ""
    return "user_code", "exit_code", 0.5, f"exited with {end.exit_code}{detail}"


def _of_signal(end: RankEnd) -> tuple[VerdictCause, str, float, str]:
    name = end.signal or ""
    cause, kind, strength, event = _SIGNALS.get(
        name, ("unknown", "signal", 0.5, "was ended by a signal")
    )
    if name == "SIGABRT" and (match := match_of(end)) is not None and match.rule.role == "root":
        cause, kind, strength = match.rule.domain, match.rule.failure_class, 0.7
        event = f"was aborted: {clean(end.first_error)}"
    elif name == "SIGABRT" and _MISFIT in end.first_error:
        event = "was aborted by gloo, which refused its data: most often, the sizes differ"
        return "user_code", _WRONG_SIZE, 0.4, event
    return cause, kind, strength, f"{event} ({name})"


def _of_exception(end: RankEnd) -> tuple[VerdictCause, str, float, str]:
    where = f" at {clean(end.place)}" if end.place else ""
    event = f"raised {_text(end)}{where}"
    if (name := worker_ended_by(end)) and name != "SIGBUS":
        seen = "" if name in event or name == "unseen" else f" ({name} ended the worker)"
        return "unknown", kind_of_lost_worker(name), _OF_WORKER, f"{event}{seen}"
    match = match_of(end)
    if end.error_name == "SystemExit" and (known := _of_exit(end)) is not None:
        return known
    if match is not None and match.rule.role == "root":
        return _of_known_error(end, match, event)
    if match is not None and match.rule.failure_class not in ENDS:
        return "unknown", match.rule.failure_class, 0.4, event
    if (storage := _storage_failure(end)) is not None:
        kind, line = storage
        return "storage", kind, _AFTER_STORAGE, f"{event}, after {clean(line)}"
    strength = 0.85 if end.place else 0.7
    return "user_code", GENERAL, strength, event


def _of_exit(end: RankEnd) -> tuple[VerdictCause, str, float, str] | None:
    """What an exit code means that a script gave on purpose; None for any other."""
    if handled := _handled_signal(end):
        cause, kind, strength, text = _SIGNALS[handled]
        return cause, kind, strength, f"{text} ({handled}, which its script handled)"
    asks = _RERUN.get(end.exit_code or 0)
    if asks and (end.asks or _OF_RERUN.search(f"{end.traceback} {end.first_error}")):
        return "unknown", "result_rejected", _REJECTED, f"exited with {end.exit_code}: {asks}"
    if as_exit(end).is_of_code:
        return "configuration", "arguments", 0.85, f"refused its arguments: {_text(end)}"
    return None


def _of_known_error(end: RankEnd, match: Match, event: str) -> tuple[VerdictCause, str, float, str]:
    rule = match.rule
    if rule.id not in refused_memory.RULES:
        return rule.domain, rule.failure_class, _STRENGTHS[rule.severity], event
    if refused_memory.is_absurd(refused_memory.text_of(end)):
        return "user_code", "absurd_size", 0.85, f"{event}, more than any host has,"
    return "host", "host_oom", _REFUSED, event


def _handled_signal(end: RankEnd) -> str:
    """The signal that a script reports by its exit code; empty where it reports none."""
    number = (end.exit_code or 0) - _BY_SIGNAL
    name = signal.Signals(number).name if number in set(signal.Signals) else ""
    return name if name in _SIGNALS else ""


def _storage_failure(end: RankEnd) -> tuple[str, str] | None:
    """The failure of storage that a library's exception followed; None if there is none.

    torch.save reports a full disk as an unexpected position in the file.
    """
    for line in end.traceback.splitlines():
        match = match_in(line) if _RAISED.match(line) else None
        if match and match.rule.role == "root" and match.rule.domain == "storage":
            return match.rule.failure_class, line
    return None


def _text(end: RankEnd) -> str:
    if end.error_name:
        last = end.error_text.strip().rpartition("\n")[2]
        if _OF_LOADER.match(end.error_text) and _RAISED.match(last):
            return f"{clean(last)} (in a worker of its data loader)"
        return clean(headline(end, with_name=True))
    return clean(end.first_error) or f"{end.signal or end.exit_code}"


def ranks_told(ranks: Sequence[int], node: str = "") -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}" + (f" ({node})" if node else "")
    shown = ", ".join(map(str, sorted(ranks)[:_TOLD_RANKS]))
    return f"ranks {shown}" + (", …" if len(ranks) > _TOLD_RANKS else "")
