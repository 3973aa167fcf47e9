"""Claims from flight recorders: which rank never came to a collective in which others wait."""

import asyncio
import re
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from everstep.verdict_causes import VerdictCause
from everstep_services.attribution.analyzers.rank_ends import first_ends, has_torn, is_consequence
from everstep_services.attribution.domain.claims import Claim, Role
from everstep_services.attribution.flight_recorder.analysis import FlightAnalysis
from everstep_services.attribution.flight_recorder.circles import ODD
from everstep_services.attribution.flight_recorder.folder import DumpFile, read_dumps
from everstep_services.attribution.flight_recorder.report import (
    MOST_FAULTS,
    Fault,
    FlightReport,
    Kind,
    more_faults,
)
from everstep_services.attribution.flight_recorder.split_sizes import odd_split, split_calls
from everstep_services.attribution.flight_recorder.stack_calls import with_stack_call
from everstep_services.attribution.flight_recorder.summary import RankSummary, UnreadableDump
from everstep_services.attribution.incident import Incident
from everstep_services.attribution.stack_analysis.files import read_content
from everstep_services.attribution.stack_analysis.rules import shipped
from everstep_services.attribution.stack_analysis.stacks import Unreadable

_READERS = 2
_NOTES_MOST = 6
_SUSPECTS_MOST = 8
_MORE_SUSPECTS = 0.5
"""The factor for the strength of each suspect if a fault has several."""
_BY_EXCLUSION = 0.8
_REFUSED = re.compile(rb"op\.preamble\.[^\n]*?length <= op\.\w+(?:\. (\d+) vs (\d+))?")
"""The text of gloo about data that does not fit."""
_ALL_JOINED: frozenset[Kind] = frozenset({"not_started", "half_completed", "stuck"})
"""Faults below the ranks, if all ranks live: the end of a rank tears its collectives."""
_OF_ALL: frozenset[Kind] = frozenset({"mismatch", "cycle"})
"""Faults of the script, whichever rank is wrong."""
_ONE_OF = 1.7
"""What of a claim's strength each of several ranks has together, where one of them is wrong."""
_LEAST_SHARE = 0.8
"""With less, ranks that wait for each other in two orders would not be named at all."""
_UNDECIDED = 0.2
"""The factor for a fault whose dumps do not tell who is wrong: it names no rank."""


class _Reading(NamedTuple):
    """The claim that a kind of fault makes."""

    role: Role
    cause: VerdictCause
    strength: float


_KINDS: Mapping[Kind, Sequence[_Reading]] = {
    # The rank is elsewhere; other evidence may show where. If none does, it is mostly the script.
    "never_joined": (_Reading("place", "unknown", 1.0), _Reading("root", "user_code", 0.35)),
    "no_dump": (_Reading("place", "unknown", 0.7),),
    "mismatch": (_Reading("root", "user_code", 1.0),),
    "cycle": (_Reading("root", "user_code", 0.9),),
    # All have joined: the ranks are in the right place, so the network is suspect.
    "not_started": (_Reading("place", "unknown", 0.6), _Reading("root", "network", 0.5)),
    "half_completed": (_Reading("place", "unknown", 0.6), _Reading("root", "network", 0.55)),
    "stuck": (_Reading("root", "network", 0.5),),
}


async def analyze(incident: Incident) -> Sequence[Claim]:
    """Return claims from all dumps together; none if there are no dumps."""
    dumps, fact = await incident.by_rank("flight_recorder")
    refused = await _refused(incident)
    left, left_fact = await incident.by_rank("split_sizes") if refused else ({}, None)
    splits = split_calls({**dumps, **left}) if refused else {}
    if (odd_rank := odd_split(splits, refused)) is not None:
        rank, how = odd_rank
        says = f"rank {rank} gave all_to_all other sizes than the ranks of its group: {how}"
        return (_mismatch(rank, says, left_fact or fact),)
    if not dumps:
        return _refuses(refused, fact)
    world = incident.case.world_size
    stacks, _ = await incident.by_rank("stacks")
    ended = {end.rank for end in first_ends(incident.case) if not is_consequence(end)}
    analysis = FlightAnalysis(world=world or None, ended=ended)
    report, smallest = await asyncio.to_thread(_report, analysis, dumps, stacks, bool(refused))
    incident.missing += [f"flight_recorder: {note}" for note in report.notes[:_NOTES_MOST]]
    without = sorted(set(range(world)) - set(dumps))
    has_mismatch = any(fault.kind == "mismatch" for fault in report.faults)
    # of splits, recorders know nothing
    is_alone = bool(refused) and not splits and len(without) == 1
    if is_alone and not has_mismatch and report.meetings and smallest > 2:
        return (_other_size(without[0], len(dumps), fact),)
    if not has_mismatch and (odd := _refuses(refused, fact)):
        return odd
    if report.verdict != "culprits":
        return [*_undecided(report.faults[:1], fact)]
    late = incident.given_up.get("flight_recorder", {})
    is_torn = await asyncio.to_thread(has_torn, incident.case)
    return [
        claim
        for fault in shown_faults(report.faults)
        if not (is_torn and fault.kind in _ALL_JOINED)
        and not (fault.kind == "no_dump" and any(it.rank in late for it in fault.suspects))
        for claim in _claims(fault, fact)
    ]


