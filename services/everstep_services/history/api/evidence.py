"""`/incidents/{incident}/evidence`: what was collected about an incident, to be downloaded."""

import hashlib
import re
from base64 import b64encode
from typing import Annotated

import msgspec
from fastapi import APIRouter, Path, Response

from everstep.archive import is_archive
from everstep.messages import BlobRef
from everstep.messages.incidents import is_capture
from everstep.store.reads import Record
from everstep.store.stories import piece_of_evidence
from everstep_services.history.api.blobs import blob_content
from everstep_services.history.api.context import Ctx, Reader
from everstep_services.history.api.incidents import IncidentId, job_of_incident
from everstep_services.history.api.parameters import NAME
from everstep_services.history.api.problems import ProblemError, not_found, responses

router = APIRouter(tags=["incidents"])

_PART = re.compile(r"[^A-Za-z0-9_-]+")
_ZIP = ("application/gzip", "tar.gz")
_JSON = ("application/json", "json")
_TEXT = ("text/plain; charset=utf-8", "txt")
_BYTES = ("application/octet-stream", "bin")

EvidenceId = Annotated[
    str, Path(pattern=NAME, description="Its id, as in the evidence of the incident.")
]


@router.get(
    "/incidents/{incident}/evidence/{evidence}",
    summary="A piece of evidence",
    response_class=Response,
    responses={
        **responses(404, 409, 410),
        200: {
            "description": "Its content, whole and as it was collected; its hash has been checked.",
            "headers": {
                "Repr-Digest": {
                    "description": "Its SHA-256, as RFC 9530 has it.",
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
    """The bytes that a node sent, as a file to be kept. They are not redacted.

    404 says why there is nothing, 410 why it is there no longer.
    """
    job = None if is_capture(incident) else await job_of_incident(context, incident)
    piece = await piece_of_evidence(context.database, job, incident, evidence)
    if piece is None:
        raise not_found(f"evidence {evidence} of incident {incident}")
    if piece["blob"] is None:
        why = piece["missing_reason"] or "nobody has said why"
        about = f"{piece['kind']} of {piece['node']}"
        raise ProblemError(404, "not_collected", f"{about} was not collected: {why}")
    data = await blob_content(context, msgspec.json.decode(piece["blob"], type=BlobRef))
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


def _kind(data: bytes) -> tuple[str, str]:
    """Of what kind it is, by its bytes: nobody who sent it is believed."""
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
    said = (piece["incident"], piece["kind"], stream, piece["node"], rank)
    return "-".join(_PART.sub("_", str(one))[:64] for one in said if one)
