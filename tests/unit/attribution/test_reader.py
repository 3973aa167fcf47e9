"""Evidence is read for people within bounds, and what cannot be read is refused in a line."""

import asyncio

import pytest

from everstep.bus.requests import RefusalError
from everstep.evidence.archive import ArchiveMember, pack
from everstep.messages import BlobRef, EvidencePiece, ReadEvidence
from everstep.messages.codec import encode
from everstep_services.attribution import answers
from everstep_services.attribution.answers import EvidenceReader
from tests.fakes.bus import MemoryBlobs, MemoryBus, MemoryServer


def stack(*frames: str) -> bytes:
    """A stack as py-spy prints it, the innermost frame first."""
    lines = "\n".join(f"    {frame} (train.py:{n})" for n, frame in enumerate(frames, 1))
    return f'Process 7: python train.py\n\nThread 7 (active): "MainThread"\n{lines}\n'.encode()


async def asked(bus: MemoryBus, *contents: bytes, rank: int | None = None) -> ReadEvidence:
    refs = [await bus.blobs.put("j", content) for content in contents]
    return question(*refs, rank=rank)


def question(*refs: BlobRef, rank: int | None = None) -> ReadEvidence:
    pieces = tuple(
        EvidencePiece(evidence="stacks", node="n1", fact="f", rank=rank, blob=ref) for ref in refs
    )
    return ReadEvidence(job="j", evidence=pieces)


async def test_an_answer_is_cut_until_a_message_can_carry_it() -> None:
    """A thousand ranks that all stand elsewhere are still an answer (A11.1)."""
    bus = MemoryBus(MemoryServer())
    frames = ["f" * 240 + str(n) for n in range(64)]
    members = [ArchiveMember(rank, "txt", stack(f"here_{rank}", *frames)) for rank in range(60)]
    found = await EvidenceReader(bus).stacks(await asked(bus, pack(members, {})))
    assert (found.ranks, found.is_cut) == (60, True)
    assert found.stacks
    assert len(encode(found)) <= 512 * 1024


async def test_a_damaged_archive_costs_only_its_own_node() -> None:
    bus = MemoryBus(MemoryServer())
    whole = pack([ArchiveMember(0, "txt", stack("step"))], {})
    found = await EvidenceReader(bus).stacks(await asked(bus, whole[:40], whole))
    assert found.ranks == 1
    assert found.notes


@pytest.mark.parametrize("content", [b"", b"\x1f\x8bno archive", b"\xff\xfe\0"])
async def test_what_holds_no_stack_is_refused_with_the_reason(content: bytes) -> None:
    bus = MemoryBus(MemoryServer())
    with pytest.raises(RefusalError, match=r"^no stack can be read: .") as refused:
        await EvidenceReader(bus).stacks(await asked(bus, content, rank=1))
    assert refused.value.code == "422"


async def test_more_than_can_be_held_is_not_fetched() -> None:
    bus = MemoryBus(MemoryServer())
    huge = BlobRef(job="j", id="a", size_bytes=1 << 40, parts=1)
    with pytest.raises(RefusalError, match="more than 256 MiB"):
        await EvidenceReader(bus).stacks(question(huge))


async def test_what_does_not_come_in_time_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bus that answers nothing: a piece is given up first, all of them together at last."""
    bus = MemoryBus(MemoryServer())
    wanted = await asked(bus, stack("step"), rank=0)

    async def never(_: MemoryBlobs, ref: BlobRef) -> bytes:
        await asyncio.get_running_loop().create_future()
        raise AssertionError(ref)

    monkeypatch.setattr(MemoryBlobs, "get", never)
    monkeypatch.setattr(answers, "_FETCH_S", 0.01)
    with pytest.raises(RefusalError, match="stacks of n1: the bus did not bring it in time"):
        await EvidenceReader(bus).stacks(wanted)
    monkeypatch.setattr(answers, "_FETCH_S", 60.0)
    monkeypatch.setattr(answers, "_FETCH_ALL_S", 0.01)
    with pytest.raises(RefusalError, match=r"not all came within 0\.01 s"):
        await EvidenceReader(bus).stacks(wanted)


async def test_those_who_come_when_many_wait_are_sent_away() -> None:
    """Reading for people never takes more than one reading's worth of memory."""
    bus = MemoryBus(MemoryServer())
    reader = EvidenceReader(bus)
    wanted = await asked(bus, stack("step"), rank=0)
    answers = await asyncio.gather(
        *(reader.stacks(wanted) for _ in range(6)), return_exceptions=True
    )
    refused = [one for one in answers if isinstance(one, RefusalError)]
    assert [one.code for one in refused] == ["503", "503"]
    assert len(answers) - len(refused) == 4
