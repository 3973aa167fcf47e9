"""What every bus promises about large documents: they come back as they were written."""

import random

import msgspec
import pytest

from everstep.bus.documents import COMPRESSED_ABOVE_BYTES
from everstep.bus.ports import Bus
from tests.unit.rendezvous.documents import round_document

MAGIC = b"\x28\xb5\x2f\xfd"
NOISE = random.Random(7).randbytes(300_000)
BODIES = {
    "empty": b"",
    "small": b'{"small":true}',
    "at the limit": b"a" * COMPRESSED_ABOVE_BYTES,
    "above the limit": b"a" * (COMPRESSED_ABOVE_BYTES + 1),
    "noise": NOISE,
    "looks compressed": MAGIC + b"but is not",
    "far above what the server takes": b'{"much":"' + b"of the same, " * 400_000 + b'"}',
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
async def test_a_document_of_any_size_comes_back(
    two: tuple[Bus, Bus], job: str, body: bytes
) -> None:
    one, other = (bus.documents("ROUNDS") for bus in two)
    revision = await one.put(job, body, revision=0)
    found = await other.get(job)
    assert (found.data, found.revision) == (body, revision)
    async with other.follow(job) as news:
        assert (await anext(news)).data == body
        await one.put(job, body + b" and more", revision=revision)
        assert (await anext(news)).data == body + b" and more"


@pytest.mark.parametrize("name_characters", [12, 63])
async def test_twelve_thousand_five_hundred_seats_fit_into_one_document(
    two: tuple[Bus, Bus], job: str, name_characters: int
) -> None:
    document = round_document(job, seats=12_500, name_characters=name_characters)
    body = msgspec.json.encode(document)
    revision = await two[0].documents("ROUNDS").put(job, body, revision=0)
    found = await two[1].documents("ROUNDS").get(job)
    assert found.revision == revision
    assert found.data is not None
    assert msgspec.json.decode(found.data, type=type(document)) == document
