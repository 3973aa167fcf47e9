"""Claims from the ends of ranks' logs and from the kernel's log about the first failure."""

import asyncio
import io
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence

from msgspec.structs import replace

from everstep.messages import Case, EvidencePiece, RankEnd
from everstep.verdict_causes import NODE_CAUSES
from everstep_services.attribution.analyzers import refused_memory
from everstep_services.attribution.analyzers.rank_ends import (
    ended_worker_by,
    first_ends,
    interrupted_alone,
    kind_of_lost_worker,
    worker_ended_by,
)
from everstep_services.attribution.domain.claims import GENERAL, WITHOUT_CULPRIT, Claim
from everstep_services.attribution.incident import Incident
from everstep_services.attribution.log_analysis.analysis import LogAnalysis
from everstep_services.attribution.log_analysis.clocks import step_of
from everstep_services.attribution.log_analysis.files import take_stream
from everstep_services.attribution.log_analysis.origins import Origin
from everstep_services.attribution.log_analysis.report import Failure, LogReport
from everstep_services.attribution.log_analysis.rules import shipped
from everstep_services.attribution.log_analysis.tracebacks import (
    Traceback,
    TracebackLine,
    links_exceptions,
)
from everstep_services.attribution.stack_analysis.files import read_content
from everstep_services.attribution.stack_analysis.rules import shipped as stack_rules
from everstep_services.attribution.stack_analysis.stacks import RankStacks

_QUOTED = 240
_ALTERNATIVE = 0.5
_WEAK = 0.5
_OF_GENERAL = 0.7
"""An exception of an unknown kind is mostly the script's; a claim with more knowledge must win."""
_KERNEL = "kernel_log"
_OF_PROCESSES: Mapping[str, frozenset[str]] = {
    "segfault": frozenset({"SIGSEGV"}),
    "illegal_instruction": frozenset({"SIGILL"}),
    "host_oom": frozenset({"SIGKILL"}),
}
"""Kinds of kernel lines about one process, and the signals that end such a process."""
_OF_ANOTHER = 0.3
"""The factor for such a line if no rank of its node ended in that way, or another process did."""
_OF_UNKNOWN_PROCESS = 0.75
"""The factor if one rank of its node ended in that way, and its process has an unknown id there."""
_WORKER = re.compile(r"DataLoader worker \(pid(?:\(s\))? (\d+)")
_ECHO = "Fatal Python error: "
_OF_BOTH = 0.97
"""The strength if a rank and the kernel of its node report the same device."""
_OF_DEVICE = re.compile(
    r"(?i)\bCUDA error\b|\bcuda failure\b|AcceleratorError|cudaError|CU(?:BLAS|DNN)_STATUS"
    r"|ncclUnhandledCudaError|unhandled cuda error"
)
_PART = re.compile(
    r"\bException in thread (?P<thread>.{1,200}):\s*$|^Process (?P<child>.{1,200}):\s*$"
    r"|\b(?P<task>Task|Future) exception was never retrieved\s*$"
)
"""The line before the traceback of an exception that ended a part of a process only."""
_OF_PART = 0.9
"""The strength for such an exception of a rank that has stalled and waits for no other rank."""
_FOR_ANOTHER_PART = frozenset({"lock", "data_wait", "subprocess", "unknown"})
"""Activities of a main thread that may wait for what such a part does not do any more."""
_PORT = "rdma_port"
"""A port that a rank's NCCL has lost is its node's; where several ranks did, a switch may be it."""
_BYTES_MOST = 64 << 20


async def analyze(incident: Incident) -> Sequence[Claim]:
    """Return claims from ranks' lines, and from the lines of each node's kernel about that node."""
    dumps, _ = await incident.by_rank("stacks")
    claims = await asyncio.to_thread(
        _of_ranks, incident.case, await _read(incident, "log", "console"), dumps
    )
    kernels: dict[str, list[_Read]] = {}
    for read in await _read(incident, _KERNEL):
        kernels.setdefault(read[0].node, []).append(read)
    for lines in kernels.values():
        claims += await asyncio.to_thread(_of_kernel, incident.case, lines)
    return claims


