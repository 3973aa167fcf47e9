"""The flight recorder of each rank, from torch's server in it, or from the dump of torch."""

import asyncio
from collections.abc import Mapping

from everstep.archive import ArchiveMember
from everstep.clock import Clock
from everstep_services.agent.collectors.collection import (
    EvidenceFound,
    NothingFoundError,
    RankPiece,
    Scene,
    from_each,
    left_file,
)
from everstep_services.agent.ranks.protocol import RankSeen
from everstep_services.agent.stalls.collectives import parse_collectives
from everstep_services.agent.stalls.torch_server import TorchServerError, answer, has_server
from trainer_sdk import layout

MOST_BYTES = 16 << 20
_HANDLER = "fr_trace_json?onlyactive=false&includestacktraces=false"
"""Without stacks: naming their lines would wait for the interpreter's lock."""
_PREFIXES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")


async def flight_recorders(scene: Scene, clock: Clock) -> EvidenceFound | None:
    """The recorder of each rank; for ranks that are gone, the dump that torch made itself."""
    began_wall_s = clock.wall().timestamp() - (clock.now() - scene.began_s)

    async def dumped(rank: RankSeen) -> RankPiece | None:
        path = _dump_path(rank, scene.environs.get(rank.rank, {}))
        content = await asyncio.to_thread(left_file, path, MOST_BYTES, began_wall_s - 1)
        if content is None:
            return None
        suffix = "json" if content.startswith(b"{") else "pickle"
        whose = "written at its exception" if suffix == "json" else "torch's own"
        text = f"{whose}: a dump of {len(content)} bytes"
        return RankPiece(text, ArchiveMember(rank.rank, suffix, content))

    async def recorded(rank: RankSeen) -> RankPiece:
        try:
            return await _recorded(rank, scene.each_within_s)
        except NothingFoundError:
            if (left := await dumped(rank)) is not None:
                return left
            raise

    return await from_each(scene, recorded, gone=dumped)


async def _recorded(rank: RankSeen, within_s: float) -> RankPiece:
    if not has_server(rank.folder):
        raise NothingFoundError(
            "torch has no server in it: it has not imported torch, is exiting, or is not Python"
        )
    try:
        # a little earlier than the rank as a whole, so that its own dump can still be read
        content = await answer(rank.folder, _HANDLER, within_s * 0.9)
    except TorchServerError as error:
        raise NothingFoundError(f"its recorder: {error}") from error
    if len(content) > MOST_BYTES:
        raise NothingFoundError(f"its recorder has {len(content)} bytes, at most {MOST_BYTES} fit")
    trace = parse_collectives(content)
    if trace is None:
        raise NothingFoundError(f"its recorder answered nonsense: {content[:80]!r}")
    waits = f", waits in {trace.waits_in}" if trace.waits_in else ""
    count = f"{trace.entered} collectives" if trace.entered else "no collective yet"
    return RankPiece(f"{count}{waits}", ArchiveMember(rank.rank, "json", content))


def _dump_path(rank: RankSeen, environ: Mapping[str, str]) -> str:
    prefix = next((environ[name] for name in _PREFIXES if environ.get(name)), None)
    return f"{prefix or rank.folder / layout.FLIGHT_PREFIX}{rank.rank}"
