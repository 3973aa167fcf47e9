"""The uploader: real files, and a store in memory that can be cut off."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path

import pytest

from everstep.bus.ports import LogScope
from everstep.messages.rank_logs import LogPiece
from everstep_services.agent.output.log_files import LogFiles, LogOwner
from everstep_services.agent.output.log_upload import POSITION_FILE, LogUploader
from tests.fakes.bus import MemoryBus, MemoryServer
from tests.fakes.clock import NotedClock
from tests.unit.agent.orders import start
from tests.waiting import until_async

JOB, NODE = "toy", "n0"


class QuickClock(NotedClock):
    """The system's; waits are short, and counted."""

    def __init__(self) -> None:
        super().__init__(most_s=0.01)

    async def turn(self) -> None:
        """Wait until the uploader has looked at its files once more."""
        before = len(self.waits)
        await until_async(lambda: len(self.waits) > before, "a turn of the uploader")


class Node:
    """The files of a node, and the store."""

    def __init__(self, root: Path) -> None:
        self.server = MemoryServer()
        self.clock = QuickClock()
        self.store = MemoryBus(self.server).rank_logs
        self.logs = LogFiles(root, JOB)

    def uploader(self, bytes_per_s: int = 1 << 30) -> LogUploader:
        return LogUploader(JOB, NODE, self.logs, self.store, self.clock, bytes_per_s)

    async def make(self, round: int = 1) -> None:
        await asyncio.to_thread(self._make, round)

    def _make(self, round: int) -> None:
        for rank in range(2):
            self.logs.make(round, rank)
            self.logs.say(
                LogOwner(
                    job=JOB, round=round, rank=rank, node=NODE, slot=0, local_rank=rank, pid=1,
                    started_at=datetime.now(UTC),
                )
            )  # fmt: skip

    def write(self, text: bytes, rank: int = 0, stream: str = "stdout", round: int = 1) -> None:
        with self.logs.file(round, rank, stream).open("ab") as file:
            file.write(text)

    def stored(self, rank: int = 0, stream: str = "stdout") -> bytes:
        """The bytes in the store, put together by their places."""
        pieces = [
            p for p in self.server.log_pieces.values() if (p.rank, p.stream) == (rank, stream)
        ]
        return b"".join(piece.data for piece in pieces)

    async def has(self, text: bytes, rank: int = 0, stream: str = "stdout") -> None:
        await until_async(
            lambda: self.stored(rank, stream), "it is stored", holds=lambda data: data == text
        )


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


@asynccontextmanager
async def at_work(uploader: LogUploader) -> AsyncIterator[None]:
    task = asyncio.create_task(uploader.upload_for_ever())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


async def test_output_is_sent_while_ranks_run(node: Node) -> None:
    await node.make()
    uploader = node.uploader()
    uploader.begins(start())
    async with at_work(uploader):
        node.write(b"step 1\n")
        await node.has(b"step 1\n")
        node.write(b"no\n", rank=1, stream="stderr")
        await node.has(b"no\n", 1, "stderr")
        node.write(b"and the end")
        uploader.ends()
        await node.has(b"step 1\nand the end")
        await until_async(
            lambda: node.store.indexes(JOB, 1), "the index is complete",
            holds=lambda all_: all_ and all(file.is_over for file in all_[0].files),
        )  # fmt: skip
    (index,) = await node.store.indexes(JOB, 1)
    assert [(f.rank, f.stream, f.sent, f.lines) for f in index.files] == [
        (0, "stdout", 18, 1),
        (1, "stderr", 3, 1),
    ]