_Read = tuple[EvidencePiece, int | None, bytes]


async def _read(incident: Incident, *kinds: str) -> Sequence[_Read]:
    read: list[_Read] = []
    size = 0
    async for piece, rank, data in incident.contents(*kinds):
        size += len(data)
        if size > _BYTES_MOST:
            incident.missing.append(f"{kinds[0]}: more than {_BYTES_MOST >> 20} MiB were not read")
            break
        read.append((piece, rank, data))
    return read


def _of_ranks(case: Case, read: Sequence[_Read], dumps: Mapping[int, bytes]) -> list[Claim]:
    pieces = [piece for piece, _, _ in read]
    failed = {end.rank for end in first_ends(case)}
    survivors = {stall.rank for stall in case.stalls} - failed
    by_signal = {
        end.rank
        for end in first_ends(case)
        if end.signal not in (None, "SIGABRT") and not end.error_name
    }
    # Of these ranks somebody caught the exception: one that ends a script is on record.
    caught = dict.fromkeys(survivors, _WEAK) | dict.fromkeys(by_signal, _OF_ANOTHER)
    parts = list(_of_parts(case, read, failed, _not_waiting(dumps)))
    names = {(part.fingerprint, *part.ranks) for part in parts}
    claims = [
        replace(claim, strength=claim.strength * caught[failure.rank])
        if failure.frames and failure.rank in caught
        else claim
        for claim, failure in _claims(
            _report(read, case.world_size or None), pieces, is_kernel=False
        )
        if (claim.fingerprint, *claim.ranks) not in names
    ]
    return [*(_without_echo(claim, case) for claim in claims), *parts]


def _not_waiting(dumps: Mapping[int, bytes]) -> Collection[int]:
    """The ranks whose main thread waits for no other part of its process, as its stack shows."""
    stacks = (read_content(data, rank, f"rank {rank}") for rank, data in dumps.items())
    return {
        it.rank
        for it in stacks
        if isinstance(it, RankStacks)
        and it.main is not None
        and stack_rules().state(it.main).activity not in _FOR_ANOTHER_PART
    }


def _of_parts(
    case: Case, read: Sequence[_Read], failed: Collection[int], not_waiting: Collection[int]
) -> Iterator[Claim]:
    """Threads, tasks and child processes that an exception ended in ranks that lived on."""
    stalled = {stall.rank: stall.is_waiting_for_ranks for stall in case.stalls}
    for piece, rank, data in read:
        if rank is None or rank in failed:
            continue
        lines = data.decode(errors="replace").splitlines()
        at = next((at for at in reversed(range(len(lines))) if _PART.search(lines[at])), None)
        if at is None:
            continue
        end = at + _raised_within(lines[at:])
        traceback = "\n".join(lines[at + 1 : end]).encode()
        went_on = any(step_of(line) is not None for line in lines[end:])
        is_suspect = stalled and stalled.get(rank) is not True and not went_on
        for claim, failure in _claims(
            _report([(piece, rank, traceback)], None), [piece], is_kernel=False
        ):
            says = f"rank {rank}: {_part_of(lines[at])} ended by an exception"
            says += f": {failure.quote[:_QUOTED]}"
            strength = _OF_PART if is_suspect else _OF_PART * _OF_ANOTHER
            if is_suspect and rank in not_waiting:
                strength *= _WEAK
            yield replace(claim, says=says, strength=strength)


def _raised_within(lines: Sequence[str]) -> int:
    """The number of lines of the traceback that begins near the first line; 0 without its end."""
    traceback: Traceback[None] | None = None
    end = 0
    for number, line in enumerate(lines):
        if Traceback.begins(line):
            traceback = Traceback()
        elif traceback is not None and traceback.take(TracebackLine.of(line), None):
            traceback, end = None, number + 1
        elif end and line.strip() and not links_exceptions(line):
            break
    return end


