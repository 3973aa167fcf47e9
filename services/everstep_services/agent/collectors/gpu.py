"""The state of the GPUs from NVML, read in a process of its own: a driver may hang."""

import asyncio
import sys
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from everstep.clock import Clock
from everstep_services.agent.collectors.collection import (
    EvidenceFound,
    NothingFoundError,
    Scene,
    brief,
)
from everstep_services.agent.probes.gpu import snapshot
from everstep_services.agent.probes.gpu.nvml import GpuGoneError, Load, NvmlAwayError, load, opened
from everstep_services.agent.probes.gpu.snapshot import GpuSnapshot
from everstep_services.agent.ranks.device_memory import has_devices

_MOST_BYTES = 1 << 20


async def gpus(
    scene: Scene, clock: Clock, *, is_here: Callable[[], bool] = has_devices
) -> EvidenceFound | None:
    """A reading of each GPU; None on a node without GPUs."""
    del scene, clock
    if not await asyncio.to_thread(is_here):
        return None
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", __name__, stdin=DEVNULL, stdout=PIPE, stderr=DEVNULL
    )
    try:
        assert process.stdout is not None
        output = await process.stdout.read(_MOST_BYTES)
        code = await process.wait()
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
    if code or not output:
        raise NothingFoundError(output.decode(errors="replace") or f"NVML's reader ended ({code})")
    document = msgspec.json.decode(output)
    return EvidenceFound(brief(document["said"]), output)


def read_all(load: Load = load) -> bytes:
    """The readings as one document; `NothingFoundError` if NVML cannot be asked."""
    try:
        with opened(load) as nvml:
            count = nvml.ask("nvmlDeviceGetCount") or 0
            readings = [snapshot.read(nvml, index) for index in range(count)]
    except NvmlAwayError as error:
        raise NothingFoundError(error.reason) from error
    except GpuGoneError as error:
        raise NothingFoundError(error.reason) from error
    return msgspec.json.encode(
        {"said": [_said(reading) for reading in readings], "gpus": readings}, enc_hook=_plain
    )


def _said(gpu: GpuSnapshot) -> str:
    troubles: Sequence[str] = [
        *([gpu.gone.reason] if gpu.gone is not None else []),
        *([f"{gpu.uncorrected} uncorrected ECC errors"] if gpu.uncorrected else []),
        *(["rows wait to be remapped"] if gpu.is_remap_pending else []),
        *(["remapping has failed"] if gpu.has_remap_failed else []),
        *([f"slowed by {', '.join(gpu.slowed_by)}"] if gpu.slowed_by else []),
    ]
    heat = "" if gpu.temperature_c is None else f", {gpu.temperature_c} °C"
    return f"GPU {gpu.index}: {', '.join(troubles) or 'no complaint'}{heat}"


def _plain(value: object) -> Any:
    if isinstance(value, GpuGoneError):
        return value.reason
    raise NotImplementedError


def main() -> int:
    """Write the document, or write the reason for its absence and return 1."""
    try:
        sys.stdout.buffer.write(read_all())
    except NothingFoundError as error:
        sys.stdout.write(str(error))
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
