"""Evidence: compressed, cut into parts, named by its hash, immutable, deleted after some time.

Each part has a subject of its own below the job's name, so that the server itself separates the
jobs; NATS's object store would hide the job's name in base64 (ADR-0007).
"""

import asyncio

import zstandard

from everstep import subjects
from everstep.bus.errors import BlobMissingError, BusConfigError, BusRefusedError, BusTimeoutError
from everstep.bus.jetstream import EXPECTED, IN_PROCESS, WRITTEN_BEFORE, JetStream
from everstep.bus.topology import EVIDENCE_STREAM
from everstep.hashing import hash_of
from everstep.ids import checked_name
from everstep.messages import BlobRef

MAX_BLOB_BYTES = 32 * 1024 * 1024
PART_BYTES = 512 * 1024
_ASK_AGAIN_S = 0.05


class NatsBlobs:
    """See `everstep.bus.ports.Blobs`."""

    def __init__(self, jetstream: JetStream) -> None:
        self._jetstream = jetstream

    async def put(self, job: str, data: bytes) -> BlobRef:
        if len(data) > MAX_BLOB_BYTES:
            raise BusConfigError(
                f"{len(data)} bytes are too many for one blob (at most {MAX_BLOB_BYTES}): keep "
                f"the end of it, or cut it"
            )
        stored = await asyncio.to_thread(zstandard.compress, data)
        ref = BlobRef(
            job=job, id=hash_of(stored), size_bytes=len(data), parts=-(-len(stored) // PART_BYTES)
        )
        for part in range(ref.parts):
            await self._put_part(ref, part, stored[part * PART_BYTES : (part + 1) * PART_BYTES])
        return ref

    async def _put_part(self, ref: BlobRef, part: int, data: bytes) -> None:
        """Return once most servers have the part.

        A part of that name has the same content, but counts only if the leader's copy has it:
        while another put is under way, perhaps no server but the leader has heard of it.
        """
        subject = subjects.blob(ref.job, ref.id, part)
        limit_s = self._jetstream.connection.settings.request_within_s
        try:
            async with asyncio.timeout(limit_s):
                while not await self._is_stored(subject, data):  # noqa: ASYNC110  it asks a server
                    await asyncio.sleep(_ASK_AGAIN_S)
        except TimeoutError as error:
            raise BusTimeoutError(
                f"{subject} is not stored by most servers within {limit_s:g} s"
            ) from error

    async def _is_stored(self, subject: str, data: bytes) -> bool:
        try:
            await self._jetstream.publish(subject, data, {EXPECTED: "0"})
        except BusRefusedError as error:
            if error.code not in {WRITTEN_BEFORE, IN_PROCESS}:
                raise
            return error.code == WRITTEN_BEFORE
        return True

    async def get(self, ref: BlobRef) -> bytes:
        if not 0 < ref.parts <= MAX_BLOB_BYTES // PART_BYTES + 1 or ref.size_bytes > MAX_BLOB_BYTES:
            raise BlobMissingError(f"{ref} is not a reference to a blob")
        parts: list[bytes] = []
        for part in range(ref.parts):
            subject = subjects.blob(ref.job, ref.id, part)
            # Its hash proves a part of any copy; only the leader knows that there is none.
            stored = await self._jetstream.last_anywhere(EVIDENCE_STREAM, subject)
            if stored is None:
                stored = await self._jetstream.last(EVIDENCE_STREAM, subject)
            if stored is None:
                raise BlobMissingError(
                    f"part {part + 1} of {ref.parts} of blob {ref.id} of {ref.job} is missing: "
                    f"older than the evidence stream's maximum age, or never fully written"
                )
            parts.append(stored.data)
        return await asyncio.to_thread(_opened, ref, b"".join(parts))

    async def remove(self, job: str) -> None:
        body = {"filter": f"es.blob.{checked_name('job', job)}.>"}
        await self._jetstream.api(f"STREAM.PURGE.{EVIDENCE_STREAM}", body)

    async def keeps_s(self) -> float | None:
        stream = await self._jetstream.api(f"STREAM.INFO.{EVIDENCE_STREAM}")
        max_age_ns = int(stream["config"].get("max_age", 0))
        return max_age_ns / 1e9 if max_age_ns > 0 else None


def _opened(ref: BlobRef, stored: bytes) -> bytes:
    if hash_of(stored) != ref.id:
        raise BlobMissingError(f"blob {ref.id} of {ref.job} is damaged: its hash does not match")
    try:
        # The frame states its own size: allow no more memory than the reference allows.
        if zstandard.frame_content_size(stored) != ref.size_bytes:
            raise BlobMissingError(f"blob {ref.id} of {ref.job} is not {ref.size_bytes} bytes long")
        return zstandard.ZstdDecompressor().decompress(stored, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise BlobMissingError(f"blob {ref.id} of {ref.job} cannot be opened: {error}") from error
