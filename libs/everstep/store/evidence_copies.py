"""Copies of small pieces of evidence, kept here after the stream has forgotten them."""

import zlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import msgspec
from sqlalchemy import func, literal, select, update
from sqlalchemy.dialects import postgresql, sqlite

from everstep.messages import BlobRef
from everstep.store import tables
from everstep.store.database import Database

LARGEST = 128 * 1024
"""Larger blobs, such as flight recorders, stay in the stream only."""

_MOST_BYTES = (32 << 20) + 1
"""As the largest blob, and one byte for its end to be seen."""


@dataclass(frozen=True, slots=True)
class EvidenceCopy:
    """A copy, or why there is none."""

    data: bytes | None
    absent: str | None


@dataclass(frozen=True, slots=True)
class UncopiedBlobs:
    """Blobs that facts refer to, and that no replica has tried to copy yet."""

    refs: Sequence[BlobRef]
    end_n: int
    """How far the log was looked through for them."""


class EvidenceCopies:
    """The copies in one database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def find(self, id_: str) -> EvidenceCopy | None:
        """The copy, or why there is none; None when no copy was tried."""
        kept = tables.kept_blobs.c
        async with self._database.read() as connection:
            query = select(kept.body, kept.absent).where(kept.id == id_)
            row = (await connection.execute(query)).one_or_none()
        if row is None:
            return None
        try:
            data = None if row.body is None else _unpacked(row.body)
        except zlib.error:
            return EvidenceCopy(None, "its copy in the database is damaged")
        return EvidenceCopy(data, row.absent)

    async def copied(self, ids: Collection[str]) -> frozenset[str]:
        """The ids of those blobs that have a copy."""
        kept = tables.kept_blobs.c
        query = select(kept.id).where(kept.id.in_(ids), kept.body.is_not(None))
        async with self._database.read() as connection:
            return frozenset((await connection.execute(query)).scalars())

    async def wanted(self, after_n: int, *, most: int) -> UncopiedBlobs:
        """Look at the next `most` references behind a place in the log."""
        exits, evidence = tables.rank_exits.c, tables.evidence.c
        references: dict[int, BlobRef | None] = {}
        async with self._database.read() as connection:
            for n, blob in ((exits.n, exits.log), (evidence.n, evidence.blob)):
                query = select(n, blob).where(n > after_n, blob.is_not(None))
                for place, text in await connection.execute(query.order_by(n).limit(most)):
                    references[place] = _ref(text)
            looked_at = sorted(references)[:most]
            refs = [ref for n in looked_at if (ref := references[n]) is not None]
            small = {ref.id: ref for ref in refs if ref.size_bytes <= LARGEST}
            there = select(tables.kept_blobs.c.id).where(tables.kept_blobs.c.id.in_(small))
            for (id_,) in await connection.execute(there):
                del small[id_]
            if len(looked_at) < most:  # there is nothing up to the end
                head = (await connection.execute(select(tables.meta.c.projected_n))).scalar_one()
                return UncopiedBlobs(list(small.values()), max(head, after_n))
        return UncopiedBlobs(list(small.values()), looked_at[-1])

    async def keep(
        self, ref: BlobRef, data: bytes | None, *, absent: str | None, now_us: int
    ) -> None:
        """Write a copy, or why there is none. What is there already stays."""
        body = None if data is None else zlib.compress(data)
        row = {
            "id": ref.id,
            "job": ref.job,
            "kept_us": now_us,
            "size": 0 if body is None else len(body),
            "body": body,
            "absent": absent,
        }
        insert = sqlite.insert if self._database.kind == "sqlite" else postgresql.insert
        async with self._database.write() as connection:
            statement = insert(tables.kept_blobs).values(row)
            await connection.execute(statement.on_conflict_do_nothing())

    async def make_room(self, most_bytes: int, *, absent: str) -> int:
        """Drop the oldest copies until the rest takes at most `most_bytes`; return how many."""
        kept = tables.kept_blobs.c
        newer = func.sum(kept.size).over(order_by=(kept.kept_us.desc(), kept.id.desc()))
        sums = select(kept.id, newer.label("total")).where(kept.body.is_not(None)).subquery()
        old = select(sums.c.id).where(sums.c.total > literal(most_bytes))
        async with self._database.write() as connection:
            total = await connection.execute(select(func.sum(kept.size)))
            if (total.scalar_one() or 0) <= most_bytes:
                return 0
            gone = update(tables.kept_blobs).where(kept.id.in_(old))
            done = await connection.execute(gone.values(body=None, size=0, absent=absent))
        return int(done.rowcount)


def _unpacked(body: bytes) -> bytes:
    """The copy; `zlib.error` for one that no release of ours has made, such as a bomb."""
    unpacker = zlib.decompressobj()
    data = unpacker.decompress(body, _MOST_BYTES)
    if not unpacker.eof:
        raise zlib.error(f"it is cut short, or has more than {_MOST_BYTES} bytes")
    return data


def _ref(text: str) -> BlobRef | None:
    """The reference in a column; None for one that no release of ours has written."""
    try:
        return msgspec.json.decode(text, type=BlobRef)
    except (msgspec.DecodeError, ValueError):
        return None
