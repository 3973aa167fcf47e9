"""NCCL's RAS is asked as its client asks it, by the agent that has rank 0."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from everstep.clock import SystemClock
from everstep_services.agent.collectors.collection import NothingFoundError, Scene
from everstep_services.agent.collectors.nccl_ras import nccl_status
from everstep_services.agent.ranks.protocol import RankSeen
from tests.fakes import nccl_ras as fake
from trainer_sdk.page import make_page

CLOCK = SystemClock()
ANSWER = fake.answer(fake.communicator({0: {"AllReduce": 9}, 1: {"AllReduce": 8}}))


def scene(folder: Path, address: str, ranks: Sequence[int] = (0, 1), **more: str) -> Scene:
    page = make_page(str(folder / "page"))
    seen = [RankSeen(rank, 100 + rank, page, folder) for rank in ranks]
    return Scene(seen, 30.0, environs={0: {"NCCL_RAS_ADDR": address, **more}})


async def test_the_answer_is_kept_and_summed_up(tmp_path: Path) -> None:
    async with fake.ras_server(ANSWER) as address:
        found = await nccl_status(scene(tmp_path, address), CLOCK)
    assert found is not None
    assert found.content == ANSWER
    assert "rank 1 launched 8 AllReduce, and most of the others 9" in found.summary


async def test_an_older_release_tells_it_in_words(tmp_path: Path) -> None:
    words = (fake.IN_WORDS + fake.DIFFERENT + fake.ALONE).encode()
    async with fake.ras_server(words, has_json=False) as address:
        found = await nccl_status(scene(tmp_path, address), CLOCK)
    assert found is not None
    assert "rank 6 launched 60 AllReduce" in found.summary


async def test_a_stopped_rank_may_have_taken_the_question(tmp_path: Path) -> None:
    """All ranks of a node listen on one port."""
    async with fake.ras_server(ANSWER, silent_first=2) as address:
        assert await nccl_status(scene(tmp_path, address), CLOCK) is not None
    async with fake.ras_server(ANSWER, silent_first=99) as address:
        with pytest.raises(NothingFoundError, match="does not answer"):
            await nccl_status(scene(tmp_path, address), CLOCK)


async def test_nobody_asks_where_there_is_nothing_to_hear(tmp_path: Path) -> None:
    async with fake.ras_server(ANSWER) as address:
        here = scene(tmp_path, address)
        others = (
            scene(tmp_path, address, ranks=(1,)),  # the agent of rank 0 asks for all
            scene(tmp_path, address, NCCL_RAS_ENABLE="0"),
            replace(here, within_s=0.3),  # after a crash: RAS waits for whole seconds
            scene(tmp_path, "127.0.0.1:none"),
        )
        assert [await nccl_status(one, CLOCK) for one in others] == [None] * 4
    assert await nccl_status(here, CLOCK) is None  # nobody listens any more


async def test_what_another_job_or_program_says_is_not_ours(tmp_path: Path) -> None:
    other = fake.answer(fake.communicator({0: {}, 1: {}}, pids=500))
    async with fake.ras_server(other) as address:
        assert await nccl_status(scene(tmp_path, address), CLOCK) is None

    async def refuse(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"SSH-2.0-OpenSSH_9.2\r\n")
        writer.close()

    server = await asyncio.start_server(refuse, "127.0.0.1", 0)
    async with server:
        host, port = server.sockets[0].getsockname()
        assert await nccl_status(scene(tmp_path, f"{host}:{port}"), CLOCK) is None
    async with fake.ras_server(b"ERROR: internal\n") as address:
        with pytest.raises(NothingFoundError, match="not a report of NCCL's RAS"):
            await nccl_status(scene(tmp_path, address), CLOCK)
