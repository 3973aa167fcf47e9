"""Joint results of collected evidence: how far each rank was, and where it stood."""

import tempfile
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from everstep.evidence.archive import BadArchiveError, is_archive, unpack
from everstep_services.attribution.flight_recorder.analysis import FlightAnalysis
from everstep_services.attribution.flight_recorder.folder import DumpFile, read_dumps
from everstep_services.attribution.flight_recorder.report import FlightReport
from everstep_services.attribution.flight_recorder.summary import UnreadableDump as Missing
from everstep_services.attribution.incident import is_given_up
from everstep_services.attribution.stack_analysis.analysis import StackAnalysis
from everstep_services.attribution.stack_analysis.files import read_content
from everstep_services.attribution.stack_analysis.report import StackReport
from everstep_services.attribution.stack_analysis.stacks import Unreadable

_READERS = 2

Piece = tuple[int | None, bytes]
"""The rank that a blob is of, None for an archive of several, and its content."""


def flight_report(
    pieces: Iterable[Piece], world: int | None = None, ended: Collection[int] = ()
) -> FlightReport | None:
    """The report on all flight recorders together; None if there are none."""
    analysis = FlightAnalysis(world=world, ended=ended)
    with tempfile.TemporaryDirectory(prefix="everstep-dumps-") as name:
        files: dict[int, DumpFile] = {}
        for rank, content in _members(pieces):
            if isinstance(content, str):
                is_evidence = not is_given_up(content)
                missing = Missing(
                    name=_whose(rank), reason=content, rank=rank, is_evidence=is_evidence
                )
                analysis.add(missing)
            elif rank is not None and rank not in files:
                path = Path(name) / f"dump_{rank}"
                path.write_bytes(content)
                files[rank] = DumpFile(path, rank)
        if not files:
            return None
        for dump in read_dumps(list(files.values()), readers=min(_READERS, len(files))):
            analysis.add(dump)
    return analysis.report()


def stack_report(pieces: Iterable[Piece], world: int | None = None) -> StackReport | None:
    """The report on all stacks together; None if there are none."""
    analysis, count = StackAnalysis(world=world), 0
    for rank, content in _members(pieces):
        if isinstance(content, str):
            is_evidence = not is_given_up(content)
            analysis.add(
                Unreadable(name=_whose(rank), reason=content, rank=rank, is_evidence=is_evidence)
            )
        elif rank is not None:
            analysis.add(read_content(content, rank, f"rank {rank}"))
            count += 1
    return analysis.report() if count else None


def _whose(rank: int | None) -> str:
    return "an archive" if rank is None else f"rank {rank}"


def _members(pieces: Iterable[Piece]) -> Iterator[tuple[int | None, bytes | str]]:
    """Each rank's part, or why it has none. An archive that is damaged has no parts."""
    for rank, content in pieces:
        if not is_archive(content):
            yield rank, content
            continue
        try:
            archive = unpack(content)
        except BadArchiveError as error:
            yield rank, str(error)
            continue
        yield from ((member.rank, member.content) for member in archive.members)
        yield from archive.missing.items()
