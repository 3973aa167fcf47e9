"""What a follower of documents takes for news, when the server that it asks lags behind."""

from typing import cast

import pytest

from everstep.bus.documents import Bucket, _News
from everstep.bus.jetstream import JetStream, Stored


class Copy:
    """The last message of a document, as one server knows it."""

    def __init__(self) -> None:
        self.stored: Stored | None = None

    async def last(self, stream: str, subject: str) -> Stored | None:
        assert (stream, subject) == ("KV_CONTROL", "$KV.CONTROL.j1")
        return self.stored

    last_anywhere = last


def at(revision: int, second: str, data: bytes = b"x") -> Stored:
    return Stored(revision, data, {}, f"2026-11-29T00:00:{second}")


async def news_of(*copies: Stored | None) -> list[int]:
    """The revisions that a follower hears of when it reads these one after the other."""
    copy = Copy()
    news = _News(Bucket(cast("JetStream", copy), "CONTROL"), "j1")
    heard = []
    for stored in copies:
        copy.stored = stored
        await news._read_back()
        heard += [document.revision for document in news._unseen.values()]
        news._unseen.clear()
    return heard


@pytest.mark.parametrize(
    ("copies", "heard"),
    [
        ([at(5, "10"), at(6, "11")], [5, 6]),
        ([at(6, "11"), at(5, "10"), at(6, "11"), at(7, "12")], [6, 7]),  # a copy that lags
        ([at(6, "11.75"), at(5, "11.7")], [6]),
        ([at(6, "11"), at(1, "12"), at(2, "13")], [6, 1, 2]),  # wiped, and written again
        ([at(6, "11"), None, at(6, "11"), None, at(7, "12")], [6, 7]),  # a copy that has none
        ([at(6, "11"), None, None, None, at(1, "12")], [6, 0, 1]),  # wiped
        ([None, None, at(1, "10")], [0, 1]),
    ],
)
async def test_a_lower_revision_is_no_news_unless_the_bucket_began_again(
    copies: list[Stored | None], heard: list[int]
) -> None:
    assert await news_of(*copies) == heard