def _part_of(head: str) -> str:
    """The thread, the task or the child process, in words."""
    match = _PART.search(head)
    assert match is not None
    if match["task"]:
        return "an asyncio task"
    return (
        f"its thread {match['thread']}"
        if match["thread"]
        else f"its child process {match['child']}"
    )


def _of_kernel(case: Case, read: Sequence[_Read]) -> list[Claim]:
    """Claims from one node's kernel: a failure there repeats none of another node's."""
    pieces = [piece for piece, _, _ in read]
    report, processes = _report(read, case.world_size or None), _processes(read)
    doubted = [
        _of_process(claim, pieces[0].node, processes[claim.kind], case)
        for claim, _ in _claims(report, pieces, is_kernel=True)
    ]
    return [*doubted, *_of_devices(report, pieces, case)]


def _processes(read: Sequence[_Read]) -> Mapping[str, Collection[str]]:
    """The processes that lines of each kind name: the first line of a failure may name none."""
    named: dict[str, set[str]] = defaultdict(set)
    for _, _, data in read:
        for line in data.decode(errors="replace").splitlines():
            match = shipped().match(line)
            if match is not None and "pid" in match.groups:
                named[match.rule.failure_class].add(match.groups["pid"])
    return named


def _of_devices(report: LogReport, pieces: Sequence[EvidencePiece], case: Case) -> Iterator[Claim]:
    """A rank died of its device, and the kernel of its node reports that device: one cause.

    The kernel's log begins with the round. Its line has the process on the device. Where that is
    unknown, or counted in another namespace, the only rank of the node that died so is meant.
    """
    failures = [failure for failure in (report.cause, *report.alternatives) if failure is not None]
    for failure in failures:
        if failure.domain != "gpu" or failure.role != "root":
            continue
        piece = pieces[failure.file]
        ends = [end for end in first_ends(case) if end.node == piece.node and _is_of_device(end)]
        named = [end for end in ends if end.pid and str(end.pid) == failure.pid]
        if not named and len(ends) != 1:
            continue
        for end in named or ends:
            says = (
                f"rank {end.rank} ({end.node}) ended by a failure of its device, and the kernel of "
                f"{piece.node} reports that device: {failure.means}: {failure.quote[:_QUOTED]}"
            )
            both = Claim(
                cause="gpu", kind=failure.failure_class, says=says, strength=_OF_BOTH,
                ranks=(end.rank,), nodes=(piece.node,), fingerprint=failure.fingerprint,
                fact=piece.fact, blob=piece.blob,
            )  # fmt: skip
            yield both
            yield replace(both, fact=end.fact, blob=None)


def _is_of_device(end: RankEnd) -> bool:
    return _OF_DEVICE.search(f"{end.error_name}: {end.error_text} {end.first_error}") is not None


def _of_process(claim: Claim, node: str, pids: Collection[str], case: Case) -> Claim:
    """A kernel's lines about processes, about the ranks whose processes they are; else weakened.

    They count for ranks of that node that ended by such a signal: those with these process
    ids. In a container, the kernel's ids are not those of the ranks: then for the only such rank.
    """
    signals = _OF_PROCESSES.get(claim.kind)
    if signals is None:
        return claim
    ends = [
        end
        for end in first_ends(case)
        if end.node == node
        and (end.signal in signals or end.how == "out_of_memory" or worker_ended_by(end))
    ]
    own = sorted(end.rank for end in ends if not _pids(end).isdisjoint(pids))
    if own:
        return replace(claim, ranks=tuple(own))
    is_foreign = bool(pids) and any(end.is_pid_of_host for end in ends)
    if len(ends) == 1 and not is_foreign:
        return replace(claim, ranks=(ends[0].rank,), strength=claim.strength * _OF_UNKNOWN_PROCESS)
    why = f"process {min(pids)} is not of a rank" if is_foreign else _doubt(len(ends))
    return replace(claim, strength=claim.strength * _OF_ANOTHER, says=f"{claim.says} ({why})")


