"""What a report says, whatever the format: titles, lines as they are, and tables.

All of it is printable and redacted here: evidence is written by strangers.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from everstep import __version__
from everstep.observe.redaction import redact
from everstep.units import size
from everstep_services.attribution.flight_recorder.ranges import ranges
from everstep_services.attribution.flight_recorder.report import FlightReport
from everstep_services.attribution.readings import flight_report, stack_report
from everstep_services.attribution.stack_analysis.report import StackReport, words
from everstep_services.cli.api.client import Api
from everstep_services.cli.cells import Record, cell, moment, outcome
from everstep_services.cli.errors import CliError, Exit
from everstep_services.cli.pages.incidents.story import PARTS

_LOGS = ("log", "stdout", "stderr")
_TAILS = 8
_LINES = 60
_BYTES_MOST = 256 << 20
"""All evidence of a report together; the rest is listed, and not read."""


@dataclass(slots=True)
class EvidenceContents:
    """The evidence that was fetched."""

    hashes: dict[str, str] = field(default_factory=dict)
    """By piece: the SHA-256 of its content."""
    problems: dict[str, str] = field(default_factory=dict)
    """By piece: why its content is not here."""
    tails: list[tuple[str, Sequence[str]]] = field(default_factory=list)
    """Whose log, and its last lines."""
    collectives: FlightReport | None = None
    stacks: StackReport | None = None


def collect(api: Api, incident: Record) -> EvidenceContents:
    """Fetch each piece once. What cannot be had is named, and the rest goes on."""
    findings = EvidenceContents()
    contents = dict(_contents(api, incident, findings))
    pieces = {row["id"]: row for row in incident["evidence"]}

    def of(*kinds: str) -> list[tuple[Record, bytes]]:
        here = ((pieces[id_], content) for id_, content in contents.items())
        return [(piece, content) for piece, content in here if piece["kind"] in kinds]

    findings.tails = [_tail(piece, content) for piece, content in of(*_LOGS)[:_TAILS]]
    world = max((row["world_size"] or 0 for row in incident["rounds"][:1]), default=0) or None
    dumps = [(piece["rank"], content) for piece, content in of("flight_recorder")]
    ended = [incident["rank"]] if incident["trigger"] == "rank_exited" else []
    findings.collectives = flight_report(dumps, world, ended)
    stacks = [(piece["rank"], content) for piece, content in of("stacks")]
    findings.stacks = stack_report(stacks, world)
    return findings


def _contents(
    api: Api, incident: Record, findings: EvidenceContents
) -> Iterator[tuple[str, bytes]]:
    left = _BYTES_MOST
    for piece in incident["evidence"]:
        if piece["blob"] is None:
            continue
        id_, size = piece["id"], piece["blob"]["size_bytes"]
        if size > left:
            findings.problems[id_] = f"not read: more than {_BYTES_MOST >> 20} MiB in all"
            continue
        try:
            content = api.content(f"incidents/{incident['incident']}/evidence/{id_}")
        except CliError as error:
            if error.code is Exit.FORBIDDEN:
                raise
            findings.problems[id_] = str(error)
            continue
        left -= len(content)
        findings.hashes[id_] = hashlib.sha256(content).hexdigest()
        yield id_, content


def _tail(piece: Record, content: bytes) -> tuple[str, Sequence[str]]:
    rank = "" if piece["rank"] is None else f"rank {piece['rank']} on "
    of_round = "" if piece["round"] is None else f", round {piece['round']}"
    stream = f", {cell(piece['stream'])}" if piece["stream"] else ""
    lines = content.decode(errors="replace").splitlines()
    return f"{rank}{cell(piece['node'])}{of_round}{stream}", lines[-_LINES:]


_MEETINGS = 200
_GROUPS = 40
_FRAMES = 40
_STATES = ("never_joined", "no_dump", "scheduled", "started", "completed")
_AS_A_TABLE = "Evidence"


@dataclass(frozen=True, slots=True)
class ReportTable:
    """Rows under a head."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True)
class ReportSection:
    """A title with what is below it: lines, kept as they are, or a table."""

    title: str
    lines: Sequence[str] = ()
    table: ReportTable | None = None
    level: int = 2


