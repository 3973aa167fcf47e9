"""The evidence about an incident: to download, and as analyzed by attribution."""

import asyncio
import hashlib
import logging
import re
from base64 import b64encode
from collections.abc import Sequence
from typing import Annotated, Literal, TypeVar

import msgspec
from fastapi import APIRouter, Path, Response
from msgspec.structs import replace

from everstep.bus.errors import BlobMissingError, BusError
from everstep.evidence.archive import is_archive
from everstep.messages import (
    BlobRef,
    CollectivesRead,
    EvidencePiece,
    ReadEvidence,
    Reply,
    StacksRead,
)
from everstep.messages.facts.incidents import is_capture
from everstep.store.incident_story import piece_of_evidence, pieces_of_evidence
from everstep.store.queries import Record
from everstep_services.history.api.context import Context, Ctx, Reader
from everstep_services.history.api.dto.evidence import Collectives, Stacks
from everstep_services.history.api.endpoints.incidents import IncidentId, job_of_incident
from everstep_services.history.api.http.parameters import NAME
from everstep_services.history.api.http.problems import ProblemError, not_found, responses
from everstep_services.history.api.service_calls import problems_of, unavailable
from everstep_services.history.mask import mask_file
from everstep_services.history.operator_requests import ask

log = logging.getLogger(__name__)
router = APIRouter(tags=["incidents"])

_PART = re.compile(r"[^A-Za-z0-9_-]+")
_ZIP = ("application/gzip", "tar.gz")
_JSON = ("application/json", "json")
_TEXT = ("text/plain; charset=utf-8", "txt")
_BYTES = ("application/octet-stream", "bin")
_FETCH_WITHIN_S = 5.0
_READ_WITHIN_S = 20.0
_LEND_WITHIN_S = 5.0
_LEND_AT_ONCE = 8
_REASONS = 3
R = TypeVar("R", bound=Reply)
_Readable = Literal["flight_recorder", "stacks"]
_ReadVerb = Literal["collectives", "stacks"]

EvidenceId = Annotated[
    str, Path(pattern=NAME, description="The blob's id, as in the evidence of the incident.")
]


@router.get(
    "/incidents/{incident}/evidence/{evidence}",
    summary="A piece of evidence",
    response_class=Response,
    responses={
        **responses(404, 409, 410),
        200: {
            "description": "Its content, whole, with secrets in its texts masked.",
            "headers": {
                "Repr-Digest": {
                    "description": "The SHA-256 of this content, as RFC 9530 has it.",
                    "schema": {"type": "string"},
                }
            },
            "content": {
                kind.partition(";")[0]: {"schema": {"type": "string", "format": "binary"}}
                for kind, _ in (_ZIP, _JSON, _TEXT, _BYTES)
            },
        },
    },
)
async def get_evidence(
    context: Ctx, _token: Reader, incident: IncidentId, evidence: EvidenceId
) -> Response:
    """The bytes that a node sent, as a file to download. Secrets in texts are masked.

    The detail of 404 says why there is none, that of 410 why it is no longer there.
    """
    job = None if is_capture(incident) else await job_of_incident(context, incident)
    piece = await piece_of_evidence(context.database, job, incident, evidence)
    if piece is None:
        raise not_found(f"evidence {evidence} of incident {incident}")
    if piece["blob"] is None:
        why = piece["missing_reason"] or "no reason was reported"
        about = f"{piece['kind']} of {piece['node']}"
        raise ProblemError(404, "not_collected", f"{about} was not collected: {why}")
    data = await blob_content(context, msgspec.json.decode(piece["blob"], type=BlobRef))
    data = await asyncio.to_thread(mask_file, data)
    kind, suffix = _kind(data)
    digest = b64encode(hashlib.sha256(data).digest()).decode()
    return Response(
        data,
        headers={
            "Content-Type": kind,
            "Content-Disposition": f'attachment; filename="{_name(piece)}.{suffix}"',
            "Repr-Digest": f"sha-256=:{digest}:",
        },
    )


@router.get(
    "/incidents/{incident}/collectives",
    summary="How far each rank was in its collectives",
    responses=responses(404, 409),
)
async def get_collectives(context: Ctx, _token: Reader, incident: IncidentId) -> Collectives:
    """All flight recorders together, analyzed by attribution at this request.

    The detail of 404 says why none was collected, that of 409 why none can be read.
    """
    job = await job_of_incident(context, incident)
    read = await _read(context, job, incident, "flight_recorder", "collectives", CollectivesRead)
    fields = {**msgspec.structs.asdict(read), "job": job, "incident": incident}
    return Collectives.model_validate(fields, from_attributes=True)


