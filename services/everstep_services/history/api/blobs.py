"""Contents of evidence: the copies that the database keeps, else what the bus still has."""

import asyncio

from everstep.bus.errors import BlobMissingError, BusError
from everstep.messages import BlobRef
from everstep_services.history.api.context import Context
from everstep_services.history.api.problems import ProblemError

_FETCH_WITHIN_S = 5.0


async def blob_content(context: Context, ref: BlobRef, code: str = "evidence_gone") -> bytes:
    """All of a blob, from the copy in the database or from the bus. A `ProblemError` when gone."""
    kept = await context.kept.find(ref.id)
    if kept is not None and kept.data is not None:
        return kept.data
    try:
        async with asyncio.timeout(_FETCH_WITHIN_S):
            return await context.bus.blobs.get(ref)
    except BlobMissingError as error:
        why = kept.absent if kept is not None and kept.absent else str(error)
        raise ProblemError(410, code, f"it was kept once: {why}") from None
    except (BusError, TimeoutError):
        raise ProblemError(
            503,
            "bus_unavailable",
            "it has not been copied yet, and the bus that has it cannot be reached: try again "
            "when the bus is back (`is_bus_connected` in /api/v1/status)",
            headers={"Retry-After": "5"},
        ) from None