@dataclass(frozen=True, slots=True)
class IncidentReport:
    """All of it."""

    title: str
    subtitle: str
    sections: list[ReportSection] = field(default_factory=list)


def report_of(api: Api, incident: Record) -> IncidentReport:
    """The report of an incident: what the record has, and what its evidence says."""
    return IncidentReport(
        title=f"Incident {cell(incident['incident'])} of {cell(incident['job'])}",
        subtitle=f"{outcome(incident)}; written by everstep {__version__}",
        sections=list(sections(incident, collect(api, incident))),
    )


def sections(incident: Record, findings: EvidenceContents) -> Iterator[ReportSection]:
    """The most important first."""
    for title, part in PARTS.items():
        if title != _AS_A_TABLE:
            lines = list(part(incident))
            if lines:
                yield _lines(title, lines)
    yield from _collectives(findings.collectives)
    yield from _stacks(findings.stacks)
    if findings.tails:
        yield ReportSection("The ends of logs")
        yield from (_lines(whose, lines, level=3) for whose, lines in findings.tails)
    yield from _evidence(incident, findings)
    yield from _similar(incident)


def _collectives(report: FlightReport | None) -> Iterator[ReportSection]:
    """Group, sequence, and how far each rank was."""
    if report is None:
        return
    faults = [f"{item.kind.replace('_', ' ')}: {item.summary}" for item in report.faults]
    yield _lines("Collectives, from the flight recorders", [report.summary, *faults])
    if report.meetings:
        head = ("group", "sequence", "operation", "at", *(s.replace("_", " ") for s in _STATES))
        rows = [
            (item.group, item.sequence, item.operation, item.where,
             *(ranges(item.ranks.get(state, ())) for state in _STATES))  # type: ignore[call-overload]
            for item in report.meetings[:_MEETINGS]
        ]  # fmt: skip
        yield _table("", head, rows)


def _stacks(report: StackReport | None) -> Iterator[ReportSection]:
    if report is None:
        return
    yield _lines("Stacks, folded", [report.summary])
    for group in report.groups[:_GROUPS]:
        who = f"{'rank' if len(group.ranks) == 1 else 'ranks'} {ranges(group.ranks)}"
        title = f"{who}: {words(group.state)}"
        yield _lines(title, list(group.frames[:_FRAMES]) or ["no frames"], level=3)


def _evidence(incident: Record, findings: EvidenceContents) -> Iterator[ReportSection]:
    rows = []
    for piece in incident["evidence"]:
        blob, id_ = piece["blob"], piece["id"]
        held = "" if blob is None else size(blob["size_bytes"])
        text = (
            piece["summary"]
            if blob is not None
            else f"none: {piece['missing_reason'] or piece['summary'] or ''}"
        )
        hash_ = findings.hashes.get(id_) or findings.problems.get(id_, "")
        until = "copied" if piece["is_copied"] else moment(piece["expires_at"])
        until = "gone" if piece["gone_reason"] else until
        rows.append(
            (
                piece["kind"],
                piece["node"],
                piece["round"],
                piece["rank"],
                held,
                text,
                until,
                id_,
                hash_,
            )
        )
    if rows:
        head = ("kind", "node", "round", "rank", "size", "what", "kept until", "id", "SHA-256")
        yield _table("Evidence", head, rows)


def _similar(incident: Record) -> Iterator[ReportSection]:
    rows = [
        (other["incident"], other["job"], other["same"], moment(other["opened_at"]),
         other["outcome"], other["cause"], other["headline"])
        for other in incident["similar"]
    ]  # fmt: skip
    if rows:
        head = ("incident", "job", "the same", "opened (UTC)", "outcome", "cause", "reason")
        yield _table("Similar incidents", head, rows)


def _lines(title: str, lines: Iterable[str], level: int = 2) -> ReportSection:
    return ReportSection(_clean(title), [_clean(line) for line in lines], level=level)


def _table(title: str, head: Sequence[str], rows: Iterable[Sequence[object]]) -> ReportSection:
    return ReportSection(
        title, table=ReportTable(head, [[_clean(value) for value in row] for row in rows])
    )


def _clean(value: object) -> str:
    return redact(cell(value.expandtabs(4) if isinstance(value, str) else value))