@router.get(
    "/incidents/{incident}/stacks",
    summary="Where the ranks stood, equal stacks folded",
    responses=responses(404, 409),
)
async def get_stacks(context: Ctx, _token: Reader, incident: IncidentId) -> Stacks:
    """All stacks together, analyzed by attribution at this request.

    The detail of 404 says why none was collected, that of 409 why none can be read.
    """
    job = await job_of_incident(context, incident)
    read = await _read(context, job, incident, "stacks", "stacks", StacksRead)
    fields = {**msgspec.structs.asdict(read), "job": job, "incident": incident}
    return Stacks.model_validate(fields, from_attributes=True)


async def _read(
    context: Context, job: str, incident: str, kind: _Readable, verb: _ReadVerb, of: type[R]
) -> R:
    pieces = await pieces_of_evidence(context.database, job, incident, kind)
    there = [piece for piece in pieces if piece["blob"] is not None]
    if not there:
        raise ProblemError(404, "not_collected", _why_not(incident, kind, pieces))
    question = ReadEvidence(
        job=job,
        evidence=await _lent(context, [_piece(piece) for piece in there]),
        world_size=max(piece["world_size"] or 0 for piece in there),
        ended=tuple({piece["ended"] for piece in there} - {None}),
    )
    see = f"incident report {incident}"
    with problems_of("attribution", refused=(409, "not_readable")):
        return await ask(
            context.bus, "attribution", verb, question, of, see=see, within_s=_READ_WITHIN_S
        )


async def _lent(context: Context, pieces: Sequence[EvidencePiece]) -> tuple[EvidencePiece, ...]:
    """The pieces; pieces with a copy in the database are put on the bus once more.

    Attribution reads them there, and the bus may have forgotten them, or be another one since. What
    is still there is left as it is.
    """
    turns = asyncio.Semaphore(_LEND_AT_ONCE)

    async def lend(piece: EvidencePiece) -> EvidencePiece:
        async with turns:
            kept = None if piece.blob is None else await context.kept.find(piece.blob.id)
            if piece.blob is None or kept is None or kept.data is None:
                return piece
            try:
                async with asyncio.timeout(_LEND_WITHIN_S):
                    blob = await context.bus.blobs.put(piece.blob.job, kept.data)
            except (BusError, TimeoutError) as error:
                log.info("evidence_not_lent blob=%s error=%s", piece.blob.id, error)
                return piece
            return replace(piece, blob=blob)

    return tuple(await asyncio.gather(*map(lend, pieces)))


def _piece(row: Record) -> EvidencePiece:
    return EvidencePiece(
        evidence=row["kind"],
        node=row["node"] or "",
        fact=row["id"],
        rank=row["rank"],
        blob=msgspec.json.decode(row["blob"], type=BlobRef),
    )


def _why_not(incident: str, kind: _Readable, pieces: Sequence[Record]) -> str:
    reasons = [f"{piece['node']}: {piece['missing_reason'] or 'no reason'}" for piece in pieces]
    more = f"; and {len(reasons) - _REASONS} more" if len(reasons) > _REASONS else ""
    why = "; ".join(reasons[:_REASONS]) or "no node has reported any"
    return f"no {kind.replace('_', ' ')} of incident {incident} is on record: {why}{more}"


def _kind(data: bytes) -> tuple[str, str]:
    """The media type and suffix, by the bytes alone: senders are not trusted."""
    if is_archive(data):
        return _ZIP
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return _BYTES
    if "\0" in text:
        return _BYTES
    try:
        msgspec.json.decode(data, type=msgspec.Raw)
    except (msgspec.DecodeError, RecursionError):
        return _TEXT
    return _JSON if text.lstrip()[:1] in {"{", "["} else _TEXT


def _name(piece: Record) -> str:
    rank = "" if piece["rank"] is None else f"rank{piece['rank']}"
    stream = piece["stream"] if piece["stream"] != piece["kind"] else None
    parts = (piece["incident"], piece["kind"], stream, piece["node"], rank)
    return "-".join(_PART.sub("_", str(part))[:64] for part in parts if part)


async def blob_content(context: Context, ref: BlobRef, code: str = "evidence_gone") -> bytes:
    """A whole blob, from the copy in the database or from the bus; `ProblemError` when gone."""
    kept = await context.kept.find(ref.id)
    if kept is not None and kept.data is not None:
        return kept.data
    try:
        async with asyncio.timeout(_FETCH_WITHIN_S):
            return await context.bus.blobs.get(ref)
    except BlobMissingError as error:
        why = kept.absent if kept is not None and kept.absent else str(error)
        raise ProblemError(410, code, f"it was kept for some time: {why}") from None
    except (BusError, TimeoutError):
        raise unavailable(
            "bus",
            "it has not been copied yet, and the bus that has it cannot be reached: try again "
            "when the bus is back (`is_bus_connected` in /api/v1/status)",
        ) from None