def _pids(end: RankEnd) -> set[str]:
    """The process of a rank, and of the worker that it has lost."""
    text = f"{end.error_text} {end.first_error}"
    own = {str(end.pid)} if end.pid else set()
    return {*own, *(_WORKER.findall(text) if worker_ended_by(end) else ())}


def _doubt(ends: int) -> str:
    if ends:
        return f"{ends} ranks of this node ended in this way: it may have been any of them"
    return "no rank of this node ended in this way: it may have been another process"


def _without_echo(claim: Claim, case: Case) -> Claim:
    """Weaken what only repeats the end of a rank: its signal, or that it was refused memory."""
    ends = [end for end in first_ends(case) if end.rank in claim.ranks]
    names = [ended_worker_by(claim.says), *map(worker_ended_by, ends)]
    if claim.kind == "data_loader" and (name := next(filter(None, reversed(names)), "")):
        claim = replace(claim, cause="unknown", kind=kind_of_lost_worker(name))
    is_echo = (
        (_ECHO in claim.says and any(end.signal is not None for end in ends))
        or (refused_memory.MEANS in claim.says and any(end.error_name for end in ends))
        or (claim.kind == "cancelled" and ends and set(claim.ranks) <= interrupted_alone(case))
    )
    return replace(claim, strength=claim.strength * _OF_ANOTHER) if is_echo else claim


def _report(read: Sequence[_Read], world: int | None) -> LogReport:
    rules = shipped()
    analysis = LogAnalysis(rules, world)
    for number, (piece, rank, data) in enumerate(read):
        analysis.names.append(piece.summary or piece.evidence)
        origin = Origin(number, rank, node=piece.node)
        take_stream(io.BytesIO(data), origin, analysis, rules)
    return analysis.report()


def _claims(
    report: LogReport, pieces: Sequence[EvidencePiece], *, is_kernel: bool
) -> Iterator[tuple[Claim, Failure]]:
    cause = report.cause
    if cause is None:
        return
    if report.verdict == "cause":
        yield _claim(cause, report.weight, report.culprits, pieces, is_kernel), cause
    elif cause.role == "hint":
        yield _claim(cause, report.weight, (), pieces, is_kernel), cause
    for alternative in report.alternatives:
        if alternative.role == "root":
            strength = _ALTERNATIVE * report.weight
            ranks = () if alternative.rank is None else (alternative.rank,)
            yield _claim(alternative, strength, ranks, pieces, is_kernel), alternative


def _claim(
    failure: Failure,
    strength: float,
    ranks: Sequence[int],
    pieces: Sequence[EvidencePiece],
    is_kernel: bool,
) -> Claim:
    piece = pieces[failure.file]
    cause = failure.domain
    where = f"the kernel of {piece.node}" if is_kernel else _who(ranks)
    is_port = failure.rule == _PORT
    if failure.role != "root" and not is_port:
        strength *= _WEAK
    if failure.failure_class == GENERAL:
        strength *= _OF_GENERAL
    is_of_node = is_kernel and cause in NODE_CAUSES and failure.failure_class != "host_oom"
    return Claim(
        cause=cause,
        kind=failure.failure_class,
        says=f"{where}: {failure.means}: {failure.quote[:_QUOTED]}",
        strength=strength,
        ranks=() if is_port or failure.failure_class in WITHOUT_CULPRIT else tuple(ranks),
        nodes=(piece.node,) if is_of_node or (is_port and len(ranks) == 1) else (),
        fingerprint=failure.fingerprint,
        fact=piece.fact,
        blob=piece.blob,
    )


def _who(ranks: Sequence[int]) -> str:
    if not ranks:
        return "a log"
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"{len(ranks)} ranks"
