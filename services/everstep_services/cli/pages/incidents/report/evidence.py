"""Fetches the evidence of an incident, and reads out what a report shows of it."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from everstep_services.attribution.flight_recorder.report import FlightReport
from everstep_services.attribution.readings import flight_report, stack_report
from everstep_services.attribution.stack_analysis.report import StackReport
from everstep_services.cli.api.client import Api
from everstep_services.cli.cells import Record, cell
from everstep_services.cli.errors import CliError, Exit

_LOGS = ("log", "stdout", "stderr")
_TAILS = 8
_LINES = 60
_BYTES_MOST = 256 << 20
"""All evidence of a report together; the rest is listed, and not read."""


@dataclass(slots=True)
class EvidenceContents:
    """What was fetched."""

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
    findings.collectives = flight_report(dumps, world)
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
