"""Ids that replicas agree on."""

from everstep.ids import id_from


def test_an_id_from_parts_is_the_same_in_every_release() -> None:
    """While releases N and N-1 run side by side, both must give a finding the same id."""
    made = id_from("lost", "llama", "node-1", "7", "2026-01-01T00:00:07+00:00")
    assert made == "b24c773d0441c84f9c937b5480b538a1"
    assert id_from("a", "b") != id_from("ab")


def test_an_id_with_a_key_follows_from_the_key_too() -> None:
    assert id_from("a", key=b"k") == id_from("a", key=b"k")
    assert len({id_from("a"), id_from("a", key=b"k"), id_from("a", key=b"l")}) == 3