async def _refused(incident: Incident) -> Mapping[int | None, tuple[bytes, bytes]]:
    """The ranks that gloo ended because they were sent more than they expect, with both sizes."""
    refused: dict[int | None, tuple[bytes, bytes]] = {}
    for end in first_ends(incident.case):
        if match := _REFUSED.search(f"{end.error_text} {end.first_error}".encode()):
            refused[end.rank] = (match[1], match[2])
    async for _, rank, log in incident.contents("log"):
        if match := _REFUSED.search(log):
            refused[rank] = (match[1], match[2])
    return refused


def _refuses(
    refused: Mapping[int | None, tuple[bytes, bytes]], fact: str | None
) -> tuple[Claim, ...]:
    """The only rank that was sent as much as another one expects, and expects less."""
    odd = [
        rank
        for rank, (sent, _) in refused.items()
        if rank is not None
        and any(sent == expected for other, (_, expected) in refused.items() if other != rank)
    ]
    if len(odd) != 1:
        return ()
    sent, expects = (size.decode() for size in refused[odd[0]])
    says = f"rank {odd[0]} expects {expects} bytes where others send {sent} and expect {sent}"
    return (_mismatch(odd[0], f"{says}: it calls the collective with other sizes", fact),)


def _other_size(rank: int, others: int, fact: str | None) -> Claim:
    """The rank without a dump is the one that differs, for all others agree; not among two."""
    says = f"rank {rank} has tensors of another size: gloo refused its data, and the recorders of "
    return _mismatch(rank, f"{says}the other {others} ranks agree", fact)


def _mismatch(rank: int, says: str, fact: str | None) -> Claim:
    return Claim(
        cause="user_code", kind="mismatch", role="root", strength=_BY_EXCLUSION, ranks=(rank,),
        says=says, fact=fact, fingerprint="mismatch",
    )  # fmt: skip


def _report(
    analysis: FlightAnalysis, dumps: Mapping[int, bytes], stacks: Mapping[int, bytes], differ: bool
) -> tuple[FlightReport, int]:
    """The report, and the size of the smallest group in which ranks meet."""
    sizes: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="everstep-dumps-") as name:
        files = [DumpFile(Path(name, f"dump_{rank}"), rank) for rank in dumps]
        for file in files:
            file.path.write_bytes(dumps[file.rank])
        for dump in read_dumps(files, readers=min(_READERS, len(files))):
            analysis.add(_with_stack(dump, stacks))
            if isinstance(dump, RankSummary):
                sizes.update(group.name for group in dump.groups)
    smallest = min((size for size in sizes.values() if size > 1), default=0)
    return analysis.report(sizes_differ=differ), smallest


def _with_stack(
    dump: RankSummary | UnreadableDump, stacks: Mapping[int, bytes]
) -> RankSummary | UnreadableDump:
    if isinstance(dump, UnreadableDump) or dump.rank not in stacks:
        return dump
    read = read_content(stacks[dump.rank], dump.rank, "")
    main = None if isinstance(read, Unreadable) else read.main
    if main is None:
        return dump
    state = shipped().state(main)
    where = f"{state.call} at {state.place}"
    return with_stack_call(replace(dump, where=where), main.call, main.arguments)


def shown_faults(faults: Sequence[Fault]) -> Iterator[Fault]:
    """The first faults; the last of them says how many more there are."""
    shown, rest = faults[:MOST_FAULTS], faults[MOST_FAULTS:]
    for fault in shown:
        is_cut = rest and fault is shown[-1]
        yield replace(fault, summary=f"{fault.summary}; {more_faults(rest)}") if is_cut else fault


def _claims(fault: Fault, fact: str | None) -> Iterator[Claim]:
    suspects = fault.suspects[:_SUSPECTS_MOST]
    ranks = tuple(suspect.rank for suspect in suspects)
    several, share = len(fault.suspects), 1.0
    if fault.kind in _OF_ALL and fault.confidence < ODD:  # one of the suspects differs
        share = max(_LEAST_SHARE, min(1.0, _ONE_OF / several))
    elif fault.kind not in _OF_ALL and several > 2:
        share = _MORE_SUSPECTS
    for reading in _KINDS[fault.kind]:
        strength = min(fault.confidence, 1.0) * reading.strength
        yield Claim(
            cause=reading.cause,
            kind=fault.kind,
            role=reading.role,
            says=fault.summary,
            strength=strength * share,
            ranks=ranks,
            fact=fact,
            fingerprint=f"{fault.kind}" if reading.role == "root" else "",
        )


def _undecided(faults: Sequence[Fault], fact: str | None) -> Iterator[Claim]:
    """What is seen of a fault whose dumps leave open who is wrong, and why."""
    for fault in faults:
        reading = _KINDS[fault.kind][-1]
        strength = min(fault.confidence, 1.0) * reading.strength * _UNDECIDED
        yield Claim(
            cause=reading.cause, kind=fault.kind, says=fault.summary, strength=strength, fact=fact
        )
