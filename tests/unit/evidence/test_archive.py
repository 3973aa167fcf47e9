"""Archives of evidence: what is packed comes back, and what is hostile ends in one error."""

import gzip
import io
import json
import tarfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.evidence import archive
from everstep.evidence.archive import ArchiveMember, BadArchiveError, members, pack, unpack

PACKED = pack(
    [ArchiveMember(0, "json", b"{}"), ArchiveMember(None, "txt", b"dmesg")],
    {1: "the rank had exited"},
)


def _tar(*files: tuple[tarfile.TarInfo, bytes]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for header, content in files:
            header.size = header.size or len(content)
            tar.addfile(header, io.BytesIO(content))
    return packed.getvalue()


def _named(name: str) -> tarfile.TarInfo:
    return tarfile.TarInfo(name)


def _of_type(kind: bytes) -> tarfile.TarInfo:
    header = tarfile.TarInfo("rank_0.json")
    header.type, header.linkname = kind, "/etc/passwd"
    return header


def _sized(size: int) -> bytes:
    header = tarfile.TarInfo("rank_0.json")
    header.size = size
    return gzip.compress(header.tobuf(tarfile.GNU_FORMAT) + bytes(1 << 16))


@given(
    ranks=st.dictionaries(st.integers(0, 9_999_999), st.binary(max_size=2000), max_size=5),
    node=st.none() | st.binary(max_size=600),
    missing=st.dictionaries(st.integers(0, 9_999_999), st.text(max_size=50), max_size=5),
)
def test_what_is_packed_comes_back(
    ranks: dict[int, bytes], node: bytes | None, missing: dict[int, str]
) -> None:
    packed = [ArchiveMember(rank, "json", content) for rank, content in ranks.items()]
    packed += [] if node is None else [ArchiveMember(None, "txt", node)]
    found = unpack(pack(packed, missing))
    assert list(found.members) == packed
    assert found.missing == missing


def test_equal_evidence_is_the_same_blob() -> None:
    again = [ArchiveMember(0, "json", b"{}"), ArchiveMember(None, "txt", b"dmesg")]
    assert pack(again, {1: "the rank had exited"}) == PACKED


def test_a_person_can_unpack_it_with_tar(tmp_path: Path) -> None:
    with tarfile.open(fileobj=io.BytesIO(PACKED)) as tar:
        tar.extractall(tmp_path, filter="data")
    assert (tmp_path / "rank_0.json").read_bytes() == b"{}"
    assert (tmp_path / "node.txt").read_bytes() == b"dmesg"
    assert json.loads((tmp_path / "missing.json").read_text()) == {"1": "the rank had exited"}


def test_it_may_be_read_from_a_file_one_member_at_a_time() -> None:
    assert [one.name for one in members(io.BytesIO(PACKED))] == ["rank_0.json", "node.txt"]


@pytest.mark.parametrize("name", ["../rank_0.json", "/rank_0.json", "rank_0", "rank_.json", "x"])
def test_names_of_another_form_are_refused(name: str) -> None:
    """A13.3: no path of an archive leads anywhere."""
    with pytest.raises(BadArchiveError, match="may be in it"):
        unpack(_tar((_named(name), b"x")))


@pytest.mark.parametrize(
    "kind",
    [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE,
     tarfile.GNUTYPE_SPARSE, tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME],
)  # fmt: skip
def test_what_is_no_plain_file_is_refused(kind: bytes) -> None:
    """A13.3: links, devices and headers that change others are refused."""
    with pytest.raises(BadArchiveError, match="not a plain file"):
        unpack(gzip.compress(_of_type(kind).tobuf(tarfile.USTAR_FORMAT) + bytes(1 << 16)))


def test_a_name_that_comes_twice_is_refused() -> None:
    with pytest.raises(BadArchiveError, match="twice"):
        unpack(_tar((_named("rank_0.json"), b"x"), (_named("rank_0.json"), b"y")))


def test_a_bomb_ends_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """A13.3: what unpacks to too much is not unpacked."""
    zeros = bytes(archive.MAX_MEMBER_BYTES)
    bomb = _tar(*((_named(f"rank_{rank}.json"), zeros) for rank in range(2)))
    with pytest.raises(BadArchiveError, match="as a bomb would"):
        unpack(bomb)
    monkeypatch.setattr(archive, "MAX_BYTES", 10_000)
    with pytest.raises(BadArchiveError, match="more than 10000 bytes unpacked"):
        unpack(bomb)


@pytest.mark.parametrize("size", [archive.MAX_MEMBER_BYTES + 1, 10 << 30, -1])
def test_a_file_that_claims_to_be_huge_is_refused(size: int) -> None:
    """A13.3: ten gigabytes are refused by what the header says."""
    with pytest.raises(BadArchiveError, match="at most"):
        unpack(_sized(size))


def test_many_files_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "MAX_MEMBERS", 3)
    with pytest.raises(BadArchiveError, match="more than 3 files"):
        unpack(_tar(*((_named(f"rank_{rank}.json"), b"") for rank in range(5))))


@pytest.mark.parametrize("content", [b"[]", b"{", b'{"x": "y"}', b"[" * 100_000, b"\xff"])
def test_reasons_that_are_none_are_refused(content: bytes) -> None:
    with pytest.raises(BadArchiveError, match=r"missing\.json"):
        unpack(_tar((_named("missing.json"), content)))


def test_bytes_that_are_no_archive_are_refused() -> None:
    for junk in (b"", b"x" * 600, gzip.compress(b"x" * 2000), gzip.compress(b"short")):
        with pytest.raises(BadArchiveError):
            unpack(junk)


@given(cut=st.integers(0, len(PACKED) - 1), flip=st.integers(0, 255))
def test_damage_ends_in_that_error_or_is_seen_elsewhere(cut: int, flip: int) -> None:
    """Whatever a byte becomes and wherever it ends: no other exception."""
    damaged = bytearray(PACKED)
    damaged[cut] ^= flip
    for hostile in (PACKED[:cut], bytes(damaged)):
        try:
            unpack(hostile)
        except BadArchiveError:
            continue


def test_only_names_of_that_form_are_packed() -> None:
    with pytest.raises(ValueError, match="cannot be in an archive"):
        pack([ArchiveMember(0, "../x", b"")], {})
