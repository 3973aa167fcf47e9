"""Stored bodies of documents: readable while small, bounded when opened, named when damaged."""

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from everstep.bus.documents import COMPRESSED_ABOVE_BYTES, MAX_BODY_BYTES, packed, unpacked
from everstep.bus.errors import DocumentDamagedError, MessageTooLargeError

LARGE = b"a rather large document " * 10_000


@given(st.binary(max_size=200) | st.binary(max_size=20).map(lambda end: b"\x28\xb5\x2f\xfd" + end))
def test_whatever_is_written_is_read(body: bytes) -> None:
    assert unpacked(packed(body, "x"), "x") == body


def test_small_bodies_stay_readable() -> None:
    body = b"x" * COMPRESSED_ABOVE_BYTES
    assert packed(body, "x") == body
    assert len(packed(body + b"x", "x")) < 1000


@pytest.mark.parametrize(
    "stored",
    [
        packed(LARGE, "x")[:-1],
        packed(LARGE, "x")[:20],
        packed(LARGE, "x")[:4],
        packed(LARGE, "x") + b"more",
        packed(LARGE, "x")[:-8] + b"damaged!",
        zstandard.ZstdCompressor().compressobj().compress(LARGE) + b"\x28\xb5\x2f\xfd",
        b"\x28\xb5\x2f\xfd" + b"\xff" * 100,
    ],
    ids=["cut short", "cut", "only its start", "longer", "changed", "of another kind", "noise"],
)
def test_a_damaged_body_is_named(stored: bytes) -> None:
    if not stored.startswith(b"\x28\xb5\x2f\xfd"):
        stored = b"\x28\xb5\x2f\xfd" + stored
    with pytest.raises(DocumentDamagedError, match=r"ROUNDS/j is damaged: .+ delete it") as caught:
        unpacked(stored, "ROUNDS/j")
    assert caught.value.name == "ROUNDS/j"


def test_a_body_that_would_grow_past_the_limit_is_not_opened() -> None:
    """A small body that unpacks to a large one (A13.3)."""
    bomb = zstandard.compress(bytes(MAX_BODY_BYTES + 1))
    assert len(bomb) < 10_000
    with pytest.raises(DocumentDamagedError, match=f"{MAX_BODY_BYTES} is the limit"):
        unpacked(bomb, "x")


def test_a_body_that_nobody_could_read_is_not_written() -> None:
    with pytest.raises(MessageTooLargeError):
        packed(bytes(MAX_BODY_BYTES + 1), "x")
