"""The log store, in memory and on a real server: what both must do."""

import dataclasses

import pytest
from msgspec.structs import replace

from everstep.bus.ports import Bus, LogScope, RankLogs
from everstep.messages.rank_logs import LogHeader, LogIndex, LogPiece, SentLogFile

_MIB = 1 << 20


@pytest.fixture
def store(bus: Bus) -> RankLogs:
    return bus.rank_logs


def piece(job: str, text: str, offset: int = 0, **changes: object) -> LogPiece:
    header = LogHeader(file=f"f-{job}", offset=offset, size=len(text), line=0, times=((1, 5),))
    made = LogPiece(
        job=job, round=0, node="n0", rank=0, stream="stdout", header=header, data=text.encode()
    )
    return replace(made, **changes)


async def texts(store: RankLogs, wanted: LogScope) -> list[str]:
    page = await store.read(wanted, 0, since_us=None, most_bytes=_MIB)
    assert page.is_end
    return [stored.piece.data.decode() for stored in page.pieces]


async def test_pieces_come_back_in_order_and_by_filter(store: RankLogs, job: str) -> None:
    written = [
        piece(job, "a\n"),
        piece(job, "b\n", 2, rank=1),
        piece(job, "c\n", 4, node="n1", rank=2),
        piece(job, "d\n", 6, stream="stderr"),
        piece(job, "e\n", 8, round=1),
    ]
    for one in written:
        await store.put(one)
    every = LogScope(job)
    page = await store.read(every, 0, since_us=None, most_bytes=_MIB)
    assert [stored.piece for stored in page.pieces] == written
    assert await texts(store, dataclasses.replace(every, round=1)) == ["e\n"]
    assert await texts(store, dataclasses.replace(every, rank=1)) == ["b\n"]
    assert await texts(store, dataclasses.replace(every, node="n1")) == ["c\n"]
    assert await texts(store, dataclasses.replace(every, stream="stderr", round=0)) == ["d\n"]
    assert await texts(store, LogScope(f"{job}-other")) == []


async def test_a_page_ends_and_goes_on(store: RankLogs, job: str) -> None:
    for number in range(4):
        await store.put(piece(job, f"{number}\n", 2 * number))
    wanted, seen, after = LogScope(job), [], 0
    first = await store.read(wanted, 0, since_us=None, most_bytes=1)
    assert not first.is_end
    while True:
        page = await store.read(wanted, after, since_us=None, most_bytes=1)
        seen += [stored.piece.data for stored in page.pieces]
        after = page.after
        if page.is_end:
            break
    assert seen == [b"0\n", b"1\n", b"2\n", b"3\n"]
    await store.put(piece(job, "5\n", 8))
    page = await store.read(wanted, after, since_us=None, most_bytes=_MIB)
    assert [stored.piece.data for stored in page.pieces] == [b"5\n"]


async def test_a_second_copy_is_not_stored(store: RankLogs, job: str) -> None:
    """A piece whose acknowledgement was lost is sent again."""
    await store.put(piece(job, "once\n"))
    await store.put(piece(job, "once\n"))
    assert await texts(store, LogScope(job)) == ["once\n"]


async def test_bytes_stay_bytes(store: RankLogs, job: str) -> None:
    data = bytes(range(256)) * 1000
    await store.put(piece(job, "", data=data))
    page = await store.read(LogScope(job), 0, since_us=None, most_bytes=_MIB)
    assert page.pieces[0].piece.data == data


async def test_an_index_is_replaced_and_listed(store: RankLogs, job: str) -> None:
    """Each round has one index, whose parts the nodes keep."""
    file = SentLogFile(rank=3, stream="stdout", file="f", size=5, sent=5, lines=1, is_over=True)
    for at_us, round, node in ((1, 0, "n0"), (2, 0, "n0"), (3, 0, "n1"), (4, 2, "n0")):
        index = LogIndex(job=job, round=round, node=node, at_us=at_us, files=(file,))
        await store.put_index(index)
    assert await store.rounds(job) == [0, 2]
    assert [(index.node, index.at_us) for index in await store.indexes(job, 0)] == [
        ("n0", 2),
        ("n1", 3),
    ]
    assert (await store.indexes(job, 2))[0].files == (file,)
    assert await store.indexes(job, 1) == []


async def test_the_output_of_a_round_or_a_job_is_removed(store: RankLogs, job: str) -> None:
    other = f"{job}-2"
    for of, round in ((job, 0), (job, 1), (other, 0)):
        await store.put(piece(of, f"{of}\n", round, round=round))
        await store.put_index(LogIndex(job=of, round=round, node="n0", at_us=1))
    await store.remove(job, 0)
    assert await store.rounds(job) == [1]
    assert len(await texts(store, LogScope(job))) == 1
    await store.remove(job)
    assert await store.rounds(job) == []
    assert await texts(store, LogScope(job)) == []
    assert await texts(store, LogScope(other)) == [f"{other}\n"]


async def test_logs_can_be_read_since_the_last_moment_of_the_calendar(
    store: RankLogs, job: str
) -> None:
    """`since_us` may be any moment; which lines are older, the reader of the pieces decides."""
    await store.put(piece(job, "a\n"))
    page = await store.read(LogScope(job), 0, since_us=253402300799_999999, most_bytes=_MIB)
    assert page.is_end
