"""`/jobs/{job}/export`: a job's history as one file."""

import asyncio
import shutil
import tempfile
from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import FileResponse
from starlette.background import BackgroundTask

from everstep.messages import BlobRef
from everstep.store.times import to_us
from everstep_services.history.api.context import Ctx, Reader
from everstep_services.history.api.endpoints.evidence import blob_content
from everstep_services.history.api.endpoints.jobs import check_known
from everstep_services.history.api.http.parameters import JobName
from everstep_services.history.api.http.problems import ProblemError, responses
from everstep_services.history.bundle import SUFFIX, BundleError, write_bundle

router = APIRouter(tags=["jobs"])

_AT_ONCE = asyncio.Semaphore(1)


@router.get(
    "/jobs/{job}/export",
    summary="A job's history as a file",
    response_class=FileResponse,
    responses={
        **responses(404),
        200: {
            "description": "A bundle that `everstep serve --bundle` opens.",
            "content": {"application/zstd": {"schema": {"type": "string", "format": "binary"}}},
        },
    },
)
async def export_job(context: Ctx, _token: Reader, job: JobName) -> FileResponse:
    """Facts of the job and about its nodes, and evidence; secrets in texts are masked.

    One bundle is written at a time; another request is refused with 503 meanwhile.
    """
    await check_known(context, job)
    if _AT_ONCE.locked():
        raise ProblemError(
            503, "busy", "another bundle is being written: try again later",
            headers={"Retry-After": "10"},
        )  # fmt: skip

    async def fetch(ref: BlobRef) -> bytes:
        try:
            return await blob_content(context, ref)
        except ProblemError as error:
            raise BundleError(error.detail) from error

    async with _AT_ONCE:
        folder = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix="everstep-export-"))
        try:
            file = folder / f"{job}{SUFFIX}"
            now_us = to_us(context.clock.wall())
            contents = await write_bundle(context.database, job, file, fetch=fetch, now_us=now_us)
        except BaseException:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
            raise
    return FileResponse(
        file,
        media_type="application/zstd",
        filename=file.name,
        headers={
            "Everstep-Facts": str(contents.facts),
            "Everstep-Evidence": str(contents.blobs),
            "Everstep-Evidence-Missing": str(contents.missing_blobs),
        },
        background=BackgroundTask(shutil.rmtree, folder, ignore_errors=True),
    )
