"""The flight recorders of each rank, from torch's server in it, or from the dump of torch."""

import asyncio
from collections.abc import Mapping

from everstep.clock import Clock
from everstep.evidence.archive import ArchiveMember
from everstep_services.agent.collectors.collection import (
    EvidenceFound,
    NothingFoundError,
    RankPiece,
    Scene,
    from_each,
    left_file,
)
from everstep_services.agent.ranks.protocol import RankSeen
from everstep_services.agent.stalls.collectives import CollectiveState, parse_collectives
from everstep_services.agent.stalls.recorder_traces import joined, read_traces
from everstep_services.agent.stalls.torch_server import TorchServerError, has_server
from trainer_sdk import layout

MOST_BYTES = 16 << 20
_SIZES = b'"all_to_all": {'
_PREFIXES = (
    "TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "TORCHCOMM_FR_DUMP_TEMP_FILE",
)  # fmt: skip


async def flight_recorders(scene: Scene, clock: Clock) -> EvidenceFound | None:
    """The recorders of each rank; for ranks that are gone, the dump that torch made itself."""
    began_wall_s = clock.wall().timestamp() - (clock.now() - scene.began_s)

    async def dumped(rank: RankSeen, since_s: float = began_wall_s - 1) -> RankPiece | None:
        content = await _left(scene, rank, since_s)
        if content is None:
            return None
        suffix = "json" if content.startswith(b"{") else "pickle"
        whose = "written at its exception" if suffix == "json" else "torch's own"
        text = f"{whose}: a dump of {len(content)} bytes"
        return RankPiece(text, ArchiveMember(rank.rank, suffix, content))

    async def recorded(rank: RankSeen) -> RankPiece:
        try:
            state, piece = await _recorded(rank, scene.each_within_s)
        except NothingFoundError:
            if (left := await dumped(rank)) is not None:
                return left
            raise
        if state.waits_in:
            return piece
        # Torch dumps what hangs before it gives that up: then nothing hangs any more, or is newer.
        left = await dumped(rank, max(began_wall_s - 1, state.entered_at_s or 0.0))
        return left or piece

    return await from_each(scene, recorded, gone=dumped)


async def left_recorders(scene: Scene, clock: Clock) -> EvidenceFound | None:
    """The dumps that ended ranks have left; None for none."""
    dumps = await flight_recorders(scene, clock)
    if dumps is None or not dumps.members:
        return None
    return EvidenceFound(dumps.summary, members=dumps.members)


async def split_sizes(scene: Scene, clock: Clock) -> EvidenceFound | None:
    """The dumps of ended ranks that have the sizes of the all_to_all that broke; None for none."""
    del clock
    members = []
    for rank in scene.ranks:
        content = await _left(scene, rank)
        if content is not None and content.startswith(b"{") and _SIZES in content:
            members.append(ArchiveMember(rank.rank, "json", content))
    text = f"ranks {', '.join(str(member.rank) for member in members)}"
    return EvidenceFound(text, members=tuple(members)) if members else None


async def _left(scene: Scene, rank: RankSeen, since_s: float = 0.0) -> bytes | None:
    path = _dump_path(rank, scene.environs.get(rank.rank, {}))
    return await asyncio.to_thread(left_file, path, MOST_BYTES, since_s)


async def _recorded(rank: RankSeen, within_s: float) -> tuple[CollectiveState, RankPiece]:
    if not has_server(rank.folder):
        raise NothingFoundError(
            "torch has no server in it: it has not imported torch, is exiting, or is not Python"
        )
    try:
        # a little earlier than the rank as a whole, so that its own dump can still be read
        traces = await read_traces(rank.folder, within_s * 0.9, is_whole=True)
    except TorchServerError as error:
        raise NothingFoundError(f"its recorder: {error}") from error
    state = parse_collectives(traces)
    if state is None:
        raise NothingFoundError(f"its recorder answered nonsense: {traces[0][:80]!r}")
    content = await asyncio.to_thread(joined, traces)
    if len(content) > MOST_BYTES:
        raise NothingFoundError(f"its recorder has {len(content)} bytes, at most {MOST_BYTES} fit")
    waits = f", waits in {state.waits_in}" if state.waits_in else ""
    count = f"{state.entered} collectives" if state.entered else "no collective yet"
    piece = RankPiece(f"{count}{waits}", ArchiveMember(rank.rank, "json", content))
    return state, piece


def _dump_path(rank: RankSeen, environ: Mapping[str, str]) -> str:
    prefix = next((environ[name] for name in _PREFIXES if environ.get(name)), None)
    return f"{prefix or rank.folder / layout.FLIGHT_PREFIX}{rank.rank}"
