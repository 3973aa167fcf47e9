"""Claims from flight recorders: which rank never came to a collective in which others wait."""

import asyncio
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from everstep.verdict_causes import VerdictCause
from everstep_services.attribution.analyzers.rank_ends import first_ends, has_torn
from everstep_services.attribution.domain.claims import Claim, Role
from everstep_services.attribution.flight_recorder.analysis import FlightAnalysis
from everstep_services.attribution.flight_recorder.folder import DumpFile, read_dumps
from everstep_services.attribution.flight_recorder.report import (
    MOST_FAULTS,
    Fault,
    FlightReport,
    Kind,
    more_faults,
)
from everstep_services.attribution.incident import Incident

_READERS = 2
_NOTES_MOST = 6
_SUSPECTS_MOST = 8
_MORE_SUSPECTS = 0.5
"""The factor for the strength of each suspect if a fault has several."""
_BY_EXCLUSION = 0.8
_REFUSED = "op.preamble."
"""In the text of gloo about data that does not fit."""
_ALL_JOINED: frozenset[Kind] = frozenset({"not_started", "half_completed", "stuck"})
"""Faults below the ranks, if all ranks live: the end of a rank tears its collectives."""
_OF_ALL: frozenset[Kind] = frozenset({"mismatch", "cycle"})
"""Faults of the script, whichever rank is wrong."""


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
    if not dumps:
        return ()
    world = incident.case.world_size
    differ = await _sizes_differ(incident)
    report = await asyncio.to_thread(_report, dumps, world or None, differ)
    incident.missing += [f"flight_recorder: {note}" for note in report.notes[:_NOTES_MOST]]
    without = sorted(set(range(world)) - set(dumps))
    has_mismatch = any(fault.kind == "mismatch" for fault in report.faults)
    if differ and not has_mismatch and len(without) == 1 and report.meetings:
        return (_other_size(without[0], len(dumps), fact),)
    if report.verdict != "culprits":
        return ()
    late = incident.given_up.get("flight_recorder", {})
    is_torn = await asyncio.to_thread(has_torn, incident.case)
    return [
        claim
        for fault in shown_faults(report.faults)
        if not (is_torn and fault.kind in _ALL_JOINED)
        and not (fault.kind == "no_dump" and any(it.rank in late for it in fault.suspects))
        for claim in _claims(fault, fact)
    ]


async def _sizes_differ(incident: Incident) -> bool:
    """Whether gloo ended a rank because it was sent more than it expects."""
    texts = (f"{end.error_text} {end.first_error}" for end in first_ends(incident.case))
    if any(_REFUSED in text for text in texts):
        return True
    async for _, _, log in incident.contents("log"):
        if _REFUSED.encode() in log:
            return True
    return False


def _other_size(rank: int, others: int, fact: str | None) -> Claim:
    """The rank without a dump is the one that differs, for all others agree."""
    return Claim(
        cause="user_code", kind="mismatch", role="root", strength=_BY_EXCLUSION, ranks=(rank,),
        says=f"rank {rank} has tensors of another size: gloo refused its data, and the recorders "
        f"of the other {others} ranks agree", fact=fact, fingerprint="mismatch",
    )  # fmt: skip


def _report(dumps: Mapping[int, bytes], world: int | None, differ: bool) -> FlightReport:
    analysis = FlightAnalysis(world=world)
    with tempfile.TemporaryDirectory(prefix="everstep-dumps-") as name:
        files = [DumpFile(Path(name, f"dump_{rank}"), rank) for rank in dumps]
        for file in files:
            file.path.write_bytes(dumps[file.rank])
        for dump in read_dumps(files, readers=min(_READERS, len(files))):
            analysis.add(dump)
    return analysis.report(sizes_differ=differ)


def shown_faults(faults: Sequence[Fault]) -> Iterator[Fault]:
    """The first faults; the last of them says how many more there are."""
    shown, rest = faults[:MOST_FAULTS], faults[MOST_FAULTS:]
    for fault in shown:
        is_cut = rest and fault is shown[-1]
        yield replace(fault, summary=f"{fault.summary}; {more_faults(rest)}") if is_cut else fault


def _claims(fault: Fault, fact: str | None) -> Iterator[Claim]:
    suspects = fault.suspects[:_SUSPECTS_MOST]
    ranks = tuple(suspect.rank for suspect in suspects)
    is_clear = len(fault.suspects) <= 2 or fault.kind in _OF_ALL
    for reading in _KINDS[fault.kind]:
        strength = min(fault.confidence, 1.0) * reading.strength
        yield Claim(
            cause=reading.cause,
            kind=fault.kind,
            role=reading.role,
            says=fault.summary,
            strength=strength if is_clear else strength * _MORE_SUSPECTS,
            ranks=ranks,
            fact=fact,
            fingerprint=f"{fault.kind}" if reading.role == "root" else "",
        )