async def test_what_is_written_between_a_look_and_the_end_is_sent(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    await node.make()
    uploader = node.uploader()
    uploader.begins(start())
    put = node.store.put

    async def put_while_the_rank_ends(piece: LogPiece) -> None:
        await put(piece)
        if piece.data == b"step 1\n":
            await asyncio.to_thread(node.write, b"the last words")
            uploader.ends()

    monkeypatch.setattr(node.store, "put", put_while_the_rank_ends)
    async with at_work(uploader):
        node.write(b"step 1\n")
        await node.has(b"step 1\nthe last words")


async def test_what_an_earlier_run_wrote_is_not_sent_again(node: Node) -> None:
    await node.make()
    node.write(b"earlier\n")
    await node.make()  # the round's number comes again, with a record that begins anew
    uploader = node.uploader()
    uploader.begins(start())
    async with at_work(uploader):
        node.write(b"now\n")
        await node.has(b"now\n")


async def test_a_store_that_is_away_costs_nothing(node: Node) -> None:
    """The files are the queue: the agent catches up from them."""
    await node.make()
    uploader = node.uploader()
    uploader.begins(start())
    await node.server.set_up(False)
    async with at_work(uploader):
        for number in range(100):
            node.write(f"line {number}\n".encode())
        await node.clock.turn()
        await node.server.set_up(True)
        await node.has(b"".join(f"line {number}\n".encode() for number in range(100)))


async def test_a_truncated_and_a_replaced_file_go_on(node: Node) -> None:
    await node.make()
    uploader = node.uploader()
    uploader.begins(start())
    path = node.logs.file(1, 0, "stdout")
    async with at_work(uploader):
        node.write(b"first\n")
        await node.has(b"first\n")
        path.write_bytes(b"cut\n")
        await node.has(b"first\ncut\n")
        old = path.open("ab")
        os.rename(path, path.with_name("stdout.1"))
        path.write_bytes(b"new\n")
        await node.has(b"first\ncut\nnew\n")
        old.close()
    names = {piece.header.file for piece in node.server.log_pieces.values()}
    assert len(names) == 3


async def test_invalid_text_stays_and_secrets_do_not(node: Node) -> None:
    """A13.5: what looks like a secret does not leave the node."""
    await node.make()
    uploader = node.uploader()
    uploader.begins(start())
    async with at_work(uploader):
        node.write(b"\xff\xfe \x00 broken\nHF_TOKEN=hf_abcdefghijklmnopqrst\n")
        await until_async(node.stored, "it is stored")
    assert node.stored().startswith(b"\xff\xfe \x00 broken\n")
    assert b"hf_abc" not in node.stored()


async def test_a_link_is_not_followed(node: Node, tmp_path: Path) -> None:
    await node.make()
    other = tmp_path / "secret"
    other.write_text("not mine\n")
    path = node.logs.file(1, 0, "stdout")
    path.unlink()
    path.symlink_to(other)
    uploader = node.uploader()
    uploader.begins(start())
    async with at_work(uploader):
        node.write(b"mine\n", rank=1)
        await node.has(b"mine\n", 1)
    assert node.stored() == b""


async def test_the_rate_is_bounded_and_nothing_is_dropped(node: Node) -> None:
    await node.make()
    uploader = node.uploader(bytes_per_s=400_000)
    uploader.begins(start())
    text = b"x" * 99 + b"\n"
    node.write(text * 10_000)
    async with at_work(uploader):
        await node.has(text * 10_000)


async def test_the_next_agent_finishes_what_a_dead_one_left(node: Node) -> None:
    """A round whose agent was killed: its output is still on the node."""
    await node.make()
    uploader = node.uploader()
    uploader.begins(start())
    async with at_work(uploader):
        node.write(b"before\n")
        await node.has(b"before\n")
        await until_async(
            (node.logs.folder(1, 0) / POSITION_FILE).read_bytes, "it is noted",
            holds=lambda data: b'"sent":7' in data, despite=OSError,
        )  # fmt: skip
    node.write(b"after\n")  # and nobody is left to send it
    async with at_work(node.uploader()):
        await node.has(b"before\nafter\n")
    other = LogUploader(JOB, "n1", node.logs, node.store, node.clock, 1 << 30)
    async with at_work(other):  # on a shared file system, another node leaves it alone
        await node.clock.turn()
    assert node.stored() == b"before\nafter\n"


async def test_a_farewell_has_a_bound(node: Node) -> None:
    await node.make()
    uploader = node.uploader()
    uploader.begins(start())
    node.write(b"some\n")
    async with at_work(uploader):
        await uploader.finish(10.0)
    assert node.stored() == b"some\n"
    await node.server.set_up(False)
    uploader = node.uploader()
    uploader.begins(start())
    node.write(b"more\n")
    async with at_work(uploader):
        await uploader.finish(0.05)


@pytest.mark.parametrize("hurt", ["full", "folder"])
async def test_positions_that_cannot_be_written_only_cost_a_second_copy(
    node: Node, hurt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> Callable[..., int]:
        raise OSError(28, "No space left on device")

    await node.make()
    if hurt == "full":
        monkeypatch.setattr(Path, "write_bytes", full)
    else:
        (node.logs.folder(1, 0) / POSITION_FILE).mkdir()
    uploader = node.uploader()
    uploader.begins(start())
    async with at_work(uploader):
        node.write(b"all the same\n")
        await node.has(b"all the same\n")
    page = await node.store.read(LogScope(JOB), 0, since_us=None, most_bytes=1)
    assert page.pieces
